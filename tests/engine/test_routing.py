"""Where requests go: known beginnings, the bounds of that, loads by hand, and engines that are gone."""

from collections import Counter
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.request import Request
from jaxserve.engine.routing import Load, Router, fingerprints
from jaxserve.engine.stats import EngineStats

PAGE = 16
SEATS = 32  # an eighth is 4


def chain(tokens, salt=None) -> list[int]:
    return fingerprints(Request(request_id="a", prompt_token_ids=tuple(tokens), cache_salt=salt), PAGE)


def loads(*num_open: int) -> dict[int, Load]:
    return {i: Load(max(0, count - SEATS), min(count, SEATS), num_seats=SEATS) for i, count in enumerate(num_open)}


def test_a_fingerprint_stands_for_all_tokens_so_far_and_the_salt():
    tokens = list(range(40))
    assert len(chain(tokens)) == 2
    assert chain(tokens[:15]) == []
    assert chain(tokens[:32]) == chain(tokens[:39]) == chain(tokens)
    changed = chain([99, *tokens[1:]])
    assert not set(changed) & set(chain(tokens))  # also of the page behind the changed one
    assert chain([*tokens[:20], 99, *tokens[21:]])[0] == chain(tokens)[0]
    assert len({tuple(chain(tokens, salt)) for salt in (None, "", "a", "b")}) == 4


def test_equals_take_turns():
    router = Router(3)
    assert [router.choose([], loads(0, 0, 0)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_front_ends_begin_alike_with_what_none_has_seen():
    prompts = [chain([i] * 20) for i in range(40)]
    chosen = [[Router(2).choose(prompt, loads(0, 0)) for prompt in prompts] for _ in range(2)]
    assert chosen[0] == chosen[1]
    assert 10 <= sum(chosen[0]) <= 30
    assert [Router(2).choose(prompt, loads(1, 0)) for prompt in prompts] == [1] * 40
    # The same in every process, whatever seeds Python's hash there.
    first_page = b"".join(token.to_bytes(4, "little") for token in range(16))
    assert chain(range(16)) == [int.from_bytes(sha256(first_page).digest()[:8], "big")]


def test_waiting_comes_before_running_and_running_before_pages():
    router = Router(2)
    assert router.choose([], {0: Load(1, 5, 0.0, 8), 1: Load(0, 8, 0.9, 8)}) == 1
    assert router.choose([], {0: Load(0, 5, 0.1, 8), 1: Load(0, 4, 0.9, 8)}) == 1
    assert router.choose([], {0: Load(0, 4, 0.9, 8), 1: Load(0, 4, 0.1, 8)}) == 1


def test_the_longest_known_beginning_wins():
    router = Router(2)
    first, second = list(range(64)), list(range(500, 564))
    assert router.choose(chain(first), loads(0, 0)) == 0
    assert router.choose(chain(second), loads(0, 0)) == 1
    assert router.choose(chain(first[:32] + second), loads(1, 0)) == 0  # two pages known there, none here
    assert router.choose(chain(first), loads(0, 1)) == 0
    assert router.choose(chain(first[:32]), loads(3, 0)) == 0
    # One page is known to both, the rest to the busier one.
    assert router.choose(chain(first[:16]), loads(9, 0)) == 1
    assert router.choose(chain(first), loads(2, 0)) == 0
    assert router.choose(chain([*first[:16], *second]), loads(2, 0)) == 1


def test_a_known_beginning_is_left_where_too_much_is_to_be_done():
    router = Router(2)
    prompt = chain(range(64))
    assert router.choose(prompt, loads(0, 0)) == 0
    assert router.choose(prompt, loads(10, 6)) == 0
    assert router.choose(prompt, loads(11, 6)) == 1  # five more than the other
    assert router.choose(prompt, loads(0, 0)) in (0, 1)  # both know it now; load decides
    assert router.choose(prompt, loads(2, 1)) == 1

    router = Router(2)
    assert router.choose(prompt, loads(0, 0)) == 0
    assert router.choose(prompt, loads(SEATS, SEATS - 1)) == 1  # it would wait at the one, run at the other
    router.forget(1)
    assert router.choose(prompt, loads(SEATS + 3, SEATS + 1)) == 0  # it waits everywhere


def test_few_seats_allow_two_more():
    router = Router(2)
    prompt = chain(range(64))
    few = {i: Load(0, running, num_seats=8) for i, running in enumerate((3, 1))}
    assert router.choose(prompt, {0: few[0]}) == 0
    assert router.choose(prompt, few) == 0
    assert router.choose(prompt, few | {0: Load(0, 4, num_seats=8)}) == 1


def test_what_is_lost_is_not_chosen_and_forgotten():
    router = Router(2)
    prompt = chain(range(64))
    assert router.choose(prompt, loads(0, 0)) == 0
    assert router.choose(prompt, {1: Load()}) == 1
    router.forget(1)
    assert len(router) == 4
    assert router.choose(prompt, loads(1, 0)) == 0
    router.forget(0)
    assert len(router) == 0
    assert router.choose(prompt, loads(1, 0)) == 1


def test_memory_is_bounded_and_beginnings_stay_longest():
    router = Router(2, max_fingerprints=6)
    old, new = chain(range(64)), chain(range(500, 548))
    router.choose(old, loads(0, 9))
    router.choose(new, loads(9, 0))
    assert len(router) == 6
    assert router._num_known(old, loads(0, 0)) == {0: 3, 1: 0}  # its last page made room
    router.choose(old[:1], loads(0, 9))  # used again: younger than the other prompt
    router.choose(chain(range(900, 980)), loads(0, 9))
    assert router._num_known(old, loads(0, 0)) == {0: 1, 1: 0}
    assert router._num_known(new, loads(0, 0)) == {0: 0, 1: 0}


@given(
    beginnings=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=60),
    num_engines=st.integers(1, 4),
    others=st.lists(st.integers(0, 2), min_size=4, max_size=4),
)
def test_one_beginning_goes_to_one_engine_while_loads_are_even(beginnings, num_engines, others):
    router = Router(num_engines)
    even = loads(*others[:num_engines])  # two more are no load
    homes: dict[int, int] = {}
    for beginning, num_more in beginnings:
        prompt = chain([beginning] * 32 + list(range(1000, 1000 + num_more)))
        chosen = router.choose(prompt, even)
        assert homes.setdefault(beginning, chosen) == chosen


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=150), st.integers(2, 4))
def test_no_engine_gets_far_ahead_of_the_least_loaded(requests, num_engines):
    router = Router(num_engines)
    num_open = [0] * num_engines
    for beginning, has_one_ended in requests:
        chosen = router.choose(chain([beginning] * 48), loads(*num_open))
        num_open[chosen] += 1
        assert num_open[chosen] - min(num_open) <= SEATS // 8 + 1
        if has_one_ended:
            fullest = max(range(num_engines), key=num_open.__getitem__)
            num_open[fullest] -= 1


