"""Rows that are dealt out to blocks, each block times the matrix of its own expert: the products of a mixture of experts.

Says the shapes and the rules that every implementation keeps. `jax.lax.ragged_dot` is not used: on CPU and GPU XLA lowers it to a
product of every row with every expert. Next: `reference` (the rules as code), `xla` (any device).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels import dispatch

NO_COPY = 2**31 - 1
"""In place of the number of a copy: none. Past the end of every array."""


def grouped_linear(
    x: Float[Array, "T in"],
    weight: Float[Array, "E out in"],
    bias: Float[Array, "E out"] | None,
    place: Int32[Array, "M"],
    block_expert: Int32[Array, "num_blocks"],
    num_used: Int32[Array, ""],
    *,
    copies: int = 1,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Row p of the result is `x[p // copies] @ weight[expert].T + bias[expert]`, with the expert of the block that has p.

    Returns `[T * copies, out]` in `out_dtype`, by default the dtype of `x`. Callers sort and pad nothing: rows are read where they
    lie, and written where the next step wants them. Rows of the result that no block in use has are undefined and may be NaN: leave them
    out with `where`, not with a weight of 0.

    Args:
        x: Read once for each copy; cast to the dtype of `weight` first.
        weight: The experts' matrices, inputs last.
        bias: Added to the sums.
        place: M = num_blocks * B numbers, block after block: the p of each of the block's B rows, or NO_COPY. No p comes twice.
        block_expert: The expert of each block.
        num_used: Blocks to compute; neither the rows nor the experts' weights of others are read.
        copies: Rows of the result for each row of `x`.
        out_dtype: Float32, or the dtype of `x`.
        implementation: One of `dispatch.IMPLEMENTATIONS`; None takes the best one that this machine has.

    Sums are kept in float32. Whatever lies in one row, NaN included, never reaches another.

    Raises:
        ValueError: unknown or unavailable `implementation`.
    """
    assert x.shape[1] == weight.shape[2], (x.shape, weight.shape)
    assert place.shape[0] % block_expert.shape[0] == 0, (place.shape, block_expert.shape)
    assert bias is None or bias.shape == weight.shape[:2], (weight.shape, bias)
    run = dispatch.load("grouped_linear", implementation or dispatch.choose(dispatch.this_device())[0])
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    product: jax.Array = run(x, weight, bias, place, block_expert, num_used, copies=copies, out_dtype=dtype)
    return product
