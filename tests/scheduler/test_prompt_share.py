"""n > 1: one prefill, shared full pages, seeds, and every way in which the first sequence can leave before the others start."""

from __future__ import annotations

import pytest

from jaxserve.core.request import Request
from jaxserve.core.sequence import FinishReason
from jaxserve.testing import CountingLoop, solo_output

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def check_tokens(loop: CountingLoop, request: Request, indices: list[int]) -> None:
    for index in indices:
        expected, _reason, _stop = solo_output(request.prompt_token_ids, request.params, max_length=loop.limits.max_model_len, index=index)
        assert loop.outputs[request.request_id, index].token_ids == expected
    loop.scheduler.check_integrity()
    assert loop.scheduler.roster.pages.pool.num_used == 0 and not loop.scheduler.roster.shares


@pytest.mark.parametrize("is_caching", [True, False])
def test_the_prompt_is_computed_once(make_loop, is_caching: bool) -> None:
    loop = make_loop(enable_prefix_caching=is_caching)
    request = loop.add("a", PROMPT, n=3, temperature=1.0, seed=7, max_tokens=4)
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (0, 3)
    first = loop.step()
    assert [row.num_tokens for row in first.rows] == [10]
    assert [admission.seed for admission in first.admissions] == [7]
    second = loop.step()
    assert [admission.seed for admission in second.admissions] == [8, 9]
    assert [(row.start, row.num_tokens) for row in second.rows] == [(10, 1), (8, 2), (8, 2)], "the partial page is computed again"
    tables = [seq.page_tables[0] for seq in loop.scheduler.roster.running]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3, "no page is written by two"
    assert not loop.scheduler.roster.shares, "all have their own references"
    loop.run()
    check_tokens(loop, request, [0, 1, 2])
    assert {loop.outputs["a", i].num_cached_tokens for i in range(3)} == {0}


def test_children_differ(make_loop) -> None:
    loop = make_loop()
    loop.add("a", PROMPT, n=4, temperature=1.0, seed=7, max_tokens=4)
    loop.run()
    assert len({tuple(loop.outputs["a", i].token_ids) for i in range(4)}) == 4


def test_seeds_wrap_at_64_bits(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [1], n=2, temperature=1.0, seed=-2, max_tokens=1)
    seeds = [admission.seed for plan in loop.run() for admission in plan.admissions]
    assert seeds == [2**64 - 2, 2**64 - 1]


@pytest.mark.parametrize(("length", "start"), [(8, 4), (9, 8), (4, 0), (3, 0), (1, 0)])
def test_exact_multiples_and_short_prompts(make_loop, length: int, start: int) -> None:
    loop = make_loop(enable_prefix_caching=False)
    request = loop.add("a", PROMPT[:length], n=2, temperature=1.0, seed=7, max_tokens=4)
    loop.step()
    assert [row.start for row in loop.step().rows if row.seq_id == 1] == [start]
    loop.run()
    check_tokens(loop, request, [0, 1])


def test_children_wait_for_the_whole_prompt_and_do_not_block_others(make_loop) -> None:
    loop = make_loop(long_prefill_token_threshold=4)
    request = loop.add("a", PROMPT, n=2, temperature=1.0, seed=7, max_tokens=4)
    other = loop.add("b", [5], max_tokens=2)
    admitted = [[admission.seq_id for admission in loop.step().admissions] for _ in range(4)]
    assert admitted == [[0, 2], [], [], [1]]
    loop.run()
    check_tokens(loop, request, [0, 1])
    check_tokens(loop, other, [0])


def test_children_go_before_later_arrivals(make_loop) -> None:
    loop = make_loop(max_num_seqs=1)
    loop.add("a", PROMPT, n=2, temperature=1.0, seed=7, max_tokens=2)
    loop.add("b", [5], max_tokens=2)
    assert [admission.seq_id for plan in loop.run() for admission in plan.admissions] == [0, 1, 2]


@pytest.mark.parametrize("is_caching", [True, False])
def test_the_pages_outlive_a_first_sequence_that_ends_at_once(make_loop, is_caching: bool) -> None:
    loop = make_loop(enable_prefix_caching=is_caching, max_num_seqs=1, eos_token_ids=frozenset())
    request = loop.add("a", PROMPT, n=3, temperature=1.0, seed=7, max_tokens=1)
    loop.step()
    assert loop.outputs["a", 0].finish_reason is FinishReason.LENGTH
    assert loop.scheduler.roster.pages.pool.num_used == 2, "held for the children"
    loop.scheduler.check_integrity()
    plans = loop.run()
    assert [row.start for plan in plans for row in plan.rows] == [8, 8]
    check_tokens(loop, request, [0, 1, 2])


def test_the_pages_outlive_a_first_sequence_that_is_preempted(make_loop) -> None:
    loop = make_loop(enable_prefix_caching=False, max_num_seqs=1)
    request = loop.add("a", PROMPT, n=2, temperature=1.0, seed=7, max_tokens=4)
    loop.step()
    loop.scheduler.roster.preempt(loop.scheduler.roster.running.pop())
    loop.scheduler.check_integrity()
    loop.run()
    check_tokens(loop, request, [0, 1])


