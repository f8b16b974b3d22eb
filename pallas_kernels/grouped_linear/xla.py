"""Blocks of rows times their experts' matrices in plain JAX operations: a loop over the blocks in use, one product each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def grouped_linear(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, block_expert: jax.Array, num_used: jax.Array, *, out_dtype: DTypeLike
) -> jax.Array:
    """See `api.grouped_linear`. The cost follows `num_used`, which is known when the step runs only."""
    size = x.shape[0] // block_expert.shape[0]
    x = x.astype(weight.dtype)

    def one_block(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = block_expert[i]
        matrix = lax.dynamic_index_in_dim(weight, expert, keepdims=False)
        rows = lax.dynamic_slice_in_dim(x, i * size, size)
        sums = lax.dot_general(rows, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        if bias is not None:
            sums = sums + lax.dynamic_index_in_dim(bias, expert).astype(jnp.float32)
        return lax.dynamic_update_slice_in_dim(out, sums.astype(out_dtype), i * size, 0)

    return lax.fori_loop(0, num_used, one_block, jnp.zeros((x.shape[0], weight.shape[1]), out_dtype))
