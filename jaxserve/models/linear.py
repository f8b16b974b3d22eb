"""The one place where activations meet a weight matrix: every projection and the LM head go through `linear`.

A weight is stored with its input axis last, `[*out, in]`, as checkpoints store it: kernels read that orientation where it lies,
and a tied head needs it anyway. Knows nothing of layers; the product itself is `pallas_kernels.linear`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import pallas_kernels


def headwise(x: Float[Array, "T N in"], weight: Float[Array, "N out in"]) -> jax.Array:
    """Each head's own matrix: `x[:, n] @ weight[n].T`. Returns `[T, N, out]` in the dtype of `x`; sums are kept in float32."""
    return jnp.einsum("tni,noi->tno", x.astype(weight.dtype), weight, preferred_element_type=jnp.float32).astype(x.dtype)


def linear(
    x: Float[Array, "T in"],
    weight: Float[Array, "*out in"],
    bias: Float[Array, "*out"] | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
) -> jax.Array:
    """`x @ weight.T + bias` over the last axis of both. Returns `[T, *out]` in `out_dtype`, by default that of `x`.

    Sums are kept in float32. Where the weight is wider than `x` (float16 on CPU, see `load.storage_dtype`), `x` is widened.
    `backend` is a name of `pallas_kernels.dispatch`; None is the best available.
    """
    # A weight with several output axes would be transposed whole before the dot; as a matrix it is used where it lies.
    num_outputs = math.prod(weight.shape[:-1])
    matrix = weight.reshape(num_outputs, weight.shape[-1])
    flat_bias = None if bias is None else bias.reshape(num_outputs)
    out = pallas_kernels.linear(x, matrix, flat_bias, out_dtype=out_dtype, implementation=backend)
    return out.reshape(x.shape[0], *weight.shape[:-1])
