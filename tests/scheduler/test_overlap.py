"""schedule() again before the last plan is committed: same tokens as the plain loop, and pages freed only when no step can write them."""

from __future__ import annotations

import pytest

from jaxserve.core.sequence import FinishReason, Status
from jaxserve.testing import CountingLoop, solo_output


def run_overlapped(loop: CountingLoop, depth: int) -> None:
    """Keep up to `depth` plans dispatched and not committed."""
    num_steps = 0
    while loop.scheduler.has_work or loop.in_flight:
        plan = loop.dispatch()
        while loop.in_flight and (len(loop.in_flight) >= depth or not plan.rows):
            loop.collect()
            loop.scheduler.check_integrity()
            if not plan.rows:
                break
        num_steps += 1
        assert num_steps < 5000


def test_a_decode_row_does_not_know_its_token(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [5], max_tokens=4)
    loop.dispatch()
    [row] = loop.dispatch().rows
    assert (row.start, row.token_ids, row.is_sampled) == (1, (), True)
    assert loop.outputs == {}
    loop.collect()
    assert loop.outputs["a", 0].token_ids == [6]
    loop.collect()
    assert loop.outputs["a", 0].token_ids == [6, 13]


def test_no_step_is_planned_beyond_a_certain_end(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [5], max_tokens=2)
    loop.dispatch()
    loop.dispatch()
    assert loop.dispatch().rows == ()
    loop.collect()
    loop.collect()
    assert loop.outputs["a", 0].finish_reason is FinishReason.LENGTH


def test_the_step_dispatched_after_a_stop_is_dropped_and_its_page_held_until_then(make_loop) -> None:
    loop = make_loop(eos_token_ids=frozenset({13}))
    loop.add("a", [5] * 1, max_tokens=9)
    loop.step()
    loop.dispatch()
    loop.dispatch()
    loop.collect()
    assert loop.outputs["a", 0].token_ids == [6, 13] and loop.outputs["a", 0].finish_reason is FinishReason.STOP
    assert loop.scheduler.roster.pages.pool.num_used == 1 and not loop.scheduler.has_work
    loop.collect()
    assert loop.scheduler.roster.pages.pool.num_used == 0
    assert loop.outputs["a", 0].token_ids == [6, 13]


def test_chunks_of_a_prompt_in_flight(make_loop) -> None:
    loop = make_loop(max_num_batched_tokens=4)
    loop.add("a", list(range(1, 11)), max_tokens=2, prompt_logprobs=1)
    starts = [[row.start for row in loop.dispatch().rows] for _ in range(4)]
    assert starts == [[0], [4], [8], [10]]
    while loop.in_flight:
        loop.collect()
    assert loop.outputs["a", 0].token_ids == [65, 131] and len(loop.outputs["a", 0].prompt_logprobs) == 10


def test_a_victim_in_flight_keeps_its_token_and_its_pages_until_the_commit(make_loop) -> None:
    loop = make_loop(num_pages=8, enable_prefix_caching=False, max_num_batched_tokens=32)
    loop.add("a", [1] * 12, max_tokens=6)
    b = loop.add("b", [2] * 12, max_tokens=6)
    sequence_a, sequence_b = loop.scheduler.roster.sequences.values()
    loop.dispatch()
    plan = loop.dispatch()
    # "a" took the seventh page; "b" needs one too and would have to preempt itself, in flight.
    assert [row.seq_id for row in plan.rows] == [0]
    assert (sequence_b.status, sequence_b.num_pending_tokens) == (Status.PREEMPTED, 1)
    assert loop.scheduler.roster.pages.pool.num_free == 0, "its pages are still written"
    assert loop.dispatch().admissions == (), "it may not start again before its token is known"
    loop.collect()
    assert loop.scheduler.roster.pages.pool.num_free == 3
    assert sequence_b.num_output_tokens == 1 and sequence_b.num_pending_tokens == 0, "the token that was on its way is kept"
    assert sequence_a.num_preemptions == 0
    run_overlapped(loop, 2)
    assert loop.outputs["b", 0].token_ids == solo_output([2] * 12, b.params, max_length=64)[0]


def test_preemption_stops_when_enough_pages_are_on_their_way(make_loop) -> None:
    """Three run; the first needs a page while all are in flight: one victim is enough, though it frees nothing yet."""
    loop = make_loop(num_pages=11, enable_prefix_caching=False, max_num_batched_tokens=64)
    for name in "abc":
        loop.add(name, [1] * 12, max_tokens=9)
    loop.dispatch()
    loop.dispatch()  # "a" takes the tenth page, "b" preempts "c" and waits for its pages
    assert loop.scheduler.roster.num_preemptions == 1
    loop.dispatch()
    assert loop.scheduler.roster.num_preemptions == 1 and loop.scheduler.num_running == 2
    run_overlapped(loop, 2)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_same_tokens_as_the_plain_loop(make_loop, depth: int, policy: str) -> None:
    loop = make_loop(
        num_pages=14, max_num_batched_tokens=9, scheduling_policy=policy, eos_token_ids=frozenset({7}), runner={"vocab_size": 50}
    )
    requests = [
        loop.add(
            str(i),
            [i % 50, 3] * (i % 9 + 1),
            n=1 + i % 2,
            temperature=1.0,
            seed=i,
            max_tokens=1 + i % 17,
            stop_token_ids=[9] if i % 3 else [],
            min_tokens=1 if i % 5 == 0 else 0,
        )
        for i in range(30)
    ]
    run_overlapped(loop, depth)
    assert loop.scheduler.roster.num_preemptions > 0
    for request in requests:
        for index in range(request.params.n):
            output = loop.outputs[request.request_id, index]
            expected = solo_output(request.prompt_token_ids, request.params, max_length=53, eos=frozenset({7}), vocab_size=50, index=index)
            assert (output.token_ids, output.finish_reason, output.stop_reason) == expected
    assert loop.scheduler.roster.pages.pool.num_used == 0
