"""The decoder: embedding, layers, final norm, head. Station 6 of a token's way; called inside the trace of `runner.step`.

Built from loaded arrays by `load.load_model`. Knows nothing of requests, buckets or sampling.

The residual stream is float32 whatever the activations' dtype: rounding it after every layer was most of the error of bfloat16 runs.
What attention and MLP read, compute and give is in the activations' dtype.

Several devices add up what each computes of attention and MLP. In a large step each then keeps the residual stream of its share of the
tokens only, and norms those: a sum that is dealt out, and the tokens gathered again where they are read, tell as much as a sum that
everybody gets (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxserve.arrays import AttentionInputs, KVPages, PageArray, RecurrentState, RecurrentStates
from jaxserve.models.attention import Attention, LayerInputs
from jaxserve.models.linear import linear
from jaxserve.models.mla import LatentAttention
from jaxserve.models.mlp import MLP
from jaxserve.models.moe import MoE
from jaxserve.models.norm import Norm
from jaxserve.models.recurrent import GatedDeltaNet, RecurrentInputs, recurrent_inputs
from jaxserve.models.rope import rotary_tables
from jaxserve.models.shards import AXIS, UNCUT, Shards, deals_out_tokens
from jaxserve.models.spec import BlockSpec, ModelSpec, RopeSpec

type Memory = PageArray | RecurrentState
"""What a layer keeps of earlier tokens: its page array, or its recurrent state."""


class DecoderLayer(nnx.Module):
    """Attention or a recurrent net, and an MLP, with the norms around them, in the order that the block says. A norm that the model lacks
    is None."""

    def __init__(
        self,
        block: BlockSpec,
        attention: Attention | LatentAttention | GatedDeltaNet,
        mlp: MLP | MoE,
        norms: Mapping[str, Norm],
        dtype: DTypeLike,
        *,
        shards: Shards = UNCUT,
    ) -> None:
        self.block, self.attention, self.mlp, self.dtype, self.shards = block, attention, mlp, jnp.dtype(dtype), shards
        self.norms = nnx.Dict(norms)

    def __call__(
        self, x: Float[Array, "tokens D"], inputs: LayerInputs | RecurrentInputs, memory: Memory, *, is_decode: bool
    ) -> tuple[jax.Array, Memory]:
        """Returns the residual stream after the layer, float32 as it came, of all tokens or of this device's; and its memory with the
        step's tokens."""
        is_dealt = x.shape[0] < inputs.token_row.shape[0]
        read, num_tokens = self._read("attention_norm", x, is_dealt), inputs.row_start[-1]
        mixer: Any = self.attention  # each kind takes inputs and memory of its own kind
        out, memory = mixer(read, inputs, memory, is_decode=is_decode)
        if not self.block.is_parallel:
            x = x + self._added("attention_out_norm", summed(out, self.shards, is_dealt))
            hidden = self.mlp(self._read("mlp_norm", x, is_dealt), num_tokens)
            return x + self._added("mlp_out_norm", summed(hidden, self.shards, is_dealt)), memory
        hidden = self.mlp(read if self.block.has_shared_norm else self._read("mlp_norm", x, is_dealt), num_tokens)
        out, hidden = summed((out, hidden), self.shards, is_dealt)
        return x + (self._added("attention_out_norm", out) + self._added("mlp_out_norm", hidden)), memory

    def _read(self, norm: str, x: jax.Array, is_dealt: bool) -> jax.Array:
        """What attention or MLP reads of the residual stream, of all tokens, in the activations' dtype."""
        return gathered(self.norms[norm](x, self.dtype) if norm in self.norms else x.astype(self.dtype), is_dealt)

    def _added(self, norm: str, out: jax.Array) -> jax.Array:
        """What is added to the residual stream for an output of attention or MLP, float32."""
        out = self.norms[norm](out, jnp.float32) if norm in self.norms else out.astype(jnp.float32)
        return out if self.block.residual_multiplier == 1.0 else out * self.block.residual_multiplier


