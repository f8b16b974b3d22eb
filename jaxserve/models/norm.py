"""RMS and layer normalization. Statistics are taken in float32 whatever the activations' dtype.

Formulas and roundings follow the norm classes of transformers' models (5.24): LlamaRMSNorm, GemmaRMSNorm, Olmo2RMSNorm, CohereLayerNorm and
torch's LayerNorm. Which one a model has is its `NormSpec`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxserve.models.spec import NormSpec


class Norm(nnx.Module):
    """`(x - mean) / sqrt(variance + eps) * weight + bias`; RMS has neither mean nor bias.

    The weight has the last axes of what is normalized: [H], or [N, H] for one of its own for each head; None multiplies by nothing.
    With a mesh `axis`, each device has an equal share of the last axis, and the statistics are of all shares.
    """

    def __init__(
        self,
        spec: NormSpec,
        weight: Float[Array, "*heads H"] | None,
        bias: Float[Array, "*heads H"] | None = None,
        *,
        axis: str | None = None,
    ) -> None:
        self.spec, self.axis, self.weight, self.bias = spec, axis, nnx.Param(weight), nnx.Param(bias)

    def __call__(self, x: Float[Array, "*rows H"], dtype: DTypeLike | None = None) -> jax.Array:
        """Returns the shape of `x` in `dtype`, by default that of `x`; each last axis is normalized by itself."""
        spec, weight, bias = self.spec, self.weight.get_value(), self.bias.get_value()
        dtype = x.dtype if dtype is None else dtype
        wide = x.astype(jnp.float32)
        if spec.is_centered:
            wide = wide - self._mean(wide)
        wide = wide * lax.rsqrt(self._mean(jnp.square(wide)) + spec.eps)
        if weight is None:
            assert bias is None
            return wide.astype(dtype)
        leading = (None,) * (x.ndim - weight.ndim)
        if not (spec.is_wide or spec.is_offset or spec.is_centered):
            # As LlamaRMSNorm: the quotient is rounded before the weight.
            return wide.astype(dtype) * weight[leading].astype(dtype)
        wide = wide * (weight[leading].astype(jnp.float32) + (1.0 if spec.is_offset else 0.0))
        return (wide if bias is None else wide + bias[leading].astype(jnp.float32)).astype(dtype)

    def _mean(self, x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, axis=-1, keepdims=True)
        return mean if self.axis is None else lax.pmean(mean, self.axis)
