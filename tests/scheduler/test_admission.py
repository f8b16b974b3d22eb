"""Who starts, when, and who is refused."""

from __future__ import annotations

import pytest

from jaxserve.config import GroupLimits
from jaxserve.errors import InvalidRequest
from jaxserve.testing import CountingLoop

TWO_FULL = (GroupLimits(), GroupLimits())


def admitted(loop: CountingLoop) -> list[int]:
    return [admission.seq_id for admission in loop.step().admissions]


def test_seats_are_kept_and_reused(make_loop) -> None:
    loop = make_loop(max_num_seqs=2)
    for name in "abc":
        loop.add(name, [1], max_tokens=2)
    plan = loop.step()
    assert [admission.slot for admission in plan.admissions] == [0, 1]
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (2, 1)
    assert admitted(loop) == []
    assert admitted(loop) == [2]


def test_a_sequence_keeps_its_slot_for_life(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [1], max_tokens=2)
    loop.add("b", [1], max_tokens=8)
    slots = [row.slot for plan in loop.run() for row in plan.rows if row.seq_id == 1]
    assert slots == [1] * 8


def test_the_whole_sequence_must_fit_not_only_its_first_chunk(make_loop) -> None:
    # 9 usable pages of 4 tokens; "a" holds 5, so the 5 pages of "b" do not fit although its first chunk (12 tokens) would.
    loop = make_loop(num_pages=10, max_num_batched_tokens=32)
    loop.add("a", [1] * 20, max_tokens=2)
    loop.add("b", [2] * 20, max_tokens=2)
    assert admitted(loop) == [0]