class Decoder(nnx.Module):
    """A decoder-only model.

    Weights: `embed` [V, D]; `positions` [num_positions + offset, D] where they are learned; `head` [V, D], or None where the embedding is
    the head.

    Attributes:
        spec: What the model is.
        dtype: Of the activations, but for the residual stream.
        backend: Implementation of the head's product, a name of `pallas_kernels.dispatch`.
        shards: With several, each device has its own rows of `embed` and `head`, padded to equal numbers, and its own part of the layers;
            the methods are then called inside `shard_map` over `shards.AXIS`, and but for `logits` give the same on every device.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: DTypeLike,
        embed: Float[Array, "V D"],
        layers: list[DecoderLayer],
        norm: Norm,
        head: Float[Array, "V D"] | None,
        *,
        positions: Float[Array, "rows D"] | None = None,
        head_bias: Float[Array, "V"] | None = None,
        backend: str | None = None,
        shards: Shards = UNCUT,
    ) -> None:
        self.spec, self.dtype, self.backend, self.shards = spec, jnp.dtype(dtype), backend, shards
        self.embed, self.positions = nnx.Param(embed), nnx.Param(positions)
        self.layers, self.norm = nnx.List(layers), norm
        self.head, self.head_bias = nnx.Param(head), nnx.Param(head_bias)

    def forward(
        self, token_ids: Int32[Array, "T"], ctx: AttentionInputs, pages: KVPages, states: RecurrentStates = (), *, is_decode: bool
    ) -> tuple[jax.Array, KVPages, RecurrentStates]:
        """Runs every layer over the step's tokens.

        Args:
            token_ids: The tokens; padding may hold any id.
            ctx: Where they live.
            pages: One page array for each layer index; `ctx` says where this step writes.
            states: Of the recurrent layers.
            is_decode: T == B and token b is the only one of row b.

        Returns:
            The hidden states after the final norm `[T, D]`, what `logits` takes; the pages with the step's keys and values; the recurrent
            layers' states after the step.
        """
        inputs, recurrent = self._layer_inputs(ctx), recurrent_inputs(ctx)
        arrays, before, after = list(pages), iter(states), []
        is_dealt = deals_out_tokens(token_ids.shape[0], self.spec.hidden_size * self.dtype.itemsize, self.shards)
        hidden = self._embedded(token_ids, ctx.position, is_dealt)
        for layer, spec, place in zip(self.layers, self.spec.layers, self.spec.kv_places, strict=True):
            graphdef, weights = nnx.split(layer)
            if place is None:
                hidden, state = _run_layer(graphdef, is_decode, weights, hidden, recurrent, next(before))
                after.append(state)
            else:
                group, j = place
                hidden, arrays[j] = _run_layer(graphdef, is_decode, weights, hidden, inputs[group, spec.attention.rope], arrays[j])
        return gathered(self.norm(hidden, self.dtype), is_dealt), tuple(arrays), tuple(after)

    def logits(self, hidden: Float[Array, "R D"]) -> jax.Array:
        """Next-token logits `[R, V]` float32 of hidden states that `forward` returned. With shards only those of this device's rows of the
        head, `[R, num_vocab_rows]`: what is read off them may be less than would be gathered (`runner.logits`)."""
        head, spec = self.head.get_value(), self.spec.head
        weight = self.embed[...] if head is None else head
        logits = linear(hidden, weight, self.head_bias.get_value(), out_dtype=jnp.float32, backend=self.backend)
        if spec.multiplier != 1.0:
            logits = logits * spec.multiplier
        return logits if spec.soft_cap is None else spec.soft_cap * jnp.tanh(logits / spec.soft_cap)

    def _embedded(self, token_ids: Int32[Array, "T"], position: Int32[Array, "T"], is_dealt: bool) -> jax.Array:
        """The residual stream before the first layer, of all tokens or of this device's."""
        spec, positions = self.spec.embedding, self.positions.get_value()
        hidden = self._looked_up(token_ids, is_dealt).astype(jnp.float32)
        if spec.multiplier != 1.0:
            hidden = hidden * jnp.asarray(spec.multiplier, self.dtype).astype(jnp.float32)
        if positions is not None:
            if is_dealt:
                position = position.reshape(self.shards.count, -1)[lax.axis_index(AXIS)]
            hidden = hidden + positions.at[position + spec.position_offset].get(mode="clip").astype(jnp.float32)
        return hidden

    def _looked_up(self, token_ids: Int32[Array, "T"], is_dealt: bool) -> jax.Array:
        """The rows of the embedding, of all tokens or of this device's."""
        embed = self.embed[...]
        if self.shards.count == 1:
            return embed.at[token_ids].get(mode="clip")
        # Each token's row is on one device, where it is nobody else's zero.
        row = jnp.clip(token_ids, 0, self.spec.vocab_size - 1) - lax.axis_index(AXIS) * embed.shape[0]
        is_here = (row >= 0) & (row < embed.shape[0])
        return summed(jnp.where(is_here[:, None], embed.at[row].get(mode="clip"), 0), self.shards, is_dealt)

    def _layer_inputs(self, ctx: AttentionInputs) -> dict[tuple[int, RopeSpec | None], LayerInputs]:
        """What the layers of each group and each rotary embedding read."""
        # Without the barrier XLA fuses the tables into every layer's rotation: cosines once for each head dimension of each layer.
        tables = {rope: lax.optimization_barrier(rotary_tables(rope, ctx.position, ctx.rope_length)) for rope in self.spec.ropes}
        # In the order of the layers: the program, and so its place in the compile cache, must not hang on the order of a set.
        places = zip(self.spec.layers, self.spec.kv_places, strict=True)
        kinds = dict.fromkeys((place[0], layer.attention.rope) for layer, place in places if place is not None)
        return {
            (x, rope): LayerInputs(
                row_start=ctx.row_start,
                kv_length=ctx.kv_length,
                page_tables=ctx.page_tables[:, x],
                token_row=ctx.token_row,
                position=ctx.position,
                write_page=ctx.write_page[x],
                write_offset=ctx.write_offset,
                cos=None if rope is None else tables[rope][0],
                sin=None if rope is None else tables[rope][1],
            )
            for x, rope in kinds
        }


def summed[T](partial_sums: T, shards: Shards, is_dealt: bool) -> T:
    """What attention or MLP gives, or both, from what the devices give `[T, D]`: of all tokens, or each device its T / tp of them."""
    if shards.count == 1:
        return partial_sums
    return lax.psum_scatter(partial_sums, AXIS, tiled=True) if is_dealt else lax.psum(partial_sums, AXIS)


def gathered(x: Float[Array, "tokens D"], is_dealt: bool) -> jax.Array:
    """All tokens of what each device may have a share of."""
    return lax.all_gather(x, AXIS, tiled=True) if is_dealt else x


@partial(jax.jit, static_argnums=(0, 1))
def _run_layer(
    graphdef: Any, is_decode: bool, weights: Any, x: jax.Array, inputs: LayerInputs | RecurrentInputs, memory: Memory
) -> tuple[jax.Array, Any]:
    """One layer as a jit of its own: layers of equal kind have equal graphdefs, so all but the first reuse its trace."""
    layer: DecoderLayer = nnx.merge(graphdef, weights)
    return layer(x, inputs, memory, is_decode=is_decode)
