"""Sums of hidden states by row, against NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxserve.arrays import AttentionInputs
from jaxserve.core.buckets import Bucket
from jaxserve.core.plan import Plan, Row
from jaxserve.runner.layout import StepLayout
from jaxserve.runner.pooling import sum_rows
from jaxserve.runner.prepare import prepare


def inputs(row_tokens: list[int], num_tokens: int) -> AttentionInputs:
    """Only what rows are made of is read."""
    token_row = np.repeat(np.arange(len(row_tokens)), row_tokens)
    padding = np.full(num_tokens - len(token_row), len(row_tokens))
    nothing = jnp.zeros(0, jnp.int32)
    values = dict.fromkeys(AttentionInputs._fields, nothing)
    row_start = np.concatenate([[0], np.cumsum(row_tokens)])
    values |= {"row_start": jnp.asarray(row_start, jnp.int32), "token_row": jnp.asarray(np.concatenate([token_row, padding]), jnp.int32)}
    return AttentionInputs(**values)


def test_each_row_sums_its_last_tokens() -> None:
    hidden = np.arange(16, dtype=np.float32).reshape(8, 2)
    sums = sum_rows(jnp.asarray(hidden), inputs([1, 3, 2, 0], 8), jnp.asarray([1, 2, 0, 0], jnp.int32))
    # Row 1 owns tokens 1 to 3, of which the last two count; tokens 6 and 7 are padding.
    np.testing.assert_array_equal(sums, [[0, 1], [4 + 6, 5 + 7], [0, 0], [0, 0]])


def test_what_is_not_finite_stays_in_its_row() -> None:
    hidden = np.ones((6, 2), np.float32)
    hidden[[2, 5]] = np.nan  # a token of row 1, and padding
    sums = sum_rows(jnp.asarray(hidden, jnp.bfloat16), inputs([2, 2], 6), jnp.asarray([2, 2], jnp.int32))
    assert sums.dtype == jnp.float32
    np.testing.assert_array_equal(sums, [[2, 2], [np.nan, np.nan]])


def test_the_counts_reach_the_program_in_the_order_of_the_rows() -> None:
    layout = StepLayout(Bucket(8, 4, 4, is_decode=False, has_pooling=True), num_groups=1, page_size=8)
    rows = (Row(0, 2, 5, 1, (), True), Row(1, 0, 0, 3, (7, 8, 9), False, num_pooled_tokens=3))
    prepared = prepare(Plan(step_id=0, rows=rows), layout, null_slot=4, null_penalty_slot=1)
    section = layout.sections["num_pooled_tokens"]
    assert prepared.packed[section.offset : section.end].tolist() == [0, 3, 0, 0]
