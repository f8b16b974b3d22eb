"""The gated delta rule over the rows of a step: every row reads and updates a matrix of its own, token after token.

For each token, with its decay g <= 0 and rate beta: `S = exp(g) * S; S = S + k (beta * (v - k S)); output = q S`. That is transformers'
torch_recurrent_gated_delta_rule (5.24); blocks of tokens follow its torch_chunk_gated_delta_rule (arXiv 2412.06464, section 3.3). All of it
in float32: the state adds up over thousands of tokens. Knows no weights; `recurrent.py` calls it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

BLOCK_SIZE = 64
"""Tokens that a row's state takes in at once, as in transformers. Larger: fewer steps in sequence, more work in each."""

# Matrix units would round float32 to TF32 by default.
_EXACT = lax.Precision.HIGHEST


class DeltaInputs(NamedTuple):
    """What the rule reads of each token, float32. Key head h serves the value heads [h * N / K, (h + 1) * N / K).

    Queries and keys have length 1, queries then times `key_dim ** -0.5`.
    """

    query: Float[Array, "T K key"]
    key: Float[Array, "T K key"]
    value: Float[Array, "T N value"]
    decay: Float[Array, "T N"]
    rate: Float[Array, "T N"]


def decode_rows(inputs: DeltaInputs, state: Float[Array, "B N key value"]) -> tuple[jax.Array, jax.Array]:
    """One token for each row. Returns the outputs `[B, N, value]` and the states after them. Reads and writes each state once."""
    query, key, value, decay, rate = _for_value_heads(inputs)
    state = state * jnp.exp(decay)[..., None, None]
    known = jnp.einsum("bnk,bnkv->bnv", key, state, precision=_EXACT)
    state = state + key[..., None] * ((value - known) * rate[..., None])[:, :, None]
    return jnp.einsum("bnk,bnkv->bnv", query, state, precision=_EXACT), state


