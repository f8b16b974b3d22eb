"""Hidden states to the parts of embeddings: one sum for each row, traced into the programs that `--enable-embeddings` adds.

A prompt may come in several chunks; the scheduler adds their sums up (`scheduler.pooling`). Next: `runner.step`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.arrays import AttentionInputs


def sum_rows(hidden: Float[Array, "T D"], ctx: AttentionInputs, num_pooled_tokens: Int32[Array, "B"]) -> jax.Array:
    """The sum over each row's `num_pooled_tokens` last hidden states, float32 `[B, D]`; zeros where there are none.

    A row's sum reads its own tokens alone: what is not finite stays in it.
    """
    num_rows = num_pooled_tokens.shape[0]
    row = jnp.minimum(ctx.token_row, num_rows - 1)
    token = jnp.arange(hidden.shape[0], dtype=jnp.int32)
    is_pooled = (ctx.token_row < num_rows) & (token >= ctx.row_start[row + 1] - num_pooled_tokens[row])
    sums = jnp.zeros((num_rows, hidden.shape[1]), jnp.float32)
    return sums.at[jnp.where(is_pooled, row, num_rows)].add(hidden.astype(jnp.float32), mode="drop")
