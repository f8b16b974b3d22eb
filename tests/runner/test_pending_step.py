"""Outputs of a step in the order of the plan's rows, whatever their order on the device."""

import numpy as np
import pytest

from jaxserve.core.buckets import Bucket
from jaxserve.core.plan import Plan, Row
from jaxserve.runner.pending_step import HostTokens, step_result


def row(num_tokens=1, is_sampled=True, **rest):
    return Row(0, 0, 0, num_tokens, (), is_sampled, **rest)


def host_tokens(count, vocab=4):
    """Row r sampled token 10 + r with logprob -r and rank r + 1; its top ids 0..3 have logprobs in the order 2, 0, 3, 1."""
    top = np.tile(np.array([-2.0, -4.0, -1.0, -3.0], np.float32)[:vocab], (count, 1))
    ids = np.tile(np.arange(vocab, dtype=np.int32), (count, 1))
    rows = np.arange(count)
    return HostTokens((10 + rows).astype(np.int32), -rows.astype(np.float32), (1 + rows).astype(np.int32), ids, top)


def test_decode_rows_are_logits_rows() -> None:
    plan = Plan(step_id=0, rows=(row(), row(is_sampled=False), row()))
    result = step_result(plan, Bucket(4, 4, 4, is_decode=True), np.array([5, 6, 7, 8]), None, None)
    assert (result.token_ids, result.logprobs, result.prompt_logprobs) == ([5, None, 7], [None] * 3, [None] * 3)


@pytest.mark.parametrize(("is_sampled", "expected"), [((True, False, True), [5, None, 6]), ((True, True, True), [5, 6, 7])])
def test_mixed_logits_rows_are_the_sampled_ones(is_sampled, expected) -> None:
    plan = Plan(step_id=0, rows=tuple(row(2, sampled) for sampled in is_sampled))
    assert step_result(plan, Bucket(16, 4, 4, is_decode=False), np.array([5, 6, 7, 8]), None, None).token_ids == expected


def test_each_row_gets_as_many_logprobs_as_it_asked_best_first() -> None:
    rows = (row(is_sampled=False), row(num_logprobs=2), row(), row(num_logprobs=-1), row(num_logprobs=0))
    tokens = host_tokens(8)
    result = step_result(Plan(step_id=0, rows=rows), Bucket(16, 8, 8, is_decode=False), tokens.token_id, tokens, None)
    assert result.token_ids == [None, 10, 11, 12, 13]
    assert result.logprobs == [
        None,
        (10, 0.0, 1, [2, 0], [-1.0, -2.0]),
        None,
        (12, -2.0, 3, [2, 0, 3, 1], [-1.0, -2.0, -3.0, -4.0]),
        (13, -3.0, 4, [], []),
    ]
    assert type(result.logprobs[1].token_id) is int and type(result.logprobs[1].logprob) is float


def test_more_rows_than_are_sorted_together() -> None:
    tokens = host_tokens(150)
    rows = tuple(row(num_logprobs=1) for _ in range(150))
    result = step_result(Plan(step_id=0, rows=rows), Bucket(150, 150, 150, is_decode=True), tokens.token_id, tokens, None)
    assert [entry.token_id for entry in result.logprobs] == list(range(10, 160))
    assert all(entry.top_ids == [2] for entry in result.logprobs)


def test_prompt_logprobs_lie_at_the_rows_tokens() -> None:
    rows = (
        row(),
        row(3, False, num_prompt_logprobs=1, prompt_targets=(1, 2, 3)),
        row(2),
        row(2, num_prompt_logprobs=0, prompt_targets=(5, -1)),
    )
    prompt = host_tokens(16)
    result = step_result(Plan(step_id=0, rows=rows), Bucket(16, 8, 8, False, True), np.arange(8), None, prompt)
    nothing, three, also_nothing, one = result.prompt_logprobs
    assert nothing is None and also_nothing is None
    assert [entry.token_id for entry in three] == [11, 12, 13] and [entry.token_id for entry in one] == [16]