def ragged_rows(
    inputs: DeltaInputs,
    states: Float[Array, "S N key value"],
    row_start: Int32[Array, "B+1"],
    row_slot: Int32[Array, "B"],
    is_first: Bool[Array, "B"],
    *,
    block_size: int = BLOCK_SIZE,
) -> tuple[jax.Array, jax.Array]:
    """Rows of any length; those of one token are updated side by side, the others block by block, one after the other.

    Args:
        inputs: Of the step's packed tokens; what padding holds is not read.
        states: By slot, updated in place where the caller donates it. The last is the null slot.
        row_start: Row b owns the tokens [row_start[b], row_start[b + 1]).
        row_slot: Where each row's state is; the null slot for padding rows.
        is_first: Rows whose sequence begins in this step: their state counts as zero, whatever it holds.
        block_size: C below, a power of two.

    Returns:
        The outputs `[T, N, value]`, 0 for padding, and the states. The time is B single updates, and for each block of a longer row
        N * (C * C * (key + value) + C * key * value) multiply-adds, at most T / C + rows of them in sequence; the memory is
        O(T * N * value), and C * C for each head.
    """
    num_tokens, num_rows = inputs.value.shape[0], row_slot.shape[0]
    block_size, null_slot = min(block_size, 1 << (num_tokens - 1).bit_length()), states.shape[0] - 1
    row_tokens = row_start[1:] - row_start[:-1]
    is_single = row_tokens == 1

    start = jnp.minimum(row_start[:-1], num_tokens - 1)
    single = DeltaInputs(*(part[start] for part in inputs))
    single_out, single_states = decode_rows(single, initial_states(states[row_slot], is_first))
    # Room behind the last token: every block is cut out whole.
    out = jnp.zeros((num_tokens + block_size, *inputs.value.shape[1:]), jnp.float32)
    out = out.at[jnp.where(is_single, row_start[:-1], out.shape[0])].set(single_out, mode="drop")
    states = states.at[jnp.where(is_single, row_slot, null_slot)].set(single_states)

    padded = DeltaInputs(*(jnp.pad(part, ((0, block_size), *((0, 0),) * (part.ndim - 1))) for part in inputs))
    num_blocks = jnp.where(row_tokens > 1, -(-row_tokens // block_size), 0)
    last_block = jnp.cumsum(num_blocks)

    def one_block(i: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, states = carried
        row = jnp.minimum(jnp.searchsorted(last_block, i, side="right"), num_rows - 1)
        nth = i - (last_block[row] - num_blocks[row])
        start, slot = row_start[row] + nth * block_size, row_slot[row]
        is_own = jnp.arange(block_size) < row_start[row + 1] - start
        # Zeros change nothing: no decay, and nothing written. What is behind the row may be anything, another row's NaN included.
        cut = (lax.dynamic_slice_in_dim(part, start, block_size) for part in padded)
        block = DeltaInputs(*(jnp.where(is_own.reshape(-1, *(1,) * (part.ndim - 1)), part, 0.0) for part in cut))
        before = initial_states(states[slot], is_first[row] & (nth == 0))
        values, after = _one_block(block, before)
        behind = lax.dynamic_slice_in_dim(out, start, block_size)
        out = lax.dynamic_update_slice_in_dim(out, jnp.where(is_own[:, None, None], values, behind), start, 0)
        return out, states.at[slot].set(after)

    out, states = lax.fori_loop(0, last_block[-1], one_block, (out, states))
    return out[:num_tokens], states


def initial_states(states: Float[Array, "*rows N key value"], is_first: Bool[Array, "*rows"]) -> jax.Array:
    """The states, zero where a sequence begins (never multiplied by 0: a slot's last owner may have left NaN)."""
    return jnp.where(is_first[..., None, None, None], 0.0, states)


def _one_block(block: DeltaInputs, state: Float[Array, "N key value"]) -> tuple[jax.Array, jax.Array]:
    """All tokens of one block at once. Returns the outputs `[C, N, value]` and the state after the last.

    Token i adds k_i u_i to the state, where u_i depends on all u_j before: `(1 + A) u = beta (v - exp(G) k S)`, A strictly lower
    triangular, with G the decay summed from the block's start.
    """
    query, key, value, decay, rate = (jnp.moveaxis(part, 1, 0) for part in _for_value_heads(block))  # [N, C, ...]
    total = jnp.cumsum(decay, axis=1)
    is_seen = jnp.tri(total.shape[1], dtype=bool)
    # Masked before exp: differences above the diagonal are positive and may overflow.
    pairwise = jnp.exp(jnp.where(is_seen, total[:, :, None] - total[:, None], -jnp.inf))
    from_start, to_end = jnp.exp(total)[..., None], jnp.exp(total[:, -1:] - total)[..., None]
    paced = key * rate[..., None]
    system = jnp.einsum("nik,njk->nij", paced, key, precision=_EXACT) * pairwise
    known = jnp.einsum("nik,nkv->niv", paced * from_start, state, precision=_EXACT)
    added = jnp.matmul(_unit_lower_inverse(system), value * rate[..., None] - known, precision=_EXACT)
    scores = jnp.einsum("nik,njk->nij", query, key, precision=_EXACT) * pairwise
    out = jnp.einsum("nik,nkv->niv", query * from_start, state, precision=_EXACT) + jnp.einsum(
        "nij,njv->niv", scores, added, precision=_EXACT
    )
    state = state * jnp.exp(total[:, -1])[:, None, None] + jnp.einsum("nik,niv->nkv", key * to_end, added, precision=_EXACT)
    return jnp.moveaxis(out, 0, 1), state


def _unit_lower_inverse(system: Float[Array, "N C C"]) -> jax.Array:
    """Inverse of what is below the diagonal with ones on it; C is a power of two.

    Inverses of neighbouring diagonal blocks make that of the block of twice the size: as exact as substitution, token after token, and all
    of it small products of matrices. Powers of the matrix would cancel where keys repeat; a triangular solve takes 15 times as long on CPU.
    """
    num_heads, num_tokens = system.shape[:2]
    size, inverse = 1, jnp.ones((num_heads, num_tokens, 1, 1), system.dtype)
    while size < num_tokens:
        pair = jnp.arange(num_tokens // (2 * size))
        tiles = system.reshape(num_heads, len(pair), 2, size, len(pair), 2, size)
        below = jnp.moveaxis(tiles[:, pair, 1, :, pair, 0], 0, 1)  # [N, pairs, size, size]
        first, second = inverse[:, 0::2], inverse[:, 1::2]
        corner = -jnp.matmul(jnp.matmul(second, below, precision=_EXACT), first, precision=_EXACT)
        inverse = jnp.block([[first, jnp.zeros_like(corner)], [corner, second]])
        size *= 2
    return inverse[:, 0]


def _for_value_heads(inputs: DeltaInputs) -> DeltaInputs:
    """Queries and keys once for each value head."""
    groups = inputs.value.shape[1] // inputs.key.shape[1]
    return inputs._replace(query=jnp.repeat(inputs.query, groups, axis=1), key=jnp.repeat(inputs.key, groups, axis=1))
