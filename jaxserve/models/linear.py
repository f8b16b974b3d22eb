"""The one place where activations meet a weight matrix: every projection and the LM head go through `linear`.

A weight is stored with its input axis last, `[*out, in]`, as checkpoints store it: XLA:CPU multiplies that orientation by few
rows fastest in bfloat16, and a tied head needs it anyway. Knows nothing of layers.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def linear(
    x: Float[Array, "T in"],
    weight: Float[Array, "*out in"],
    bias: Float[Array, "*out"] | None = None,
    *,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """`x @ weight.T + bias` over the last axis of both. Returns `[T, *out]` in `out_dtype`, by default that of `x`.

    Sums are kept in float32. Where the weight is wider than `x` (float16 on CPU, see `load.storage_dtype`), `x` is widened.
    """
    dtype = x.dtype if out_dtype is None else out_dtype
    # A weight with several output axes would be transposed whole before the dot; as a matrix it is used where it lies.
    matrix = weight.reshape(math.prod(weight.shape[:-1]), weight.shape[-1])
    out = lax.dot_general(
        x.astype(weight.dtype),
        matrix,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.promote_types(weight.dtype, dtype),
    ).astype(dtype)
    out = out.reshape(x.shape[0], *weight.shape[:-1])
    return out if bias is None else out + bias.astype(dtype)[None]
