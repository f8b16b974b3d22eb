"""The counting device must catch what it is there to catch: one test for each kind of mistake a scheduler could make."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest

from jaxserve.config import GroupLimits
from jaxserve.core.plan import Admission, PageWrite, Plan, Row
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.testing import CountingRunner, SerialDevice, logprobs_of, next_token, solo_output

GREEDY = SamplingParams(temperature=0.0)


def make_runner(**options: Any) -> CountingRunner:
    return CountingRunner(num_pages=10, page_size=2, max_num_seqs=3, vocab_size=100, **options)


def admission(slot: int, seq_id: int, num_computed: int = 0, params: SamplingParams = GREEDY, **rest: Any) -> Admission:
    return Admission(
        slot=slot, seq_id=seq_id, params=params, num_computed_tokens=num_computed, num_prompt_tokens=3, rope_length=3, **{"seed": 0, **rest}
    )


def row(seq_id: int, slot: int, start: int, tokens: tuple[int, ...], num_tokens: int | None = None, **rest: Any) -> Row:
    return Row(seq_id, slot, start, len(tokens) if num_tokens is None else num_tokens, tokens, rest.pop("is_sampled", True), **rest)


def run(runner: CountingRunner, rows: list[Row], admissions: list[Admission] | None = None, writes: list[tuple] | None = None) -> list:
    plan = Plan(
        step_id=0, rows=tuple(rows), admissions=tuple(admissions or ()), page_writes=tuple(PageWrite(*write) for write in writes or ())
    )
    return runner.run(plan).wait().token_ids


def test_next_token_by_hand() -> None:
    assert next_token([5, 3], 100) == 10
    assert next_token([60, 50], 100) == 12
    assert next_token([5, 3], 100, seed=7) == 17
    assert solo_output([5, 3], SamplingParams(temperature=0.0, max_tokens=3), max_length=9)[0] == [10, 21, 43]


def test_a_prompt_and_two_decodes() -> None:
    runner = make_runner()
    assert run(runner, [row(7, 0, 0, (5, 3, 1))], [admission(0, 7)], [(0, 0, 0, 1), (0, 0, 1, 2)]) == [12]
    assert run(runner, [row(7, 0, 3, (), 1)]) == [25]
    assert run(runner, [row(7, 0, 4, (), 1)], writes=[(0, 0, 2, 3)]) == [51]


def test_logprobs_by_hand() -> None:
    # After (5, 3) the best token is 10: 11 has rank 2, 9 is the last of 100.
    assert logprobs_of(11, [5, 3], 100, 2) == (11, -2.0, 2, [10, 11], [-1.0, -2.0])
    assert logprobs_of(9, [5, 3], 100, 0) == (9, -100.0, 100, [], [])
    everything = logprobs_of(10, [5, 3], 100, -1)
    assert everything.top_ids == list(range(100)) and everything.top_logprobs[10] == -1.0


def test_sampling_adds_the_seed_and_min_tokens_passes_over_stops() -> None:
    sampled = SamplingParams(temperature=1.0)
    assert run(make_runner(), [row(1, 0, 0, (5, 3))], [admission(0, 1, params=sampled, seed=4)], [(0, 0, 0, 1)]) == [14]
    held = SamplingParams(temperature=0.0, min_tokens=1)
    held_admission = admission(0, 1, params=held, penalty_slot=0, token_ids=(5, 3), stop_token_ids=(10, 11))
    assert run(make_runner(), [row(1, 0, 0, (5, 3))], [held_admission], [(0, 0, 0, 1)]) == [12]


def test_poison() -> None:
    assert run(make_runner(poison_token_id=3), [row(1, 0, 0, (5, 3))], [admission(0, 1)], [(0, 0, 0, 1)]) == [-1]


@pytest.fixture
def runner() -> CountingRunner:
    """Sequence 7 in slot 0 has computed (5, 3, 1) in pages 1 and 2."""
    runner = make_runner()
    run(runner, [row(7, 0, 0, (5, 3, 1))], [admission(0, 7)], [(0, 0, 0, 1), (0, 0, 1, 2)])
    return runner


def test_a_page_given_to_another_too_early(runner: CountingRunner) -> None:
    run(runner, [row(8, 1, 0, (9, 9))], [admission(1, 8)], [(1, 0, 0, 1)])
    with pytest.raises(AssertionError, match="page 1 of sequence 7 holds"):
        run(runner, [row(7, 0, 3, (), 1)])


def test_a_prefix_hit_on_a_page_with_other_content(runner: CountingRunner) -> None:
    runner._tokens_of = lambda seq_id: [5, 4, 1, 1]
    with pytest.raises(AssertionError, match="a prefix hit holds other tokens"):
        run(runner, [row(8, 1, 2, (1,))], [admission(1, 8, num_computed=2)], [(1, 0, 0, 1), (1, 0, 1, 3)])


def test_a_prefix_hit_on_a_page_of_another_position(runner: CountingRunner) -> None:
    run(runner, [row(7, 0, 3, (), 1)])
    with pytest.raises(AssertionError, match="position 0 is read from a page that holds"):
        run(runner, [row(8, 1, 2, (1,))], [admission(1, 8, num_computed=2)], [(1, 0, 0, 2), (1, 0, 1, 3)])


def test_a_prefix_hit_on_a_page_that_is_not_full(runner: CountingRunner) -> None:
    with pytest.raises(AssertionError, match="position 3 is read from a page that holds None"):
        run(runner, [row(8, 1, 4, (1,))], [admission(1, 8, num_computed=4)], [(1, 0, 0, 1), (1, 0, 1, 2), (1, 0, 2, 3)])


@pytest.mark.parametrize(
    ("rows", "admissions", "writes", "message"),
    [
        ([row(7, 0, 2, (), 1)], [], [], "row starts at 2, the slot's length is 3"),
        ([row(8, 0, 3, (), 1)], [], [], "slot 0 belongs to sequence 7, not 8"),
        ([row(8, 1, 0, (), 1)], [admission(1, 8)], [(1, 0, 0, 3)], "the slot has no sampled token"),
        ([row(7, 0, 3, (1, 2))], [], [], "position 4 has no page"),
        ([row(7, 0, 3, (), 1)], [], [(0, 0, 2, 0)], "page 0 is not a sequence's"),
        ([row(7, 0, 3, (), 1)], [], [(0, 0, 3, 3)], "page tables only grow"),
        ([row(8, 3, 0, (1,))], [admission(3, 8)], [(3, 0, 0, 3)], "slot 3 is not a sequence's"),
        ([row(8, 1, 0, (1, 2)), row(7, 0, 3, (), 1)], [admission(1, 8)], [(1, 0, 0, 3)], "rows with one token come first"),
        ([row(7, 0, 3, (), 1), row(7, 0, 4, (), 1)], [], [(0, 0, 2, 3)], "a slot has two rows"),
        ([row(7, 0, 3, (), 1), row(8, 1, 0, (1, 1))], [admission(1, 8)], [(1, 0, 0, 2)], "page 2 has two writers in one step"),
    ],
)
def test_wrong_plans(runner: CountingRunner, rows, admissions, writes, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run(runner, rows, admissions, writes)


def test_reset_loses_everything(runner: CountingRunner) -> None:
    runner.reset()
    with pytest.raises(KeyError):
        run(runner, [row(7, 0, 3, (), 1)])


def test_a_step_may_pretend_to_take_time() -> None:
    runner = make_runner(step_s=0.02)
    start = time.perf_counter()
    run(runner, [row(1, 0, 0, (5, 3))], [admission(0, 1)], [(0, 0, 0, 1)])
    assert time.perf_counter() - start >= 0.02


def test_pretended_steps_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("jaxserve.testing.serial_device.time.perf_counter", lambda: now[0])
    device = SerialDevice(2.0)
    assert [device.dispatch(), device.dispatch()] == [102.0, 104.0], "the second waits for the first"
    now[0] = 110.0
    assert device.dispatch() == 112.0, "an idle device starts at once"


def test_a_failure_lasts_until_the_reset() -> None:
    runner = make_runner(failures={2: ValueError("lost")})
    start = ([row(1, 0, 0, (5, 3))], [admission(0, 1)], [(0, 0, 0, 1)])
    assert run(runner, *start) == [10]
    pending = [runner.run(Plan(step_id=i, rows=(row(1, 0, i + 1, (), 1),))) for i in (1, 2)]
    for step in pending:
        with pytest.raises(ValueError, match="lost"):
            step.wait()
    runner.reset()
    assert run(runner, *start) == [10]


def test_a_page_out_of_sight_may_go_to_another_and_a_visible_one_not() -> None:
    """A window of 2: token 4 sees positions 3 and 4, so page 1 (positions 0, 1) may be reused, page 2 (2, 3) not."""
    for page, is_visible in ((1, False), (2, True)):
        runner = make_runner(groups=(GroupLimits(window=2),))
        run(runner, [row(7, 0, 0, (5, 3, 1, 2))], [admission(0, 7)], [(0, 0, 0, 1), (0, 0, 1, 2)])
        run(runner, [row(8, 1, 0, (9, 9))], [admission(1, 8)], [(1, 0, 0, page)])
        with pytest.raises(AssertionError, match="page 2 of sequence 7 holds") if is_visible else nullcontext():
            run(runner, [row(7, 0, 4, (), 1)], writes=[(0, 0, 2, 3)])


def test_a_prefix_hit_of_a_window_needs_what_is_seen() -> None:
    runner = make_runner(groups=(GroupLimits(window=2),), tokens_of=lambda seq_id: [5, 3, 1, 2, 8])
    run(runner, [row(7, 0, 0, (5, 3, 1, 2))], [admission(0, 7)], [(0, 0, 0, 1), (0, 0, 1, 2)])
    assert run(runner, [row(8, 1, 4, (8,))], [admission(1, 8, num_computed=4)], [(1, 0, 1, 2), (1, 0, 2, 3)]) == [24]
    with pytest.raises(AssertionError, match="page tables only grow"):
        run(runner, [row(9, 2, 4, (8,))], [admission(2, 9, num_computed=4)], [(2, 0, 2, 3)])


def test_spoilt_pages_are_noticed(runner: CountingRunner) -> None:
    runner.poison([1])
    with pytest.raises(AssertionError, match="page 1 of sequence 7 holds"):
        run(runner, [row(7, 0, 3, (), 1)])