def test_a_beginning_that_all_share_spreads_over_all():
    router = Router(3)
    num_open = [0, 0, 0]
    for i in range(60):
        num_open[router.choose(chain([7] * 160 + [i] * 16), loads(*num_open))] += 1
    assert max(num_open) - min(num_open) <= 4
    assert sum(num_open) == 60


@pytest.mark.parametrize(
    ("stats", "own", "expected"),
    [
        # Nothing sent since: what the heartbeat says.
        ({"num_running": 3, "num_waiting": 0}, (0, 0), (0, 3)),
        # Two of its own have ended since, four have come; three are another front end's.
        ({"num_running": 5}, (2, 4), (0, 7)),
        # Ten for eight seats.
        ({"num_running": 8, "num_waiting": 1}, (0, 1), (2, 8)),
        # They wait beside free seats and free pages: in a moment they run.
        ({"num_running": 0, "num_waiting": 3}, (0, 0), (0, 3)),
        # They wait for pages, and so will others.
        ({"num_running": 3, "num_waiting": 1, "num_used_pages": 90}, (0, 2), (3, 3)),
        # More ended than the heartbeat knew of.
        ({"num_running": 1}, (4, 0), (0, 0)),
    ],
)
def test_loads_by_hand(stats, own, expected):
    load = Load.estimate(EngineStats(num_pages=101, **stats), 8, num_own_then=own[0], num_own=own[1])
    assert (load.num_waiting, load.num_running) == expected
    assert load.kv_use == stats.get("num_used_pages", 0) / 100


def test_sequences_spread_when_nothing_is_known():
    router = Router(2)
    num_open = [0, 0]
    for i in range(10):
        num_open[router.choose(chain(range(i * 100, i * 100 + 40)), loads(*num_open))] += 1
    assert Counter(num_open) == {5: 2}
