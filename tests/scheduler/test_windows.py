"""KV groups that see only a sequence's end: what they hold, drop, find again and share. Pages of 4 tokens.

The counting device reads every visible position before each row, and the loop spoils every free page whose content nobody may
find: a page dropped too early shows as wrong content.
"""

from __future__ import annotations

import pytest

from jaxserve.config import GroupLimits
from jaxserve.core.page_counts import longest_fit, most_pages
from jaxserve.core.plan import Plan
from jaxserve.core.sequence import FinishReason
from jaxserve.errors import InvalidRequest
from jaxserve.testing import CountingLoop, solo_output

FULL = GroupLimits()
WINDOW = GroupLimits(window=6)
CHUNK = GroupLimits(chunk=8)
MIXES = {
    "full and window": (FULL, WINDOW),
    "window": (WINDOW,),
    "chunk and full": (CHUNK, FULL),
    "two windows": (WINDOW, GroupLimits(window=9)),
    "window of one page": (GroupLimits(window=4), FULL),
    "window of one token": (GroupLimits(window=1), FULL),
}
each_mix = pytest.mark.parametrize("groups", MIXES.values(), ids=MIXES.keys())


def held(loop: CountingLoop, index: int = 0) -> list[list[int]]:
    """For each group the entries of a running sequence's table that are not dropped."""
    return [[i for i, page in enumerate(table) if page] for table in loop.scheduler.roster.running[index].page_tables]


def serve(loop: CountingLoop, name: str, prompt: list[int], **params) -> int:
    """Run one request alone; its tokens must be those of a cold run. Returns the cached tokens."""
    request = loop.add(name, prompt, **{"max_tokens": 3, **params})
    loop.run()
    check_tokens(loop, name, request)
    return loop.outputs[name, 0].num_cached_tokens


def collect(loop: CountingLoop, plan: Plan, depth: int) -> None:
    """Commit until fewer than `depth` steps are in flight; all of them when nothing could be planned."""
    while loop.in_flight and (len(loop.in_flight) >= depth or not plan.rows):
        loop.collect()
    loop.scheduler.check_integrity()


def check_tokens(loop: CountingLoop, name: str, request) -> None:
    loop.scheduler.check_integrity()
    for index in range(request.params.n):
        expected = solo_output(request.prompt_token_ids, request.params, max_length=loop.limits.max_model_len, index=index)[0]
        assert loop.outputs[name, index].token_ids == expected


def numbers(count: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 40 for i in range(count)]


@pytest.mark.parametrize(
    ("position", "window", "chunk"), [(4, 0, 0), (5, 0, 0), (6, 1, 0), (7, 2, 0), (8, 3, 8), (15, 10, 8), (16, 11, 16)]
)
def test_first_visible_by_hand(position: int, window: int, chunk: int) -> None:
    assert (FULL.first_visible(position), WINDOW.first_visible(position), CHUNK.first_visible(position)) == (0, window, chunk)


def test_counts_by_hand() -> None:
    assert most_pages(WINDOW, max_chunk=1, page_size=1) == 6
    # 5 positions before a chunk of 16, and the chunk: wherever 21 positions begin in a page of 4, they touch 6 pages at most.
    assert most_pages(WINDOW, max_chunk=16, page_size=4) == 6
    assert most_pages(WINDOW, max_chunk=18, page_size=4) == 7
    assert most_pages(CHUNK, max_chunk=16, page_size=4) == (7 + 16 + 2) // 4 + 1
    assert most_pages(FULL, max_chunk=16, page_size=4) is None
    fit = {"max_chunk": 16, "page_size": 4, "max_length": 1000}
    assert longest_fit((FULL,), 9, **fit) == 36
    assert longest_fit((FULL, FULL), 9, **fit) == 16
    assert longest_fit((FULL, WINDOW), 9, **fit) == 16, "4 pages each"
    assert longest_fit((FULL, WINDOW), 20, **fit) == 56, "14 and 6"
    assert longest_fit((WINDOW,), 5, **fit) == 20
    assert longest_fit((WINDOW,), 6, **fit) == 1000, "as long as the context allows"


