"""RMS normalization. The mean square is taken in float32 whatever the activations' dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x ** 2) + eps) * weight`; the quotient is rounded to the dtype of `x` before the weight, as in transformers."""

    def __init__(self, weight: Float[Array, "D"], eps: float) -> None:
        self.weight = nnx.Param(weight)
        self.eps = eps

    def __call__(self, x: Float[Array, "T D"]) -> jax.Array:
        """Returns `[T, D]` in the dtype of `x`."""
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * scale).astype(x.dtype) * self.weight[...].astype(x.dtype)[None]