def test_pages_that_a_running_prefill_still_needs_are_not_given_away(make_loop) -> None:
    # 9 pages: "a" needs 5 and has taken 2 after its first chunk of 8; 7 are free, but only 4 are to be had.
    loop = make_loop(num_pages=10, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    loop.add("a", [1] * 20, max_tokens=2)
    loop.add("b", [2] * 20, max_tokens=2)
    assert admitted(loop) == [0]
    assert all(seq.num_preemptions == 0 for seq in loop.scheduler.roster.sequences.values())
    loop.run()
    assert loop.scheduler.stats(loop.scheduler.schedule()).num_preemptions == 0


def test_one_that_does_not_fit_blocks_those_behind_it(make_loop) -> None:
    loop = make_loop(num_pages=10, max_num_batched_tokens=32)
    loop.add("a", [1] * 20, max_tokens=4)
    loop.add("big", [2] * 20, max_tokens=1)
    loop.add("small", [3], max_tokens=1)
    assert admitted(loop) == [0]
    assert admitted(loop) == []
    loop.run()


def test_some_pages_are_left_for_growth_while_others_run(make_loop) -> None:
    # 1 % of 400 pages are 4. "a" holds 20 of 399, so 379 are free and "b", which needs 376, would leave 3.
    loop = make_loop(num_pages=400, page_size=1, max_model_len=399, max_num_batched_tokens=400)
    loop.add("a", [1] * 20, max_tokens=4)
    loop.add("b", [2] * 376, max_tokens=1)
    assert admitted(loop) == [0]
    loop.abort("a")
    assert admitted(loop) == [1], "nothing runs: no margin"


def test_fcfs_is_order_of_arrival(make_loop) -> None:
    loop = make_loop(max_num_seqs=1)
    for name in "abc":
        loop.add(name, [1], max_tokens=1)
    assert [admitted(loop) for _ in range(3)] == [[0], [1], [2]]


def test_priority_goes_first_then_arrival(make_loop) -> None:
    loop = make_loop(max_num_seqs=1, scheduling_policy="priority")
    for name, priority in [("a", 1), ("b", 0), ("c", 1), ("d", -3)]:
        loop.add(name, [1], max_tokens=1, priority=priority)
    assert [admitted(loop) for _ in range(4)] == [[3], [1], [0], [2]]


def test_one_without_a_penalty_slot_waits_while_others_pass(make_loop) -> None:
    loop = make_loop(max_penalty_slots=1, eos_token_ids=frozenset({9}))
    loop.add("a", [1, 2], max_tokens=3, presence_penalty=1.0)
    loop.add("b", [1, 2], max_tokens=3, logit_bias={5: 1.0})
    loop.add("c", [1, 2], max_tokens=3)
    plan = loop.step()
    assert [(admission.seq_id, admission.penalty_slot) for admission in plan.admissions] == [(0, 0), (2, None)]
    assert admitted(loop) == []
    loop.step()
    assert admitted(loop) == [1], "as soon as the slot is free"


def test_what_the_device_learns_of_a_penalized_sequence(make_loop) -> None:
    loop = make_loop(eos_token_ids=frozenset({9}))
    loop.add("a", [1, 2], max_tokens=3, min_tokens=2, stop_token_ids=[6, 3])
    loop.add("b", [1, 2], max_tokens=3, min_tokens=2, ignore_eos=True, stop_token_ids=[6])
    loop.add("c", [1, 2], max_tokens=3, stop_token_ids=[6])
    a, b, c = loop.step().admissions
    assert (a.token_ids, a.stop_token_ids) == ((1, 2), (3, 6, 9))
    assert (b.token_ids, b.stop_token_ids) == ((1, 2), (6,))
    assert (c.token_ids, c.stop_token_ids) == ((), ())


def test_seeds(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [1], max_tokens=1, temperature=1.0, seed=-5)
    loop.add("b", [1], max_tokens=1, temperature=1.0)
    loop.add("c", [1], max_tokens=1, temperature=1.0)
    a, b, c = (admission.seed for admission in loop.step().admissions)
    assert a == 2**64 - 5
    assert b != c, "no seed is fresh entropy for each request"
    assert all(0 <= seed < 2**64 for seed in (a, b, c))


@pytest.mark.parametrize(
    ("prompt_length", "limits", "expected"),
    [
        (0, {}, "empty"),
        (64, {}, r"64 tokens, but the context is 64 tokens.*shorten the prompt or raise --max-model-len"),
        (80, {}, r"80 tokens, but the context is 64 tokens"),
        (37, {"num_pages": 10}, r"37 tokens, but all 9 KV pages together hold 36 tokens.*--kv-cache-memory-bytes"),
        (17, {"num_pages": 10, "groups": TWO_FULL}, r"all 9 KV pages together hold 16 tokens"),
    ],
)
def test_what_can_never_fit_is_refused_at_arrival(make_loop, prompt_length: int, limits: dict[str, int], expected: str) -> None:
    loop = make_loop(**limits)
    with pytest.raises(InvalidRequest, match=expected) as caught:
        loop.add("a", [1] * prompt_length, max_tokens=1)
    assert caught.value.param == "prompt"
    assert not loop.scheduler.has_work, "a refused request leaves nothing behind"
    loop.add("a", [1], max_tokens=1)
    loop.run()


@pytest.mark.parametrize(("prompt_length", "limits"), [(63, {}), (36, {"num_pages": 10}), (16, {"num_pages": 10, "groups": TWO_FULL})])
def test_the_largest_prompt_is_served(make_loop, prompt_length: int, limits: dict[str, int]) -> None:
    loop = make_loop(**limits)
    loop.add("a", [1] * prompt_length, max_tokens=None)
    loop.run()
    assert len(loop.outputs["a", 0].token_ids) == 1


def test_a_sequence_alone_may_fill_all_pages_and_then_ends(make_loop) -> None:
    loop = make_loop(num_pages=4)
    loop.add("a", [1] * 5, max_tokens=None)
    loop.run()
    assert len(loop.outputs["a", 0].token_ids) == 8, "12 positions in 3 pages, and one token that needs none"
    assert loop.scheduler.stats(loop.scheduler.schedule()).num_preemptions == 0


def test_priority_needs_the_priority_policy(make_loop) -> None:
    with pytest.raises(InvalidRequest, match=r"priority is 3.*--scheduling-policy priority"):
        make_loop().add("a", [1], priority=3)


def test_penalties_need_penalty_slots(make_loop) -> None:
    with pytest.raises(InvalidRequest, match="--max-penalty-slots 0"):
        make_loop(max_penalty_slots=0).add("a", [1], min_tokens=1)


def test_an_id_is_refused_while_it_is_served_and_free_afterwards(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [1], max_tokens=1)
    with pytest.raises(InvalidRequest, match="'a' is being served already"):
        loop.add("a", [1], max_tokens=1)
    loop.run()
    loop.outputs.clear()
    loop.add("a", [2], max_tokens=1)
    loop.run()
    assert loop.outputs["a", 0].token_ids == [3]