def test_the_pages_outlive_a_first_sequence_that_is_aborted(make_loop) -> None:
    loop = make_loop(enable_prefix_caching=False)
    request = loop.add("a", PROMPT, n=3, temperature=1.0, seed=7, max_tokens=4)
    loop.step()
    loop.abort("a", 0)
    assert [row.start for row in loop.step().rows] == [8, 8]
    loop.run()
    check_tokens(loop, request, [1, 2])


def test_another_computes_the_prompt_when_the_first_is_aborted_before_it_is_done(make_loop) -> None:
    loop = make_loop(max_num_batched_tokens=4, enable_prefix_caching=False)
    request = loop.add("a", PROMPT, n=3, temperature=1.0, seed=7, max_tokens=4)
    loop.step()
    loop.abort("a", 0)
    assert [(row.seq_id, row.start) for row in loop.step().rows] == [(1, 0)]
    assert loop.scheduler.num_waiting == 1
    loop.run()
    check_tokens(loop, request, [1, 2])


def test_abort_of_all_while_children_are_parked(make_loop) -> None:
    loop = make_loop(max_num_batched_tokens=4)
    loop.add("a", PROMPT, n=3, temperature=1.0, seed=7, max_tokens=4)
    loop.step()
    loop.abort("a")
    assert [loop.outputs["a", i].finish_reason for i in range(3)] == [FinishReason.ABORT] * 3
    assert not loop.scheduler.has_work and not loop.scheduler.roster.shares
    loop.scheduler.check_integrity()


@pytest.mark.parametrize("index", [1, 2])
def test_abort_of_one_child_in_any_state(make_loop, index: int) -> None:
    for num_steps in range(4):
        loop = make_loop(max_num_seqs=2, enable_prefix_caching=False)
        request = loop.add("a", PROMPT, n=3, temperature=1.0, seed=7, max_tokens=4)
        for _ in range(num_steps):
            loop.step()
        loop.abort("a", index)
        loop.scheduler.check_integrity()
        loop.run()
        assert loop.outputs["a", index].finish_reason is FinishReason.ABORT
        check_tokens(loop, request, [0, 3 - index])


def test_waiting_children_give_up_their_pages_before_anyone_is_preempted(make_loop) -> None:
    # 7 pages: the prompt's 4 full pages are held for the child while "b", older, grows into the rest.
    loop = make_loop(num_pages=8, max_num_seqs=2, enable_prefix_caching=False, max_num_batched_tokens=32)
    b = loop.add("b", [9] * 3, max_tokens=20)
    a = loop.add("a", [1] * 17, n=2, temperature=1.0, seed=7, max_tokens=1)
    loop.step()
    assert loop.scheduler.roster.shares and loop.scheduler.num_running == 1
    loop.scheduler.roster.free_slots, held = [], loop.scheduler.roster.free_slots  # keep the child waiting
    while loop.scheduler.roster.shares:
        loop.step()
    loop.scheduler.roster.free_slots += held
    plan = loop.step()
    assert loop.scheduler.stats(plan).num_preemptions == 0
    loop.run()
    check_tokens(loop, a, [0, 1])
    check_tokens(loop, b, [0])


def test_held_pages_never_block_the_head_for_ever(make_loop) -> None:
    """A preempted sequence ahead of the children needs the pages that are held for them."""
    loop = make_loop(num_pages=8, max_num_seqs=1, scheduling_policy="priority", enable_prefix_caching=False, max_num_batched_tokens=32)
    a = loop.add("a", [1] * 17, n=2, temperature=1.0, seed=7, max_tokens=1, priority=5)
    loop.step()
    b = loop.add("b", [2] * 20, max_tokens=2, priority=0)
    assert loop.scheduler.roster.pages.pool.num_used == 4
    assert [admission.seq_id for admission in loop.step().admissions] == [2]
    loop.run()
    check_tokens(loop, a, [0, 1])
    check_tokens(loop, b, [0])


def test_hits_of_the_first_sequence_are_reported_for_all(make_loop) -> None:
    loop = make_loop()
    loop.add("cold", PROMPT[:6], max_tokens=1)
    loop.run()
    loop.add("a", PROMPT, n=2, temperature=1.0, seed=7, max_tokens=2)
    loop.run()
    assert [loop.outputs["a", i].num_cached_tokens for i in range(2)] == [4, 4]


def test_more_sequences_than_seats(make_loop) -> None:
    loop = make_loop(max_num_seqs=2, enable_prefix_caching=False)
    request = loop.add("a", PROMPT, n=9, temperature=1.0, seed=7, max_tokens=5)
    plans = loop.run()
    assert sum(row.start == 0 for plan in plans for row in plan.rows) == 1, "one prefill"
    check_tokens(loop, request, list(range(9)))


def test_logits_that_are_not_finite_in_the_first_do_not_strand_the_others(make_loop) -> None:
    loop = make_loop(runner={"poison_token_id": 3})
    loop.add("a", PROMPT, n=2, temperature=1.0, seed=7, max_tokens=2)
    loop.run()
    assert [loop.outputs["a", i].finish_reason for i in range(2)] == [FinishReason.ERROR] * 2
    loop.scheduler.check_integrity()
