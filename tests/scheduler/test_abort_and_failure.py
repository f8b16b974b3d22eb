"""Ends that come from outside: aborts in every state, and a device that lost its state."""

from __future__ import annotations

from jaxserve.core.sequence import FinishReason
from jaxserve.testing import CountingLoop


def assert_empty(loop: CountingLoop) -> None:
    scheduler = loop.scheduler
    scheduler.check_integrity()
    assert not scheduler.has_work and scheduler.num_running == scheduler.num_waiting == 0
    assert scheduler.roster.pages.pool.num_used == 0 and not scheduler.roster.sequences and not scheduler.roster.requests


def test_abort_while_waiting(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [1], max_tokens=2)
    loop.abort("a")
    output = loop.outputs["a", 0]
    assert (output.token_ids, output.finish_reason, output.num_cached_tokens) == ([], FinishReason.ABORT, 0)
    assert_empty(loop)


def test_abort_in_mid_prompt_and_while_decoding(make_loop) -> None:
    for num_steps in (1, 2, 3, 4):
        loop = make_loop()
        loop.add("a", [1] * 40, max_tokens=5)
        for _ in range(num_steps):
            loop.step()
        loop.abort("a")
        assert_empty(loop)


def test_abort_of_a_preempted_sequence(make_loop) -> None:
    loop = make_loop(num_pages=8, enable_prefix_caching=False, max_num_batched_tokens=32)
    loop.add("a", [1] * 12, max_tokens=8)
    loop.add("b", [2] * 12, max_tokens=8, presence_penalty=1.0)
    loop.step()
    loop.step()
    assert loop.scheduler.num_waiting == 1
    loop.abort("b")
    assert loop.scheduler.num_waiting == 0 and len(loop.outputs["b", 0].token_ids) == 1
    loop.run()
    assert_empty(loop)


def test_abort_of_the_unknown_and_the_finished_is_silent(make_loop) -> None:
    loop = make_loop()
    assert loop.scheduler.abort("nobody") == []
    loop.add("a", [1], max_tokens=1)
    loop.run()
    assert loop.scheduler.abort("a") == []
    loop.add("b", [1], max_tokens=1)
    assert loop.scheduler.abort("b", index=5) == []
    loop.run()


def test_abort_between_schedule_and_commit_drops_the_result_and_frees_pages_at_commit(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [1] * 10, max_tokens=5)
    loop.add("b", [2] * 2, max_tokens=5)
    loop.dispatch()
    loop.abort("a")
    assert loop.scheduler.roster.pages.pool.num_used == 4, "the dispatched step may still write them"
    loop.scheduler.check_integrity()
    loop.collect()
    assert loop.scheduler.roster.pages.pool.num_used == 1
    assert loop.outputs["a", 0].token_ids == [] and len(loop.outputs["b", 0].token_ids) == 1
    loop.run()
    assert_empty(loop)


def test_abort_between_steps_frees_at_once(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [1] * 10, max_tokens=5)
    loop.step()
    loop.abort("a")
    assert loop.scheduler.roster.pages.pool.num_used == 0


def test_an_aborted_id_may_come_again_at_once(make_loop) -> None:
    loop = make_loop()
    loop.add("a", [1] * 10, max_tokens=5)
    loop.dispatch()
    loop.abort("a")
    loop.outputs.clear()
    loop.add("a", [5], max_tokens=2)
    loop.collect()
    loop.run()
    assert loop.outputs["a", 0].token_ids == [6, 13]


def test_failure_ends_what_runs_and_spares_what_waits(make_loop) -> None:
    loop = make_loop(max_num_seqs=2)
    for name in "abc":
        loop.add(name, [5], max_tokens=3, presence_penalty=1.0)
    loop.step()
    loop.dispatch()
    loop.in_flight.clear()
    loop.take(loop.scheduler.fail_running("the device failed"))
    loop.runner.reset()
    for name in "ab":
        output = loop.outputs[name, 0]
        assert (output.finish_reason, output.error, len(output.token_ids)) == (FinishReason.ERROR, "the device failed", 1)
    assert len(loop.scheduler.roster.pages.cache) == 0 and loop.scheduler.roster.pages.pool.num_used == 0
    loop.run()
    assert loop.outputs["c", 0].token_ids == [6, 13, 27]
    assert_empty(loop)


def test_failure_takes_the_pages_held_for_children_too(make_loop) -> None:
    loop = make_loop(max_num_seqs=1, enable_prefix_caching=False)
    loop.add("a", [1] * 10, n=3, temperature=1.0, seed=1, max_tokens=1)
    loop.add("b", [5], max_tokens=3)
    loop.step()
    loop.take(loop.scheduler.fail_running("the device failed"))
    loop.runner.reset()
    assert loop.scheduler.roster.pages.pool.num_used == 0
    loop.run()
    # 1 * 10 + 10 + seed 1 + index.
    assert [loop.outputs["a", i].token_ids for i in range(3)] == [[21], [22], [23]]
    assert_empty(loop)


def test_failure_while_children_are_parked_lets_the_next_one_start(make_loop) -> None:
    loop = make_loop(max_num_batched_tokens=4)
    loop.add("a", [1] * 10, n=2, temperature=1.0, seed=1, max_tokens=1)
    loop.step()
    loop.take(loop.scheduler.fail_running("the device failed"))
    loop.runner.reset()
    loop.run()
    assert loop.outputs["a", 0].finish_reason is FinishReason.ERROR and loop.outputs["a", 1].token_ids == [22]
    assert_empty(loop)


def test_nothing_is_kept_of_what_ended(make_loop) -> None:
    """A soak in small: the scheduler's memory does not depend on how many requests it has served."""
    loop = make_loop(num_pages=20)
    for i in range(300):
        loop.add(str(i), [i % 7] * (i % 11 + 1), max_tokens=i % 5 + 1, n=1)
        if i % 3 == 0:
            loop.abort(str(i))
        loop.step()
    loop.run()
    assert_empty(loop)
    roster = loop.scheduler.roster
    assert not roster.set_aside and not roster.pages._deferred and len(roster.pages.cache) <= 19
