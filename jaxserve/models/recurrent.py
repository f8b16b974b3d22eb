"""A gated delta net: project, convolve over the last few tokens, run the delta rule, normalize and gate, project back.

Transformers' Qwen3NextGatedDeltaNet (5.24), but float32 from the convolution to the gate. What it keeps of a sequence lies in the
sequence's slot (`arrays.RecurrentState`), not in pages; a row that starts at position 0 begins with nothing. The rule itself is in
`delta_rule.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxserve.arrays import AttentionInputs, RecurrentState
from jaxserve.models.delta_rule import DeltaInputs, decode_rows, initial_states, ragged_rows
from jaxserve.models.linear import linear
from jaxserve.models.mlp import ACTIVATIONS
from jaxserve.models.norm import Norm
from jaxserve.models.spec import RecurrentSpec

_L2_EPS = 1e-6
"""As in transformers' l2norm and the fla library."""


class RecurrentInputs(NamedTuple):
    """What all recurrent layers share in a step."""

    row_start: Int32[Array, "B+1"]
    row_slot: Int32[Array, "B"]
    token_row: Int32[Array, "T"]
    is_first: Bool[Array, "B"]  # the row's sequence begins in this step


def recurrent_inputs(ctx: AttentionInputs) -> RecurrentInputs:
    """From what the step's tokens have in common with attention."""
    start = ctx.kv_length - (ctx.row_start[1:] - ctx.row_start[:-1])
    # Such models have no prefix hits, so a sequence's first row, also after preemption, is the one at position 0.
    return RecurrentInputs(ctx.row_start, ctx.row_slot, ctx.token_row, start <= 0)


class GatedDeltaNet(nnx.Module):
    """One recurrent layer. Letters: K key heads, N value heads, P `conv_dim`, W `kernel_size`.

    Weights: `inner` [K, parts, D], of each key head query, key, values, gates, rates and decays; `conv` [K, P, W], the newest token last;
    `decay_log` and `decay_bias` [N]; `out` [D, N * value].
    """

    def __init__(
        self,
        spec: RecurrentSpec,
        *,
        inner: Float[Array, "K parts D"],
        conv: Float[Array, "K P W"],
        decay_log: Float[Array, "N"],
        decay_bias: Float[Array, "N"],
        norm: Norm,
        out: Float[Array, "D N*value"],
        backend: str | None,
    ) -> None:
        self.spec, self.backend, self.norm = spec, backend, norm
        self.inner, self.conv, self.out = nnx.Param(inner), nnx.Param(conv), nnx.Param(out)
        self.decay_log, self.decay_bias = nnx.Param(decay_log), nnx.Param(decay_bias)

    def __call__(
        self, x: Float[Array, "T D"], inputs: RecurrentInputs, state: RecurrentState, *, is_decode: bool
    ) -> tuple[jax.Array, RecurrentState]:
        """Returns the output `[T, D]` in the dtype of `x`, and the state with the step's tokens taken in."""
        spec, num_tokens = self.spec, x.shape[0]
        projected = linear(x, self.inner[...], backend=self.backend).astype(jnp.float32)  # [T, K, parts]
        ends = (spec.conv_dim, spec.conv_dim + spec.values_dim, spec.conv_dim + spec.values_dim + spec.num_value_groups)
        mixed, gate, rate, decay = jnp.split(projected, ends, axis=-1)
        convolved, conv = (self._convolved_decode if is_decode else self._convolved)(mixed, inputs, state.conv)
        heads = self._delta_inputs(convolved, rate, decay)
        if is_decode:
            before = initial_states(state.matrix[inputs.row_slot], inputs.is_first)
            read, after = decode_rows(heads, before)
            matrix = state.matrix.at[inputs.row_slot].set(after)
        else:
            read, matrix = ragged_rows(heads, state.matrix, inputs.row_start, inputs.row_slot, inputs.is_first)
        gated = self.norm(read) * nnx.silu(gate.reshape(read.shape))
        out = linear(gated.reshape(num_tokens, -1).astype(x.dtype), self.out[...], backend=self.backend)
        return out, RecurrentState(conv, matrix)

    def _delta_inputs(self, convolved: Float[Array, "T K P"], rate: Float[Array, "T K G"], decay: Float[Array, "T K G"]) -> DeltaInputs:
        spec, num_tokens = self.spec, convolved.shape[0]
        query, key, value = jnp.split(convolved, (spec.key_dim, 2 * spec.key_dim), axis=-1)
        speed = jnp.exp(self.decay_log[...])[None] * nnx.softplus(decay.reshape(num_tokens, -1) + self.decay_bias[...][None])
        return DeltaInputs(
            query=_unit(query) * spec.key_dim**-0.5,
            key=_unit(key),
            value=value.reshape(num_tokens, spec.num_value_heads, spec.value_dim),
            decay=-speed,
            rate=nnx.sigmoid(rate.reshape(num_tokens, -1)),
        )

    def _convolved_decode(
        self, mixed: Float[Array, "B K P"], inputs: RecurrentInputs, state: Float[Array, "S W-1 K P"]
    ) -> tuple[jax.Array, jax.Array]:
        """One token for each row, after those that its slot holds."""
        before = jnp.where(inputs.is_first[:, None, None, None], 0.0, state[inputs.row_slot])
        window = jnp.concatenate([before, mixed[:, None]], axis=1)
        return self._activated(jnp.sum(window * self._kernel()[None], axis=1)), state.at[inputs.row_slot].set(window[:, 1:])

    def _convolved(
        self, mixed: Float[Array, "T K P"], inputs: RecurrentInputs, state: Float[Array, "S W-1 K P"]
    ) -> tuple[jax.Array, jax.Array]:
        """Rows of any length: the first tokens of each also see those that its slot holds."""
        num_tokens, num_before = mixed.shape[0], self.spec.kernel_size - 1
        before = jnp.where(inputs.is_first[:, None, None, None], 0.0, state[inputs.row_slot])  # [B, W-1, K, P]
        kernel = self._kernel()[:, None]
        row = jnp.minimum(inputs.token_row, inputs.row_slot.shape[0] - 1)
        nth = jnp.arange(num_tokens) - inputs.row_start[row]  # place in the row
        total = mixed * kernel[num_before]
        for back in range(1, num_before + 1):
            inside = jnp.pad(mixed, ((back, 0), (0, 0), (0, 0)))[:num_tokens]
            outside = before[row, jnp.clip(num_before - back + nth, 0, num_before - 1)]
            total = total + jnp.where((nth >= back)[:, None, None], inside, outside) * kernel[num_before - back]
        # A row's last W - 1 tokens, some of which may be older than the step.
        row_tokens = inputs.row_start[1:] - inputs.row_start[:-1]
        place = row_tokens[:, None] - num_before + jnp.arange(num_before)[None]  # [B, W-1]
        newer = mixed.at[inputs.row_start[:-1, None] + place].get(mode="clip")
        older = jnp.take_along_axis(before, jnp.clip(num_before + place, 0, num_before - 1)[:, :, None, None], axis=1)
        kept = jnp.where((place >= 0)[:, :, None, None], newer, older)
        return self._activated(total), state.at[inputs.row_slot].set(kept)

    def _kernel(self) -> Float[Array, "W K P"]:
        return jnp.moveaxis(self.conv[...].astype(jnp.float32), -1, 0)

    def _activated(self, x: jax.Array) -> jax.Array:
        return ACTIVATIONS[self.spec.activation](x)


def _unit(x: Float[Array, "T K key"]) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _L2_EPS)
