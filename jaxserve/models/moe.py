"""A mixture of experts: a router chooses a few MLPs for each token, and only those are computed.

Every token has a copy for each of its experts. Copies are dealt out to blocks, each of one expert, which are multiplied by its matrices
(`pallas_kernels.grouped_linear`) where they lie; then the copies of a token are added up with its weights. Cost and memory follow the
copies, not the number of experts. Routing is in float32. Formulas: the MoE modules of transformers (5.24) named in `spec.MoESpec`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxserve.models.linear import linear
from jaxserve.models.mlp import ACTIVATIONS, MLP
from jaxserve.models.shards import AXIS, UNCUT, Shards, num_local_experts
from jaxserve.models.spec import MoESpec
from pallas_kernels import grouped_linear
from pallas_kernels.grouped_linear.api import NO_COPY

MIN_BLOCK, MAX_BLOCK = 4, 64
"""Rows of a block: about as many as an expert gets, so that few are padding and few blocks share an expert."""
SPARE_ON_GPU = 2
"""There padding rows cost next to nothing, and each further block of an expert reads its weights again."""


class Choice(NamedTuple):
    """The experts of each token and the weights of what they give, `[T, top_k]`."""

    expert: Int32[Array, "T top_k"]
    weight: Float[Array, "T top_k"]


def route(
    spec: MoESpec, x: Float[Array, "T D"], router: Float[Array, "E D"], bias: Float[Array, "E"] | None, score_bias: Float[Array, "E"] | None
) -> Choice:
    """Which experts see which tokens."""
    logits = linear(x.astype(jnp.float32), router, bias, backend="xla")
    scores = nnx.sigmoid(logits) if spec.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    ranked = scores if score_bias is None else scores + score_bias[None]
    if spec.num_groups > 1:
        ranked = jnp.where(_allowed(spec, ranked), ranked, -jnp.inf)
    _, expert = lax.top_k(ranked, spec.top_k)
    weight = jnp.take_along_axis(scores, expert, axis=-1)
    if spec.is_normalized:
        weight = weight / (weight.sum(axis=-1, keepdims=True) + 1e-20)
    return Choice(expert, weight * spec.scale)


def _allowed(spec: MoESpec, scores: Float[Array, "T E"]) -> Bool[Array, "T E"]:
    """Experts in the best groups: DeepSeek-V2 ranks a group by its best expert, V3 by the sum of its best two."""
    groups = scores.reshape(scores.shape[0], spec.num_groups, -1)
    best, _ = lax.top_k(groups, spec.num_group_scores)
    _, chosen = lax.top_k(best.sum(axis=-1), spec.num_top_groups)
    is_chosen = jax.nn.one_hot(chosen, spec.num_groups, dtype=jnp.bool_).any(axis=1)
    return jnp.repeat(is_chosen, groups.shape[-1], axis=-1)


class Blocks(NamedTuple):
    """Which copies are multiplied by which expert. Copy `t * top_k + j` is token t for its expert j.

    Attributes:
        place: The copy that each row of each block is for, or NO_COPY.
        expert: The expert of each block.
        num_used: Blocks that have copies.
        is_placed: Which copies have a row.
    """

    place: Int32[Array, "M"]
    expert: Int32[Array, "num_blocks"]
    num_used: Int32[Array, ""]
    is_placed: Bool[Array, "T top_k"]


def block_size(num_tokens: int, top_k: int, num_experts: int, spare: int = 1) -> int:
    """Rows of a block for a step of `num_tokens`: an expert's fair share, `spare` times, as far as MAX_BLOCK."""
    share = spare * num_tokens * top_k / num_experts
    size = MIN_BLOCK
    while size < min(share, MAX_BLOCK):
        size *= 2
    return size


