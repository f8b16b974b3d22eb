"""Logits in parts: the largest of all parts is that of the whole rows, whatever lies in the columns past the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.shards import AXIS
from jaxserve.runner.logits import Logits

VOCAB = 501


def rows_with_ties() -> np.ndarray:
    """Small numbers, equal in many columns, in every part; then a tie across parts alone, and what is not finite, each in a row."""
    rows = np.random.default_rng(4).integers(-3, 4, size=(40, VOCAB)).astype(np.float32)
    rows[0] = -2.0  # below the padding
    rows[0, [500, 260, 130]] = -1.0
    rows[1, 300] = np.nan
    rows[2] = -np.inf
    rows[3, [40, 499]] = np.inf
    rows[4, :500] = -np.inf
    rows[5, 0], rows[5, 1:] = np.nan, -np.inf
    return rows


@pytest.mark.parametrize("num_parts", [1, 2, 4, 8])
def test_largest_of_the_parts_is_that_of_the_rows(num_parts: int) -> None:
    rows = rows_with_ties()
    size = -(-VOCAB // num_parts)
    padded = np.pad(rows, ((0, 0), (0, size * num_parts - VOCAB)), constant_values=99.0)
    parts = jnp.asarray(padded.reshape(-1, num_parts, size).swapaxes(0, 1))

    def devices(part: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = Logits(part, VOCAB, num_parts)
        return *logits.largest(), logits.rows()

    best, token_id, whole = map(np.asarray, jax.jit(jax.vmap(devices, axis_name=AXIS))(parts))
    is_finite = np.isfinite(rows.max(-1))
    assert np.flatnonzero(~is_finite).tolist() == [1, 2, 3, 5]
    for device in range(num_parts):
        np.testing.assert_array_equal(whole[device], rows)
        np.testing.assert_array_equal(np.isfinite(best[device]), is_finite)
        np.testing.assert_array_equal(best[device][is_finite], rows.max(-1)[is_finite])
        np.testing.assert_array_equal(token_id[device][is_finite], rows.argmax(-1)[is_finite])


def test_a_nan_among_many_rows_is_seen() -> None:
    """In sizes for which the maximum of XLA:CPU passes over it."""
    rows = np.random.default_rng(5).normal(size=(256, 2000)).astype(np.float32)
    rows[np.arange(256), np.arange(256) * 7] = np.nan
    assert np.isposinf(jax.jit(lambda x: Logits(x, 2000).largest()[0])(rows)).all()


def test_the_largest_of_numbers_whose_sum_is_not_finite() -> None:
    """Of either sign, beside -inf, and in parts."""
    rows = np.random.default_rng(6).uniform(-3.4e38, 3.4e38, size=(64, VOCAB + 3)).astype(np.float32)
    rows[:32, 100:140] = np.abs(rows[:32, 100:140])
    rows[::2, 3::5] = -np.inf
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isnan(rows.sum(-1)).any() and np.isinf(rows.sum(-1)).any()
    for num_parts in (1, 2):
        parts = jnp.asarray(rows.reshape(64, num_parts, -1).swapaxes(0, 1))
        best, token_id = jax.jit(jax.vmap(lambda part, n=num_parts: Logits(part, VOCAB + 3, n).largest(), axis_name=AXIS))(parts)
        np.testing.assert_array_equal(best[0], rows.max(-1))
        np.testing.assert_array_equal(token_id[0], rows.argmax(-1))
