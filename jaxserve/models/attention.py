"""Grouped-query attention over KV pages: project, rotate, write the step's keys and values, attend, project back.

The pages' layout and the attention itself are `pallas_kernels`; which page a token writes is in `AttentionInputs`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.models.linear import linear
from jaxserve.models.rope import rotate
from jaxserve.models.spec import ModelSpec
from pallas_kernels import paged_attention, write_kv


class LayerInputs(NamedTuple):
    """What the layers of one KV group share in a step: `AttentionInputs` with that group's pages, and the rotary tables."""

    row_start: Int32[Array, "B+1"]
    kv_length: Int32[Array, "B"]
    page_tables: Int32[Array, "B P"]
    token_row: Int32[Array, "T"]
    position: Int32[Array, "T"]
    write_page: Int32[Array, "T"]
    write_offset: Int32[Array, "T"]
    cos: Float[Array, "T half"]
    sin: Float[Array, "T half"]


class Attention(nnx.Module):
    """Weights `qkv` [K, G + 2, H, D] (of each kv head: its G query heads, key, value) and `out` [D, N * H]; biases likewise."""

    def __init__(
        self,
        spec: ModelSpec,
        qkv: Float[Array, "K G+2 H D"],
        out: Float[Array, "D N*H"],
        qkv_bias: Float[Array, "K G+2 H"] | None = None,
        out_bias: Float[Array, "D"] | None = None,
        *,
        window: int | None,
        backend: str | None,
    ) -> None:
        self.num_heads, self.num_query_groups, self.head_dim = spec.num_heads, spec.num_query_groups, spec.head_dim
        self.window, self.backend = window, backend
        self.qkv, self.out = nnx.Param(qkv), nnx.Param(out)
        self.qkv_bias, self.out_bias = nnx.Param(qkv_bias), nnx.Param(out_bias)

    def __call__(
        self, x: Float[Array, "T D"], inputs: LayerInputs, pages: Float[Array, "num_pages 2 K page_size H"], *, is_decode: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output `[T, D]` in the dtype of `x`, and the pages with the step's keys and values."""
        num_tokens, g = x.shape[0], self.num_query_groups
        qkv = linear(x, self.qkv[...], self.qkv_bias.get_value(), backend=self.backend)  # [T, K, G + 2, H]
        q = rotate(qkv[:, :, :g].reshape(num_tokens, self.num_heads, self.head_dim), inputs.cos, inputs.sin)
        k = rotate(qkv[:, :, g], inputs.cos, inputs.sin)
        pages = write_kv(pages, k, qkv[:, :, g + 1], inputs.write_page, inputs.write_offset)
        attended = paged_attention(
            q,
            pages,
            inputs.page_tables,
            inputs.row_start,
            inputs.kv_length,
            inputs.token_row,
            inputs.position,
            is_decode=is_decode,
            scale=self.head_dim**-0.5,
            window=self.window,
            implementation=self.backend,
        )
        out = linear(attended.reshape(num_tokens, -1), self.out[...], self.out_bias.get_value(), backend=self.backend)
        return out, pages