def sort_into_blocks(
    expert: Int32[Array, "T top_k"], num_tokens: Int32[Array, ""], num_experts: int, *, num_all_experts: int | None = None, spare: int = 1
) -> Blocks:
    """Copies by expert, each expert's padded to whole blocks. The experts of a token differ. `spare` is as for `block_size`.

    Tokens from `num_tokens` on are padding and get no rows, nor do copies for experts outside `[0, num_experts)`, which other devices have;
    `num_all_experts` counts those too.
    """
    num_all, top_k = expert.shape
    num_copies, size = num_all * top_k, block_size(num_all, top_k, num_all_experts or num_experts, spare)
    # Every expert with rows wastes less than a block; there are no more blocks than copies.
    num_blocks = min(num_copies, num_copies // size + num_experts)
    is_placed = jnp.broadcast_to((jnp.arange(num_all) < num_tokens)[:, None], expert.shape)
    if num_all_experts is not None:
        is_placed = is_placed & (expert >= 0) & (expert < num_experts)
    # Counted rather than sorted: a token wants an expert once, so its copy's place among that expert's is how many tokens before want it.
    # On a GPU a sort is many launches, and XLA compiles the one of each layer anew.
    ids = jnp.arange(num_experts)
    is_wanted = ((expert[..., None] == ids[None, None]) & is_placed[..., None]).any(axis=1).astype(jnp.int32)
    num_so_far = jnp.cumsum(is_wanted, axis=0)
    num_expert_blocks = (num_so_far[-1] + size - 1) // size
    last_block = jnp.where(ids[None] <= ids[:, None], num_expert_blocks[None], 0).sum(axis=1)  # one launch; a cumsum would be several
    rows = ((last_block - num_expert_blocks) * size)[None] + num_so_far - is_wanted
    row = jnp.take_along_axis(rows, jnp.clip(expert, 0, num_experts - 1), axis=1)
    row = jnp.where(is_placed, row, num_blocks * size)  # past the last one: dropped
    place = jnp.full(num_blocks * size, NO_COPY, jnp.int32).at[row.reshape(-1)].set(jnp.arange(num_copies, dtype=jnp.int32), mode="drop")
    block_expert = jnp.minimum((last_block[None] <= jnp.arange(num_blocks)[:, None]).sum(axis=1), num_experts - 1)
    return Blocks(place, block_expert.astype(jnp.int32), last_block[-1], is_placed)


class MoE(nnx.Module):
    """Weights: `router` [E, D] float32, `inner` [E, 2 * F, D] (gate, then up), `down` [E, D, F].

    Where the model has them: biases of each, `score_bias` [E], the `shared` expert and its `shared_gate` [1, D].

    With expert parallelism each device has `inner` and `down` of its share of the experts, and gives what those add to the result.
    """

    def __init__(
        self,
        spec: MoESpec,
        router: Float[Array, "E D"],
        inner: Float[Array, "E 2F D"],
        down: Float[Array, "E D F"],
        *,
        router_bias: Float[Array, "E"] | None = None,
        score_bias: Float[Array, "E"] | None = None,
        inner_bias: Float[Array, "E 2F"] | None = None,
        down_bias: Float[Array, "E D"] | None = None,
        shared: MLP | None = None,
        shared_gate: Float[Array, "1 D"] | None = None,
        backend: str | None = None,
        shards: Shards = UNCUT,
    ) -> None:
        self.spec, self.backend, self.shards = spec, backend, shards
        self.router, self.router_bias, self.score_bias = nnx.Param(router), nnx.Param(router_bias), nnx.Param(score_bias)
        self.inner, self.inner_bias = nnx.Param(inner), nnx.Param(inner_bias)
        self.down, self.down_bias = nnx.Param(down), nnx.Param(down_bias)
        self.shared, self.shared_gate = nnx.data(shared), nnx.Param(shared_gate)

    def __call__(self, x: Float[Array, "T D"], num_tokens: Int32[Array, ""]) -> jax.Array:
        """Returns `[T, D]` in the dtype of `x`; tokens from `num_tokens` on are padding."""
        choice = route(self.spec, x, self.router[...], self.router_bias.get_value(), self.score_bias.get_value())
        blocks = self._blocks(choice.expert, num_tokens)
        where = blocks.place, blocks.expert, blocks.num_used
        rows, copies, weight = x, self.spec.top_k, choice.weight
        if self.spec.is_input_weighted:
            rows = (x[:, None] * weight[..., None]).astype(x.dtype).reshape(-1, x.shape[-1])
            copies, weight = 1, jnp.ones_like(weight)
        inner = grouped_linear(rows, self.inner[...], self.inner_bias.get_value(), *where, copies=copies, implementation=self.backend)
        hidden = self._activated(inner).astype(x.dtype)
        out = grouped_linear(hidden, self.down[...], self.down_bias.get_value(), *where, implementation=self.backend)
        if self.shared is not None:
            # The shared expert comes last. XLA's own order follows from the number of pages, and memory is planned before that is known.
            x, out = lax.optimization_barrier((x, out))
        out = out.astype(jnp.float32).reshape(*weight.shape, -1)
        computed = jnp.where(blocks.is_placed[..., None], out, 0.0)
        result = jnp.einsum("tkd,tk->td", computed, weight).astype(x.dtype)
        return result if self.shared is None else result + self._shared(x, num_tokens)

    def _blocks(self, expert: Int32[Array, "T top_k"], num_tokens: Int32[Array, ""]) -> Blocks:
        spec, num_local = self.spec, num_local_experts(self.spec, self.shards)
        spare = SPARE_ON_GPU if self.backend in ("triton", "mosaic_gpu") else 1
        if num_local == spec.num_experts:
            return sort_into_blocks(expert, num_tokens, spec.num_experts, spare=spare)
        first = lax.axis_index(AXIS) * num_local
        return sort_into_blocks(expert - first, num_tokens, num_local, num_all_experts=spec.num_experts, spare=spare)

    def _activated(self, inner: Float[Array, "N 2F"]) -> jax.Array:
        gate, up = jnp.split(inner.astype(jnp.float32), 2, axis=-1)
        if self.spec.clamp is None:
            return ACTIVATIONS[self.spec.activation](gate) * up
        # GptOssExperts: bounded on both sides, a sharper gate, and one added to the linear part.
        alpha, limit = self.spec.clamp
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * nnx.sigmoid(alpha * gate) * (up + 1.0)

    def _shared(self, x: Float[Array, "T D"], num_tokens: Int32[Array, ""]) -> jax.Array:
        """What the expert of all tokens adds."""
        assert self.shared is not None
        out, gate = self.shared(x, num_tokens), self.shared_gate.get_value()
        if gate is None:
            return out
        opened = nnx.sigmoid(linear(x, gate, out_dtype=jnp.float32, backend="xla"))
        return (out * opened).astype(x.dtype)
