"""Activations times a weight matrix, `x @ weight.T + bias`: every projection of a model and its head.

Says the shapes and the rules that every implementation keeps, checks the arguments and hands over to the implementation that
`pallas_kernels.dispatch` picks. Next: `reference` (the rules as code), `xla` (any device), `cpu_native` (C++ on CPU).
"""

from __future__ import annotations

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import dispatch


def linear(
    x: Float[Array, "T in"],
    weight: Float[Array, "out in"],
    bias: Float[Array, "out"] | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`x @ weight.T + bias`. Returns `[T, out]` in `out_dtype`, by default the dtype of `x`.

    Args:
        x: Activations; cast to the dtype of `weight` first.
        weight: Float32, bfloat16 or float16, as checkpoints store it: the inputs of an output lie together.
        bias: Added to the sums.
        out_dtype: Float32, or the dtype of `x`.
        implementation: One of `dispatch.IMPLEMENTATIONS`; None takes the best one that this machine has.

    Sums are kept in float32. Whatever lies in one token, NaN and infinity included, never reaches the output of another.

    Raises:
        ValueError: unknown or unavailable `implementation`.
    """
    assert x.ndim == weight.ndim == 2 and x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert bias is None or bias.shape == weight.shape[:1], (bias.shape, weight.shape)
    run = dispatch.load("linear", implementation or dispatch.choose(dispatch.this_device())[0])
    product: jax.Array = run(x, weight, bias, out_dtype=x.dtype if out_dtype is None else out_dtype)
    return product
