"""The gated delta rule against a loop over tokens in NumPy, for rows of many lengths in one step and in several."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.delta_rule import DeltaInputs, decode_rows, initial_states, ragged_rows

K, N, KEY, VALUE = 2, 4, 8, 6
LENGTHS = (1, 1, 3, 1, 70, 8, 9, 0, 0)
NULL = len(LENGTHS) + 2


def random_inputs(num_tokens: int, seed: int = 0) -> DeltaInputs:
    rng = np.random.default_rng(seed)
    query, key = (rng.normal(size=(num_tokens, K, KEY)) for _ in range(2))
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    value = rng.normal(size=(num_tokens, N, VALUE))
    decay = -rng.exponential(0.5, size=(num_tokens, N))
    decay[::7] = -60.0  # as good as forgetting everything
    rate = rng.uniform(size=(num_tokens, N))
    return DeltaInputs(*(jnp.array(x, jnp.float32) for x in (query * KEY**-0.5, key, value, decay, rate)))


def loop(inputs: DeltaInputs, start: int, stop: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One row, token after token, in float64."""
    query, key, value, decay, rate = (np.asarray(part, np.float64)[start:stop] for part in inputs)
    state, out = state.astype(np.float64).copy(), np.zeros((stop - start, N, VALUE))
    for t in range(stop - start):
        for n in range(N):
            k, q = key[t, n * K // N], query[t, n * K // N]
            state[n] *= np.exp(decay[t, n])
            state[n] += np.outer(k, rate[t, n] * (value[t, n] - k @ state[n]))
            out[t, n] = q @ state[n]
    return out, state


def run(inputs: DeltaInputs, states: Any, row_start: Any, row_slot: Any, is_first: Any, block_size: int) -> tuple[jax.Array, jax.Array]:
    """`ragged_rows` as part of a compiled step."""
    return jax.jit(partial(ragged_rows, block_size=block_size))(inputs, *map(jnp.array, (states, row_start, row_slot, is_first)))


def row_starts(lengths: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def slots_of(lengths: tuple[int, ...]) -> np.ndarray:
    return np.array([NULL if n == 0 else len(lengths) - b for b, n in enumerate(lengths)], np.int32)


@pytest.mark.parametrize("block_size", [1, 4, 64])
def test_ragged_rows(block_size: int) -> None:
    start, slots = row_starts(LENGTHS), slots_of(LENGTHS)
    num_tokens = int(start[-1]) + 5  # padding behind
    inputs = random_inputs(num_tokens)
    states = np.random.default_rng(1).normal(size=(NULL + 1, N, KEY, VALUE)).astype(np.float32)
    is_first = np.array([b % 2 == 0 for b in range(len(LENGTHS))])
    # Padding, the null slot and the slots of sequences that begin hold what must never be read.
    broken = DeltaInputs(*(part.at[start[-1] :].set(jnp.nan) for part in inputs))
    held = states.copy()
    held[[*slots[is_first], NULL]] = np.nan
    out, after = (np.asarray(x) for x in run(broken, held, start, slots, is_first, block_size))
    for b, (first, last) in enumerate(pairwise(start)):
        if LENGTHS[b]:
            expected, state = loop(inputs, first, last, states[slots[b]] * (not is_first[b]))
            np.testing.assert_allclose(out[first:last], expected, atol=2e-5)
            np.testing.assert_allclose(after[slots[b]], state, atol=2e-5)
    np.testing.assert_array_equal(out[start[-1] :], 0.0)
    others = sorted(set(range(NULL)) - set(slots.tolist()))
    assert others
    np.testing.assert_array_equal(after[others], states[others])


def test_decode_rows_continue_what_blocks_began() -> None:
    inputs = random_inputs(40, seed=2)
    expected, end = loop(inputs, 0, 40, np.zeros((N, KEY, VALUE)))
    zero = jnp.zeros((2, N, KEY, VALUE), jnp.float32)
    first = DeltaInputs(*(part[:37] for part in inputs))
    out, states = run(first, zero, [0, 37], [0], [True], 16)
    np.testing.assert_allclose(out, expected[:37], atol=2e-5)
    state = states[:1]
    for t in range(37, 40):
        out, state = decode_rows(DeltaInputs(*(part[t : t + 1] for part in inputs)), state)
        np.testing.assert_allclose(out[0], expected[t], atol=2e-5)
    np.testing.assert_allclose(state[0], end, atol=2e-5)


def test_a_neighbour_that_is_not_a_number_stays_alone() -> None:
    lengths = (5, 6, 7)
    start, slots = row_starts(lengths), slots_of(lengths)
    inputs = random_inputs(18, seed=3)
    broken = DeltaInputs(*(part.at[5:11].set(jnp.nan) for part in inputs))
    zero = jnp.zeros((NULL + 1, N, KEY, VALUE), jnp.float32)
    is_first = [True] * 3
    good, good_states = run(inputs, zero, start, slots, is_first, 4)
    out, states = run(broken, zero, start, slots, is_first, 4)
    for b in (0, 2):
        np.testing.assert_array_equal(out[start[b] : start[b + 1]], good[start[b] : start[b + 1]])
        np.testing.assert_array_equal(states[slots[b]], good_states[slots[b]])
    assert np.isnan(states[slots[1]]).all()


def test_a_state_that_begins_is_zero_whatever_it_held() -> None:
    states = jnp.array([[[[jnp.nan]]], [[[3.0]]]])
    np.testing.assert_array_equal(initial_states(states, jnp.array([True, False])).ravel(), [0.0, 3.0])


def test_a_key_that_repeats_does_not_cancel() -> None:
    # All keys equal and nothing forgotten: each token takes back all that the one before wrote.
    inputs = random_inputs(64, seed=4)
    inputs = inputs._replace(key=jnp.broadcast_to(inputs.key[:1], inputs.key.shape), decay=jnp.zeros((64, N)), rate=jnp.ones((64, N)))
    expected, end = loop(inputs, 0, 64, np.zeros((N, KEY, VALUE)))
    out, states = run(inputs, jnp.zeros((2, N, KEY, VALUE)), [0, 64], [0], [True], 64)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_allclose(states[0], end, atol=2e-5)
