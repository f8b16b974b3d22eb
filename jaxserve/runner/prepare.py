"""Station 5 of a token: a Plan becomes the packed arrays of a step, padded to a bucket. NumPy on the host only.

Every call returns fresh arrays: `device_put` of a NumPy buffer aliases it on CPU, so a buffer that is still in flight must not be
written again. What the sections mean is said in `runner.layout`; the traced other half is `runner.step`.
"""

from __future__ import annotations

from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from jaxserve.core.plan import Admission, Plan
from jaxserve.runner.layout import ADMISSION_FLOATS, ADMISSION_INTS, PAGE_WRITE_WORDS, UPDATE_PAGE_WRITES, StepLayout


class PreparedStep(NamedTuple):
    """A plan on the host, ready to upload.

    Attributes:
        packed: int32, the array of `StepLayout`.
        updates: int32 arrays [UPDATE_PAGE_WRITES, 4] to apply before the step, when the plan writes more page-table entries
            than the step has room for.
        wants_logprobs: True when any row asked for log-probabilities of its sampled token.
    """

    packed: np.ndarray
    updates: list[np.ndarray]
    wants_logprobs: bool


def prepare(plan: Plan, layout: StepLayout, *, null_slot: int, null_penalty_slot: int) -> PreparedStep:
    """Packs `plan` into `layout`'s bucket; rows keep the plan's order."""
    packed = np.zeros(layout.size, np.int32)
    view = {name: packed[s.offset : s.end].reshape(s.shape) for name, s in layout.sections.items()}
    wants_logprobs = _fill_rows(plan, view, layout, null_slot)
    _fill_admissions(plan.admissions, view["admissions"], null_slot, null_penalty_slot)
    writes = np.fromiter(chain.from_iterable(plan.page_writes), np.int32).reshape(-1, PAGE_WRITE_WORDS)
    room = layout.max_page_writes
    updates = [_page_writes(writes[i : i + UPDATE_PAGE_WRITES], null_slot) for i in range(room, len(writes), UPDATE_PAGE_WRITES)]
    _fill_page_writes(writes[:room], view["page_writes"], null_slot)
    return PreparedStep(packed, updates, wants_logprobs)


def _fill_rows(plan: Plan, view: dict[str, np.ndarray], layout: StepLayout, null_slot: int) -> bool:
    """Fills every section about rows and tokens. True when a row asks for log-probabilities."""
    num_rows, bucket = len(plan.rows), layout.bucket
    view["row_slot"][num_rows:] = null_slot
    if not plan.rows:
        view["logits_row"][:] = bucket.rows
        return False
    # One pass over the rows instead of one for each field: this runs in every step.
    _, slots, _, num_tokens, token_ids, is_sampled, num_logprobs, _, targets, num_pooled = zip(*plan.rows, strict=True)
    view["row_slot"][:num_rows] = slots
    view["row_tokens"][:num_rows] = num_tokens
    if bucket.is_decode:
        # Logits rows are the rows themselves: the head's input needs no gather.
        view["logits_row"][:num_rows] = np.arange(num_rows)
        view["logits_row"][num_rows:] = bucket.rows
        view["is_sampled"][:num_rows] = is_sampled
    else:
        sampled = np.flatnonzero(np.fromiter(is_sampled, np.bool_, num_rows))
        view["logits_row"][: len(sampled)] = sampled
        view["logits_row"][len(sampled) :] = bucket.rows
        view["is_sampled"][: len(sampled)] = 1
    tokens = view["tokens"]
    tokens[: plan.num_tokens] = -1  # the slot's last sampled token, which may exist only on the device
    for ids, end in zip(token_ids, accumulate(num_tokens), strict=True):
        if ids:
            tokens[end - len(ids) : end] = ids
    if bucket.has_prompt_logprobs:
        wanted = [target for row, count in zip(targets, num_tokens, strict=True) for target in row or (-1,) * count]
        view["targets"][: len(wanted)] = wanted
        view["targets"][len(wanted) :] = -1
    if bucket.has_pooling:
        view["num_pooled_tokens"][:num_rows] = num_pooled
    wants_logprobs = num_logprobs.count(None) < num_rows
    view["wants_logprobs"][0] = wants_logprobs
    return wants_logprobs


def _fill_admissions(admissions: tuple[Admission, ...], out: np.ndarray, null_slot: int, null_penalty_slot: int) -> None:
    num_ints, count = len(ADMISSION_INTS), len(admissions)
    out[count:, 0] = null_slot
    if admissions:
        ints = [_admission_ints(admission, null_penalty_slot) for admission in admissions]
        out[:count, :num_ints] = np.array(ints, np.uint64).astype(np.uint32).view(np.int32)
        floats = [[getattr(admission.params, name) for name in ADMISSION_FLOATS] for admission in admissions]
        out[:count, num_ints:] = np.array(floats, np.float32).view(np.int32)


def _admission_ints(admission: Admission, null_penalty_slot: int) -> tuple[int, ...]:
    """The values of `ADMISSION_INTS`."""
    params, seed = admission.params, admission.seed & (2**64 - 1)
    return (
        admission.slot,
        admission.num_computed_tokens,
        params.top_k,
        seed >> 32,
        seed & (2**32 - 1),
        admission.num_prompt_tokens + params.min_tokens,
        admission.rope_length,
        null_penalty_slot if admission.penalty_slot is None else admission.penalty_slot,
    )


def _fill_page_writes(writes: np.ndarray, out: np.ndarray, null_slot: int) -> None:
    out[: len(writes)] = writes
    out[len(writes) :, 0] = null_slot


def _page_writes(writes: np.ndarray, null_slot: int) -> np.ndarray:
    out = np.zeros((UPDATE_PAGE_WRITES, PAGE_WRITE_WORDS), np.int32)
    _fill_page_writes(writes, out, null_slot)
    return out


class PenaltyRow(NamedTuple):
    """What the `admit` program writes into one penalty slot; arrays over the vocabulary [V]."""

    output_counts: np.ndarray
    is_in_prompt: np.ndarray
    logit_bias: np.ndarray
    is_stop: np.ndarray


def prepare_penalty_row(admission: Admission, vocab_size: int) -> PenaltyRow:
    """Counts and masks of a sequence that enters a penalty slot; a resumed one brings its output along."""
    prompt = np.array(admission.token_ids[: admission.num_prompt_tokens], np.int64)
    output = np.array(admission.token_ids[admission.num_prompt_tokens :], np.int64)
    is_in_prompt = np.zeros(vocab_size, bool)
    is_in_prompt[prompt] = True
    logit_bias = np.zeros(vocab_size, np.float32)
    for token_id, value in admission.params.logit_bias.items():
        logit_bias[token_id] = value
    is_stop = np.zeros(vocab_size, bool)
    is_stop[list(admission.stop_token_ids)] = True
    counts = np.bincount(output, minlength=vocab_size).astype(np.int32)
    return PenaltyRow(counts, is_in_prompt, logit_bias, is_stop)
