"""Pages run out: who gives up what, and that nothing of it shows in the tokens."""

from __future__ import annotations

import pytest

from jaxserve.core.sequence import Status
from jaxserve.testing import CountingLoop, solo_output


def check_tokens(loop: CountingLoop, requests) -> None:
    for request in requests:
        for index in range(request.params.n):
            expected, _reason, _stop = solo_output(
                request.prompt_token_ids, request.params, max_length=loop.limits.max_model_len, index=index
            )
            assert loop.outputs[request.request_id, index].token_ids == expected


def test_the_newest_gives_up_its_pages_and_is_computed_again(make_loop) -> None:
    # 7 pages of 4: both prompts take 3, so the first to need a fifth page (20 tokens) finds 7 - 4 - 4 < 0.
    loop = make_loop(num_pages=8, enable_prefix_caching=False, max_num_batched_tokens=32)
    a = loop.add("a", [1] * 12, max_tokens=12)
    b = loop.add("b", [2] * 12, max_tokens=12)
    loop.step()
    sequence_b = loop.scheduler.roster.sequences[1]
    for _ in range(4):
        loop.step()
    # Both needed their fourth page when computing position 12; "a" took the last one.
    assert (sequence_b.status, sequence_b.num_preemptions, sequence_b.num_computed_tokens) == (Status.PREEMPTED, 1, 0)
    assert sequence_b.slot is None and sequence_b.num_output_tokens == 1
    assert loop.scheduler.num_running == 1
    loop.scheduler.check_integrity()
    plans = loop.run()
    [admission] = [admission for plan in plans for admission in plan.admissions]
    assert (admission.seq_id, admission.num_prompt_tokens, admission.rope_length) == (1, 12, 13)
    [row] = [row for plan in plans for row in plan.rows if row.seq_id == 1 and row.num_tokens > 1]
    assert (row.start, row.token_ids) == (0, (*[2] * 12, loop.outputs["b", 0].token_ids[0])), "outputs are recomputed as prompt"
    check_tokens(loop, [a, b])


def test_no_waiting_sequence_starts_in_a_step_that_preempted(make_loop) -> None:
    loop = make_loop(num_pages=8, enable_prefix_caching=False, max_num_batched_tokens=32)
    loop.add("a", [1] * 12, max_tokens=12)
    loop.add("b", [2] * 12, max_tokens=12)
    loop.step()
    loop.add("c", [3], max_tokens=1)
    loop.scheduler.roster.free_slots, held = [], loop.scheduler.roster.free_slots  # keep "c" waiting until the pages run out
    plan = loop.step()
    loop.scheduler.roster.free_slots += held
    assert loop.scheduler.stats(plan).num_preemptions == 1 and plan.admissions == ()


def test_a_running_sequence_is_never_preempted_for_a_waiting_one(make_loop) -> None:
    loop = make_loop(num_pages=8, scheduling_policy="priority", max_num_batched_tokens=32)
    loop.add("low", [1] * 20, max_tokens=8, priority=9)
    loop.step()
    loop.add("high", [2] * 12, max_tokens=4, priority=0)
    loop.step()
    assert loop.scheduler.roster.sequences[0].status is Status.RUNNING and loop.scheduler.roster.sequences[1].status is Status.WAITING
    loop.run()
    assert loop.scheduler.stats(loop.scheduler.schedule()).num_preemptions == 0


def test_priority_preempts_the_least_important(make_loop) -> None:
    loop = make_loop(num_pages=10, scheduling_policy="priority", enable_prefix_caching=False, max_num_batched_tokens=64)
    requests = [
        loop.add("low", [1] * 12, max_tokens=9, priority=5),
        loop.add("high", [2] * 12, max_tokens=9, priority=0),
        loop.add("middle", [3] * 12, max_tokens=9, priority=1),
    ]
    loop.step()
    loop.step()
    assert {seq.request.request_id: seq.status for seq in loop.scheduler.roster.sequences.values()} == {
        "low": Status.PREEMPTED,
        "high": Status.RUNNING,
        "middle": Status.RUNNING,
    }
    loop.run()
    check_tokens(loop, requests)


def test_a_preempted_sequence_is_ahead_of_later_arrivals(make_loop) -> None:
    loop = make_loop(num_pages=8, enable_prefix_caching=False, max_num_batched_tokens=32, max_num_seqs=2)
    loop.add("a", [1] * 12, max_tokens=5)
    loop.add("b", [2] * 12, max_tokens=5)
    loop.add("c", [3] * 12, max_tokens=5)
    order = [admission.seq_id for plan in loop.run() for admission in plan.admissions]
    assert order[:4] == [0, 1, 1, 2]


def test_resuming_finds_its_own_pages_in_the_cache(make_loop) -> None:
    loop = make_loop(num_pages=8, max_num_batched_tokens=32)
    a = loop.add("a", [1] * 12, max_tokens=5)
    b = loop.add("b", [2] * 12, max_tokens=9)
    plans = loop.run()
    resumed = [admission for plan in plans for admission in plan.admissions][2:]
    assert resumed and all(admission.seq_id == 1 and admission.num_computed_tokens > 0 for admission in resumed)
    assert loop.outputs["b", 0].num_cached_tokens == 0, "usage tells of the first admission"
    check_tokens(loop, [a, b])


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_pressure_does_not_thrash(make_loop, policy: str) -> None:
    """100 sequences through a pool that holds about three of them: few preemptions, none of them often."""
    loop = make_loop(num_pages=31, max_num_seqs=16, max_num_batched_tokens=64, scheduling_policy=policy, enable_prefix_caching=False)
    requests = [loop.add(str(i), [i % 50] * (4 + i % 30), max_tokens=20) for i in range(100)]
    sequences = list(loop.scheduler.roster.sequences.values())
    num_steps = len(loop.run())
    assert max(seq.num_preemptions for seq in sequences) <= 4
    assert sum(seq.num_preemptions for seq in sequences) <= 100
    assert num_steps <= 1000
    check_tokens(loop, requests)


def test_penalties_survive_preemption(make_loop) -> None:
    loop = make_loop(num_pages=8, enable_prefix_caching=False, max_num_batched_tokens=32)
    loop.add("a", [1] * 12, max_tokens=12)
    b = loop.add("b", [2] * 12, max_tokens=12, repetition_penalty=1.5)
    plans = loop.run()
    first, resumed = [admission for plan in plans for admission in plan.admissions if admission.seq_id == 1]
    assert first.token_ids == (2,) * 12 and resumed.penalty_slot is not None
    assert resumed.token_ids == (*[2] * 12, loop.outputs["b", 0].token_ids[0]), "counts are filled with the outputs so far"
    assert resumed.num_prompt_tokens == 12
    check_tokens(loop, [b])
