"""Station 6 of a token: the one function that XLA compiles, for each bucket once.

Unpack, apply admissions and page writes, embed, run the layers (write KV, attend over pages), pick the rows that need logits,
sample, update the slots. The same trace serves decode and mixed buckets; only static shapes differ. Host packing is in
`runner.prepare`, choosing tokens in `runner.sampling`, the layers in `models.decoder`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.arrays import AttentionInputs, KVPages, PenaltyState, RecurrentStates, SampledTokens, SlotState
from jaxserve.models.load import merge_model
from jaxserve.models.shards import num_vocab_rows
from jaxserve.runner.layout import ADMISSION_INTS, PAGE_WRITE_WORDS, StepLayout
from jaxserve.runner.logits import Logits
from jaxserve.runner.pooling import sum_rows
from jaxserve.runner.sampling import prompt_logprobs, sample


class StepOutputs(NamedTuple):
    """What a step leaves for the host; `prompt` is [T] shaped and only there in buckets that want it, `pooled` likewise, [B, D]."""

    sampled: SampledTokens
    prompt: SampledTokens | None
    pooled: jax.Array | None


def step(
    graphdef: Any,
    layout: StepLayout,
    num_logprobs: int,
    has_full_logprobs: bool,
    weights: tuple[jax.Array, ...],
    pages: KVPages,
    slots: SlotState,
    penalties: PenaltyState,
    states: RecurrentStates,
    packed: jax.Array,
    *,
    num_token_ids: int | None = None,
) -> tuple[KVPages, SlotState, PenaltyState, RecurrentStates, StepOutputs]:
    """Runs one bucket.

    The first four arguments and the last are static; pages, slots, penalties and states are donated; `packed` is int32.
    """
    bucket = layout.bucket
    inputs = {name: lax.slice(packed, (s.offset,), (s.end,)).reshape(s.shape) for name, s in layout.sections.items()}
    slots = apply_page_writes(_admit_slots(slots, inputs["admissions"]), inputs["page_writes"])
    row_slot, row_tokens = inputs["row_slot"], inputs["row_tokens"]

    model = merge_model(graphdef, weights)
    ctx = _attention_inputs(layout, slots, row_slot, row_tokens)
    last_tokens = slots.last_token[row_slot].at[ctx.token_row].get(mode="fill", fill_value=0)
    token_ids = jnp.where(inputs["tokens"] < 0, last_tokens, inputs["tokens"])
    hidden, pages, states = model.forward(token_ids, ctx, pages, states, is_decode=bucket.is_decode)

    logits_row, is_sampled = inputs["logits_row"], inputs["is_sampled"] > 0
    sample_position = ctx.kv_length.at[logits_row].get(mode="fill", fill_value=0)
    sample_slot = row_slot.at[logits_row].get(mode="fill", fill_value=slots.length.shape[0] - 1)
    last_index = jnp.maximum(ctx.row_start[jnp.minimum(logits_row, bucket.rows - 1) + 1] - 1, 0)
    read = hidden if bucket.is_decode else hidden[last_index]
    if bucket.has_pooling:  # a step of embeddings alone needs no head
        no_logits = jnp.zeros((bucket.logits_rows, num_vocab_rows(model.spec, model.shards)), jnp.float32)
        logits = lax.cond(jnp.any(is_sampled), model.logits, lambda _: no_logits, read)
    else:
        logits = model.logits(read)

    def in_parts(part: jax.Array) -> Logits:
        return Logits(part, model.spec.vocab_size, model.shards.count)

    sampled, penalties = sample(
        in_parts(logits), slots, penalties, sample_slot, sample_position, is_sampled,
        num_logprobs=num_logprobs, full_logprobs=has_full_logprobs, wants_logprobs=inputs["wants_logprobs"][0] > 0,
        num_token_ids=num_token_ids,
    )  # fmt: skip
    slots = _advance(slots, row_slot, row_tokens, ctx.kv_length, jnp.where(is_sampled, sample_slot, slots.length.shape[0] - 1), sampled)
    prompt = None
    if bucket.has_prompt_logprobs:
        prompt = prompt_logprobs(
            lambda rows: in_parts(model.logits(rows)), hidden, inputs["targets"], num_logprobs=num_logprobs, full_logprobs=has_full_logprobs
        )
    pooled = sum_rows(hidden, ctx, inputs["num_pooled_tokens"]) if bucket.has_pooling else None
    return pages, slots, penalties, states, StepOutputs(sampled, prompt, pooled)


def update(slots: SlotState, writes: jax.Array) -> SlotState:
    """Applies page-table writes [n, 4] ahead of a step that has no room for them."""
    return apply_page_writes(slots, writes)


def admit(
    penalties: PenaltyState, penalty_slot: jax.Array, counts: jax.Array, is_in_prompt: jax.Array, bias: jax.Array, is_stop: jax.Array
) -> PenaltyState:
    """Fills one penalty slot; the vocabulary arrays are `runner.prepare.PenaltyRow`."""
    return PenaltyState(
        output_counts=penalties.output_counts.at[penalty_slot].set(counts),
        is_in_prompt=penalties.is_in_prompt.at[penalty_slot].set(is_in_prompt),
        logit_bias=penalties.logit_bias.at[penalty_slot].set(bias),
        is_stop=penalties.is_stop.at[penalty_slot].set(is_stop),
    )


def apply_page_writes(slots: SlotState, writes: jax.Array) -> SlotState:
    """`page_tables[slot, group, index] = page` for each write; padding writes go to the null slot."""
    slot, group, index, page = (writes[:, i] for i in range(PAGE_WRITE_WORDS))
    return slots._replace(page_tables=slots.page_tables.at[slot, group, index].set(page))


def _admit_slots(slots: SlotState, admissions: jax.Array) -> SlotState:
    slot, length = (admissions[:, ADMISSION_INTS.index(name)] for name in ("slot", "length"))
    return slots._replace(length=slots.length.at[slot].set(length), admission=slots.admission.at[slot].set(admissions))


def _attention_inputs(layout: StepLayout, slots: SlotState, row_slot: jax.Array, row_tokens: jax.Array) -> AttentionInputs:
    """Where each token lives, from the rows' token counts and the slots' lengths."""
    bucket, page_size = layout.bucket, layout.page_size
    start = slots.length[row_slot]
    row_start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(row_tokens, dtype=jnp.int32)])
    token = jnp.arange(bucket.tokens, dtype=jnp.int32)
    if bucket.is_decode:
        token_row = jnp.where(row_tokens > 0, token, bucket.rows)
    else:
        token_row = jnp.searchsorted(row_start[1:], token, side="right").astype(jnp.int32)
    is_real = token_row < bucket.rows
    row = jnp.minimum(token_row, bucket.rows - 1)
    position = jnp.where(is_real, start[row] + token - row_start[row], 0)
    page_tables = slots.page_tables[row_slot]
    write_page = page_tables[row, :, position // page_size].T
    return AttentionInputs(
        row_start=row_start,
        row_slot=row_slot,
        kv_length=jnp.where(row_tokens > 0, start + row_tokens, 0),
        page_tables=page_tables,
        token_row=token_row,
        position=position,
        rope_length=slots.admission[row_slot, ADMISSION_INTS.index("rope_length")][row],
        write_page=jnp.where(is_real, write_page, 0),
        write_offset=position % page_size,
    )


def _advance(
    slots: SlotState, row_slot: jax.Array, row_tokens: jax.Array, kv_length: jax.Array, sampled_slot: jax.Array, sampled: SampledTokens
) -> SlotState:
    """Moves lengths on and remembers the sampled tokens; rows that sampled nothing write to the null slot."""
    null_slot = slots.length.shape[0] - 1
    return slots._replace(
        length=slots.length.at[jnp.where(row_tokens > 0, row_slot, null_slot)].set(kv_length),
        last_token=slots.last_token.at[sampled_slot].set(jnp.maximum(sampled.token_id, 0)),
    )
