"""The decoder: embedding, layers, final norm, head. Station 6 of a token's way; called inside the trace of `runner.step`.

Built from loaded arrays by `load.load_model`. Knows nothing of requests, buckets or sampling.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxserve.arrays import AttentionInputs, KVPages
from jaxserve.models.attention import Attention, LayerInputs
from jaxserve.models.linear import linear
from jaxserve.models.mlp import GatedMLP
from jaxserve.models.norm import RMSNorm
from jaxserve.models.rope import rotary_tables
from jaxserve.models.spec import ModelSpec


class DecoderLayer(nnx.Module):
    """One pre-norm layer: attention, then MLP, each added to the residual stream."""

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def __call__(
        self, x: Float[Array, "T D"], inputs: LayerInputs, pages: Float[Array, "num_pages 2 K page_size H"], *, is_decode: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the residual stream `[T, D]` after the layer, and its pages."""
        attended, pages = self.attention(self.attention_norm(x), inputs, pages, is_decode=is_decode)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), pages


class Decoder(nnx.Module):
    """A decoder-only model. `embed` is [V, D]; `head` is [V, D], or None where the embedding is the head.

    Attributes:
        spec: What the model is.
        dtype: Of the activations, the residual stream included.
        backend: Implementation of the head's product, a name of `pallas_kernels.dispatch`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: DTypeLike,
        embed: Float[Array, "V D"],
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: Float[Array, "V D"] | None,
        *,
        backend: str | None = None,
    ) -> None:
        self.spec, self.dtype, self.backend = spec, jnp.dtype(dtype), backend
        self.embed, self.layers, self.norm, self.head = nnx.Param(embed), nnx.List(layers), norm, nnx.Param(head)

    def forward(self, token_ids: Int32[Array, "T"], ctx: AttentionInputs, pages: KVPages, *, is_decode: bool) -> tuple[jax.Array, KVPages]:
        """Runs every layer over the step's tokens.

        Args:
            token_ids: The tokens; padding may hold any id.
            ctx: Where they live.
            pages: One page array for each layer index; `ctx` says where this step writes.
            is_decode: T == B and token b is the only one of row b.

        Returns:
            The hidden states after the final norm `[T, D]`, what `logits` takes, and the pages with the step's keys and values.
        """
        # Without the barrier XLA fuses the tables into every layer's rotation: cosines once for each head dimension of each layer.
        cos, sin = lax.optimization_barrier(rotary_tables(self.spec.rope, ctx.position, ctx.rope_length))
        inputs = [
            LayerInputs(
                row_start=ctx.row_start,
                kv_length=ctx.kv_length,
                page_tables=ctx.page_tables[:, x],
                token_row=ctx.token_row,
                position=ctx.position,
                write_page=ctx.write_page[x],
                write_offset=ctx.write_offset,
                cos=cos,
                sin=sin,
            )
            for x in range(len(self.spec.kv_groups))
        ]
        arrays = list(pages)
        hidden = self.embed[...].at[token_ids].get(mode="clip").astype(self.dtype)
        for layer, (group, j) in zip(self.layers, self.spec.kv_places, strict=True):
            graphdef, state = nnx.split(layer)
            hidden, arrays[j] = _run_layer(graphdef, is_decode, state, hidden, inputs[group], arrays[j])
        return self.norm(hidden), tuple(arrays)

    def logits(self, hidden: Float[Array, "R D"]) -> jax.Array:
        """Next-token logits `[R, V]` float32 of hidden states that `forward` returned."""
        head = self.head.get_value()
        return linear(hidden, self.embed[...] if head is None else head, out_dtype=jnp.float32, backend=self.backend)


@partial(jax.jit, static_argnums=(0, 1))
def _run_layer(
    graphdef: Any, is_decode: bool, state: Any, x: jax.Array, inputs: LayerInputs, pages: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One layer as a jit of its own: layers of equal kind have equal graphdefs, so all but the first reuse its trace."""
    layer: DecoderLayer = nnx.merge(graphdef, state)
    return layer(x, inputs, pages, is_decode=is_decode)
