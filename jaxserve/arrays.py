"""Every pytree that crosses the jit border, with its shapes. Read this before `runner` and `models`.

Letters: B rows, T packed tokens, R rows with logits, P pages in a table, X KV groups, K kv heads, H head dim, V vocabulary,
S slots (max_num_seqs + 1; the last is the null slot), Z penalty slots (max_penalty_slots + 1; the last is the null one).
Knows shapes and dtypes only; who fills what is said in `runner.prepare` and `runner.step`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32, UInt8


class QuantizedPages(NamedTuple):
    """A page array in 8 bits, int8 or the bits of float8_e4m3fn, and its scales: see `pallas_kernels.quantized_kv`."""

    values: Int8[Array, "num_pages parts K page_size H"] | UInt8[Array, "num_pages parts K page_size H"]
    scales: Float32[Array, "num_pages parts K page_size"]


type PageArray = jax.Array | QuantizedPages

KVPages = tuple[PageArray, ...]
"""One page array for each layer index j: `[num_pages, 2, K, page_size, H]` (0 keys, 1 values). Page 0 is the null page: never
allocated; padding reads and writes it. Donated to every step."""


class RecurrentState(NamedTuple):
    """What one recurrent layer knows of the sequences in its slots. Nothing clears it: a row that starts at position 0 reads zeros instead.

    The null slot's is written by padding rows and never read for a real one.
    """

    conv: Float[Array, "S W-1 key_heads conv_dim"]  # what the convolution saw of the last W - 1 tokens, the newest last
    matrix: Float[Array, "S value_heads key_dim value_dim"]


RecurrentStates = tuple[RecurrentState, ...]
"""One for each recurrent layer, in order; empty for most models. Float32, donated to every step."""


class SlotState(NamedTuple):
    """Per-slot state on the device, donated to every step. A sequence keeps its slot from admission to finish or preemption.

    The row of the null slot is written by padding rows and never read for a real one.
    """

    last_token: Int32[Array, "S"]
    length: Int32[Array, "S"]  # KV positions valid, so the position of the next token computed
    page_tables: Int32[Array, "S X P"]  # entries past the length are stale or 0
    admission: Int32[Array, "S words"]  # what the sequence came with, as `runner.layout` has it; one array is one write and one read


class PenaltyState(NamedTuple):
    """Per-vocabulary sampling state for the sequences that need it, donated to every step; rows are filled by `admit`."""

    output_counts: Int32[Array, "Z V"]
    is_in_prompt: Bool[Array, "Z V"]
    logit_bias: Float[Array, "Z V"]
    is_stop: Bool[Array, "Z V"]


class AttentionInputs(NamedTuple):
    """Where the step's tokens live, the same for every layer. Padding tokens belong to the row of the null slot.

    Tokens of a row are adjacent and ascending: row b owns tokens [row_start[b], row_start[b + 1]).
    """

    row_start: Int32[Array, "B+1"]  # cumulative token counts; padding rows are empty
    row_slot: Int32[Array, "B"]  # the null slot for padding rows
    kv_length: Int32[Array, "B"]  # visible positions after this step's writes; 0 for padding rows
    page_tables: Int32[Array, "B X P"]
    token_row: Int32[Array, "T"]  # B for padding tokens
    position: Int32[Array, "T"]
    rope_length: Int32[Array, "T"]  # the length that picks a length-dependent RoPE table, per token
    write_page: Int32[Array, "X T"]  # page that takes the token's K and V, 0 for padding
    write_offset: Int32[Array, "T"]  # place in that page


class SampledTokens(NamedTuple):
    """What a step returns for its logits rows; copied to the host asynchronously, logprobs only when a row asked."""

    token_id: Int32[Array, "R"]  # -1 where the logits were not finite
    logprob: Float[Array, "R"]
    rank: Int32[Array, "R"]  # 1 is the most likely
    top_ids: Int32[Array, "R k"]  # k is 20, or V where the whole vocabulary is enabled (then in vocabulary order)
    top_logprobs: Float[Array, "R k"]
