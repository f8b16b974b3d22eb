"""Grouped-query attention over KV pages: project, normalize, rotate, write the step's keys and values, attend, project back.

The pages' layout and the attention itself are `pallas_kernels`; which page a token writes is in `AttentionInputs`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.arrays import PageArray
from jaxserve.models.kv_cache import write_and_attend
from jaxserve.models.linear import linear
from jaxserve.models.norm import Norm
from jaxserve.models.rope import rotate
from jaxserve.models.spec import AttentionSpec


class LayerInputs(NamedTuple):
    """What layers of one KV group and one rotary embedding share in a step: `AttentionInputs` with that group's pages, and the tables.

    `cos` and `sin` are None for layers that do not rotate.
    """

    row_start: Int32[Array, "B+1"]
    kv_length: Int32[Array, "B"]
    page_tables: Int32[Array, "B P"]
    token_row: Int32[Array, "T"]
    position: Int32[Array, "T"]
    write_page: Int32[Array, "T"]
    write_offset: Int32[Array, "T"]
    cos: Float[Array, "T half"] | None
    sin: Float[Array, "T half"] | None


class Attention(nnx.Module):
    """One attention layer.

    Weights: `qkv` [K, G + 2, H, D] (of each kv head: its G query heads, key, value; with a gate [K, 2 * G + 2, H, D], the gates last) and
    `out` [D, N * H]; biases likewise.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        qkv: Float[Array, "K parts H D"],
        out: Float[Array, "D N*H"],
        qkv_bias: Float[Array, "K parts H"] | None = None,
        out_bias: Float[Array, "D"] | None = None,
        *,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        sinks: Float[Array, "N"] | None = None,
        backend: str | None,
    ) -> None:
        self.spec, self.backend = spec, backend
        self.qkv, self.out = nnx.Param(qkv), nnx.Param(out)
        self.qkv_bias, self.out_bias = nnx.Param(qkv_bias), nnx.Param(out_bias)
        self.q_norm, self.k_norm, self.sinks = nnx.data(q_norm), nnx.data(k_norm), nnx.Param(sinks)

    def __call__(self, x: Float[Array, "T D"], inputs: LayerInputs, pages: PageArray, *, is_decode: bool) -> tuple[jax.Array, PageArray]:
        """Returns the output `[T, D]` in the dtype of `x`, and the pages with the step's keys and values."""
        spec, num_tokens, g = self.spec, x.shape[0], self.spec.num_query_groups
        qkv = linear(x, self.qkv[...], self.qkv_bias.get_value(), backend=self.backend)  # [T, K, parts, H]
        if spec.clip is not None:
            qkv = jnp.clip(qkv, -spec.clip, spec.clip)
        heads = (num_tokens, spec.num_heads, spec.head_dim)
        q = self._positioned(qkv[:, :, :g].reshape(heads), self.q_norm, inputs)
        k = self._positioned(qkv[:, :, g], self.k_norm, inputs)
        attended, pages = write_and_attend(
            _sharpened(q, inputs.position, spec.temperature),
            k,
            qkv[:, :, g + 1],
            inputs,
            pages,
            backend=self.backend,
            is_decode=is_decode,
            scale=spec.scale,
            window=spec.window,
            chunk=spec.chunk,
            soft_cap=spec.soft_cap,
            sinks=self.sinks.get_value(),
        )
        if spec.has_gate:
            attended = attended * nnx.sigmoid(qkv[:, :, g + 2 :].reshape(heads))
        out = linear(attended.reshape(num_tokens, -1), self.out[...], self.out_bias.get_value(), backend=self.backend)
        return out, pages

    def _positioned(self, x: Float[Array, "T heads H"], norm: Norm | None, inputs: LayerInputs) -> jax.Array:
        """Queries or keys, normalized as the model does it and rotated to their positions."""
        scope = None if self.spec.qk_norm is None else self.spec.qk_norm.scope
        if norm is not None and scope != "plain":
            x = norm(x.reshape(x.shape[0], -1)).reshape(x.shape) if scope == "all" else norm(x)
        if inputs.cos is not None and inputs.sin is not None:
            x = rotate(x, inputs.cos, inputs.sin)
        return norm(x) if norm is not None and scope == "plain" else x


def _sharpened(q: Float[Array, "T N H"], position: Int32[Array, "T"], temperature: tuple[float, float] | None) -> jax.Array:
    """Queries scaled up with their position, as Llama 4 does where it does not rotate (Llama4TextAttention)."""
    if temperature is None:
        return q
    floor, scale = temperature
    factor = jnp.log1p(jnp.floor((position.astype(jnp.float32) + 1.0) / floor)) * scale + 1.0
    return (q * factor[:, None, None]).astype(q.dtype)
