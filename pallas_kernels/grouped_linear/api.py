"""Rows that are sorted into blocks, each block times the matrix of its own expert: the products of a mixture of experts.

Says the shapes and the rules that every implementation keeps. `jax.lax.ragged_dot` is not used: on CPU and GPU XLA lowers it to a
product of every row with every expert. Next: `reference` (the rules as code), `xla` (any device).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels import dispatch


def grouped_linear(
    x: Float[Array, "M in"],
    weight: Float[Array, "E out in"],
    bias: Float[Array, "E out"] | None,
    block_expert: Int32[Array, "num_blocks"],
    num_used: Int32[Array, ""],
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`x @ weight[expert].T + bias[expert]` for each block of rows. Returns `[M, out]` in `out_dtype`, by default the dtype of `x`.

    Args:
        x: M = num_blocks * B rows, block after block; cast to the dtype of `weight` first.
        weight: The experts' matrices, inputs last.
        bias: Added to the sums.
        block_expert: The expert of each block.
        num_used: Blocks to compute; the rows of others are 0 and their experts' weights are not read.
        out_dtype: Float32, or the dtype of `x`.
        implementation: One of `dispatch.IMPLEMENTATIONS`; None takes the best one that this machine has.

    Sums are kept in float32. Whatever lies in one row, NaN included, never reaches another.

    Raises:
        ValueError: unknown or unavailable `implementation`.
    """
    assert x.shape[1] == weight.shape[2] and x.shape[0] % block_expert.shape[0] == 0, (x.shape, weight.shape, block_expert.shape)
    assert bias is None or bias.shape == weight.shape[:2], (weight.shape, bias)
    run = dispatch.load("grouped_linear", implementation or dispatch.choose(dispatch.this_device())[0])
    product: jax.Array = run(x, weight, bias, block_expert, num_used, out_dtype=jnp.dtype(x.dtype if out_dtype is None else out_dtype))
    return product
