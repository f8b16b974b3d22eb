"""Blocks of rows times their experts' matrices in plain JAX operations: a loop over the blocks in use, one product each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def grouped_linear(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    place: jax.Array,
    block_expert: jax.Array,
    num_used: jax.Array,
    *,
    copies: int,
    out_dtype: DTypeLike,
) -> jax.Array:
    """See `api.grouped_linear`; rows that no block in use has are 0. The cost follows `num_used`, which only the step knows."""
    num_rows, size = place.shape[0], place.shape[0] // block_expert.shape[0]
    x = x.astype(weight.dtype)

    def one_block(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = block_expert[i]
        matrix = lax.dynamic_index_in_dim(weight, expert, keepdims=False)
        rows = x.at[lax.dynamic_slice_in_dim(place, i * size, size) // copies].get(mode="clip")
        sums = lax.dot_general(rows, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        if bias is not None:
            sums = sums + lax.dynamic_index_in_dim(bias, expert).astype(jnp.float32)
        return lax.dynamic_update_slice_in_dim(out, sums.astype(out_dtype), i * size, 0)

    # A scatter would be a loop over rows in each turn: blocks are written in their order, and put in place once.
    out = lax.fori_loop(0, num_used, one_block, jnp.zeros((num_rows, weight.shape[1]), out_dtype))
    row = jnp.full(x.shape[0] * copies, num_rows, jnp.int32).at[place].set(jnp.arange(num_rows, dtype=jnp.int32), mode="drop")
    return out.at[row].get(mode="fill", fill_value=0)