def test_brute_force_of_counts() -> None:
    """No step of any split into chunks holds more than `most_pages`, and some step holds that many."""
    for group in (WINDOW, CHUNK, GroupLimits(window=1), GroupLimits(chunk=3)):
        for page_size in (1, 2, 4):
            for max_chunk in range(page_size, 10):
                spans = [
                    -(-(start + size) // page_size) - group.first_visible(start) // page_size
                    for start in range(60)
                    for size in range(1, max_chunk + 1)
                ]
                bound = most_pages(group, max_chunk=max_chunk, page_size=page_size)
                assert bound is not None and max(spans) <= bound
                if group.window is not None:
                    assert max(spans) == bound


def test_a_decode_drops_a_page_when_its_last_position_falls_out(make_loop) -> None:
    loop = make_loop(groups=(FULL, WINDOW))
    loop.add("a", numbers(4), max_tokens=20)
    seen = []
    for _ in range(9):
        loop.step()
        loop.scheduler.check_integrity()
        seen.append((loop.scheduler.roster.running[0].num_computed_tokens, held(loop)[1]))
    # The next token, at the position that is the first number, sees five positions before it.
    assert seen == [
        (4, [0]), (5, [0, 1]), (6, [0, 1]), (7, [0, 1]), (8, [0, 1]), (9, [1, 2]), (10, [1, 2]), (11, [1, 2]), (12, [1, 2]),
    ]  # fmt: skip
    assert held(loop)[0] == [0, 1, 2]
    loop.step()
    assert held(loop)[1] == [2, 3]


def test_a_chunk_drops_everything_before_its_start(make_loop) -> None:
    loop = make_loop(groups=(CHUNK, FULL))
    loop.add("a", numbers(6), max_tokens=20)
    seen = {}
    for _ in range(13):
        loop.step()
        seen[loop.scheduler.roster.running[0].num_computed_tokens] = held(loop)[0]
    assert seen[6] == seen[7] == [0, 1]
    assert seen[8] == [], "the next token opens a chunk of its own"
    assert seen[9] == seen[12] == [2]
    assert seen[13] == [2, 3]
    assert seen[16] == []


@each_mix
def test_a_long_generation_stays_bounded(make_loop, groups) -> None:
    loop = make_loop(groups=groups, max_model_len=400, num_pages=150)
    request = loop.add("a", numbers(5), max_tokens=300)
    most = [0] * len(groups)
    while loop.scheduler.has_work:
        loop.step()
        if loop.scheduler.num_running:
            most = [max(count, len(pages)) for count, pages in zip(most, held(loop), strict=True)]
    for count, group in zip(most, groups, strict=True):
        assert count <= (-(-304 // 4) if group.reach is None else -(-group.reach // 4) + 1)
    check_tokens(loop, "a", request)
    assert loop.scheduler.roster.pages.pool.num_used == 0


@each_mix
@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_chunked_prefill_stays_bounded(make_loop, groups, depth: int) -> None:
    loop = make_loop(groups=groups, max_model_len=400, num_pages=150, max_num_batched_tokens=10)
    request = loop.add("a", numbers(300), max_tokens=3)
    while loop.scheduler.has_work or loop.in_flight:
        plan = loop.dispatch()
        if loop.scheduler.num_running:
            for pages, group in zip(held(loop), groups, strict=True):
                # The window, and a chunk for each step that is not committed yet.
                assert group.reach is None or len(pages) <= -(-(group.reach + 10 * depth) // 4) + 1
        collect(loop, plan, depth)
    check_tokens(loop, "a", request)


def test_a_page_is_free_once_the_step_that_saw_it_last_is_committed(make_loop) -> None:
    loop = make_loop(groups=(WINDOW,), max_num_batched_tokens=16, enable_prefix_caching=False)
    loop.add("a", numbers(40), max_tokens=2)
    pool = loop.scheduler.roster.pages.pool
    loop.dispatch()
    loop.dispatch()
    assert pool.num_used == 8, "both chunks"
    loop.collect()
    assert pool.num_used == 6, "the next chunk sees positions from 11"
    loop.collect()
    assert pool.num_used == 2


def test_a_prompt_longer_than_the_pages_hold_is_served_with_windows_alone(make_loop) -> None:
    loop = make_loop(groups=(WINDOW,), num_pages=7, max_model_len=400)
    assert serve(loop, "a", numbers(390), max_tokens=None) == 0
    assert loop.outputs["a", 0].finish_reason is FinishReason.LENGTH and len(loop.outputs["a", 0].token_ids) == 10


@pytest.mark.parametrize("depth", [1, 2, 3])
@each_mix
def test_the_longest_sequence_is_served_and_a_longer_one_refused(make_loop, groups, depth: int) -> None:
    """With as few pages as the refusal names, in the overlapped loop too: it waits for what falls out."""
    num_pages = 17
    loop = make_loop(groups=groups, num_pages=num_pages, max_model_len=100)
    longest = longest_fit(groups, num_pages - 1, max_chunk=16, page_size=4, max_length=100)
    assert 16 < longest <= 100
    if longest < 100:
        with pytest.raises(InvalidRequest, match=rf"all 16 KV pages together hold {longest} tokens"):
            loop.add("b", numbers(longest + 1), max_tokens=1)
    request = loop.add("a", numbers(longest - 8), max_tokens=8)
    num_idle = 0
    while loop.scheduler.has_work or loop.in_flight:
        plan = loop.dispatch()
        num_idle = 0 if plan.rows or loop.in_flight else num_idle + 1
        assert num_idle < 3
        collect(loop, plan, depth)
    check_tokens(loop, "a", request)
    assert loop.scheduler.roster.num_preemptions == 0


def test_admission_counts_what_groups_need(make_loop) -> None:
    """20 pages: a prompt of 40 tokens needs 10 pages in the full group, and at most 4 + (5 + 8 + 2) // 4 in the other."""
    loop = make_loop(groups=(FULL, WINDOW), num_pages=21, max_num_batched_tokens=8)
    assert loop.scheduler.roster.pages.num_admission_pages(40, [[], []]) == 10 + 4
    assert loop.scheduler.roster.pages.num_admission_pages(8, [[], []]) == 2 + 2
    request = loop.add("a", numbers(40), max_tokens=2)
    assert loop.step().admissions
    loop.run()
    check_tokens(loop, "a", request)


@each_mix
def test_a_hit_needs_only_what_the_next_token_sees(make_loop, groups) -> None:
    loop = make_loop(groups=groups)
    prompt = numbers(30)
    assert serve(loop, "cold", prompt) == 0
    assert serve(loop, "warm", prompt) == 28
    assert serve(loop, "longer", [*prompt, 1, 2, 3]) == 28
    assert serve(loop, "shorter", prompt[:13]) == 12


def test_a_hit_takes_only_pages_that_are_seen(make_loop) -> None:
    loop = make_loop(groups=(FULL, WINDOW))
    prompt = numbers(30)
    serve(loop, "cold", prompt)
    loop.add("warm", prompt, max_tokens=5)
    plan = loop.step()
    # Token 28 sees positions from 23: pages 5 and 6 of the window group.
    assert [(write.group, write.index) for write in plan.page_writes] == [*((0, i) for i in range(7)), (1, 5), (1, 6), (0, 7), (1, 7)]
    assert loop.scheduler.roster.pages.pool.num_used == 8 + 2, "token 30 does not see page 5"
    loop.run()


def test_a_hit_is_cut_where_a_window_has_lost_its_pages(make_loop) -> None:
    loop = make_loop(groups=(FULL, WINDOW))
    prompt = numbers(30)
    serve(loop, "cold", prompt)
    cache = loop.scheduler.roster.pages.cache
    tables = cache.find([], cache.chain_root(rope_table=None), prompt, 7).tables
    assert tables[1][:5] == [0] * 5
    lost = tables[1][6]
    cache._forget(lost)
    cache._pool.unmark_cached(lost)
    # Behind page 6 the last page is missing; behind 5 pages 4 and 5 are needed, which are there.
    assert serve(loop, "warm", prompt) == 24


def test_a_window_alone_finds_the_end_of_a_prefix_whose_start_is_gone(make_loop) -> None:
    loop = make_loop(groups=(WINDOW,))
    prompt = numbers(30)
    serve(loop, "cold", prompt)
    cache = loop.scheduler.roster.pages.cache
    hashes: list[bytes] = []
    cache.extend_hashes(hashes, cache.chain_root(rope_table=None), prompt, 3)
    cache.forget(hashes)
    assert serve(loop, "warm", prompt) == 28
    assert serve(loop, "shorter", prompt[:14]) == 0


def test_a_dropped_page_keeps_its_content_until_it_is_evicted(make_loop) -> None:
    loop = make_loop(groups=(FULL, WINDOW), max_num_batched_tokens=8)
    loop.add("a", numbers(40), max_tokens=4)
    for _ in range(5):
        loop.step()
    # The first sequence has dropped the pages of the second's window long ago.
    request = loop.add("b", numbers(18), max_tokens=2)
    loop.run()
    assert loop.outputs["b", 0].num_cached_tokens == 16
    check_tokens(loop, "b", request)


@each_mix
@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("length", [3, 16, 17])
@pytest.mark.parametrize("budget", [3, 15])
def test_children_share_what_they_will_see(make_loop, groups, is_caching: bool, length: int, budget: int) -> None:
    loop = make_loop(groups=groups, enable_prefix_caching=is_caching, max_num_batched_tokens=budget, eos_token_ids=frozenset())
    request = loop.add("a", numbers(length), n=3, temperature=1.0, seed=7, max_tokens=9)
    starts = {}
    while loop.scheduler.has_work:
        for row in loop.step().rows:
            starts.setdefault(row.seq_id, row.start)
        loop.scheduler.check_integrity()
    assert starts == {0: 0, 1: (length - 1) // 4 * 4, 2: (length - 1) // 4 * 4}, "the full pages of the prompt are computed once"
    check_tokens(loop, "a", request)
    assert loop.scheduler.roster.pages.pool.num_used == 0 and not loop.scheduler.roster.shares


@each_mix
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("is_caching", [True, False])
def test_preempted_sequences_resume_right(make_loop, groups, depth: int, is_caching: bool) -> None:
    limits = {"max_num_batched_tokens": 9, "enable_prefix_caching": is_caching, "max_model_len": 60}
    num_pages = next(count for count in range(1, 60) if longest_fit(groups, count, max_chunk=9, page_size=4, max_length=48) >= 48)
    loop = make_loop(groups=groups, num_pages=num_pages + 1, max_num_seqs=9, **limits)
    requests = {str(i): loop.add(str(i), numbers(5 + 3 * (i % 7), first=i), max_tokens=25) for i in range(12)}
    num_steps = 0
    while loop.scheduler.has_work or loop.in_flight:
        plan = loop.dispatch()
        collect(loop, plan, depth)
        num_steps += 1
        assert num_steps < 5000
    assert loop.scheduler.roster.num_preemptions > 0 or FULL not in groups, "windows alone hardly grow"
    for name, request in requests.items():
        check_tokens(loop, name, request)


def test_what_is_not_finite_is_forgotten_in_dropped_pages_too(make_loop) -> None:
    loop = make_loop(groups=(WINDOW,), max_num_batched_tokens=8, runner={"poison_token_id": 39})
    loop.add("a", [39, *numbers(20)], max_tokens=2)
    loop.run()
    assert loop.outputs["a", 0].finish_reason is FinishReason.ERROR
    assert len(loop.scheduler.roster.pages.cache) == 0
