"""Station 8 of a token: what a step gave is appended, full pages become known, and sequences end.

For most rows a new token is all there is; `Sequence.attend_at` says up to which length, so that the rest of this file is left out.
Next: `scheduler.stopping`, `scheduler.token_events`.
"""

from __future__ import annotations

from jaxserve.config import SchedulerLimits
from jaxserve.core.events import StepResult, TokenEvent
from jaxserve.core.plan import Plan, Row
from jaxserve.core.sequence import FinishReason, Sequence, Status
from jaxserve.scheduler import pooling, prompt_logprobs
from jaxserve.scheduler.roster import Roster
from jaxserve.scheduler.stopping import check_stop
from jaxserve.scheduler.token_events import embedding_event, end_event, first_or_last_event, token_event

NOT_FINITE_TOKEN = -1
NOT_FINITE = "logits were not finite"
POOLED_NOT_FINITE = "hidden states were not finite"


def take_results(roster: Roster, limits: SchedulerLimits, plan: Plan, result: StepResult) -> list[TokenEvent]:
    """Updates the plan's sequences. One event for each with a new token or an end."""
    events: list[TokenEvent] = []
    find_sequence, emit = roster.sequences.get, events.append
    notable = {None, NOT_FINITE_TOKEN, *limits.eos_token_ids}
    for i, (row, token_id, logprobs) in enumerate(zip(plan.rows, result.token_ids, result.logprobs, strict=True)):
        seq = find_sequence(row.seq_id)
        if seq is None:
            continue  # ended while the step ran
        if row.start + row.num_tokens < seq.attend_at and token_id not in notable:
            assert token_id is not None
            seq.num_pending_tokens -= 1
            seq.token_ids.append(token_id)
            emit(token_event(seq, token_id, logprobs))
        else:
            events += _take_row(roster, limits, seq, row, result, i)
    return events


def _take_row(roster: Roster, limits: SchedulerLimits, seq: Sequence, row: Row, result: StepResult, i: int) -> list[TokenEvent]:
    """All that row i of a step may mean for its sequence."""
    token_id, end = result.token_ids[i], row.start + row.num_tokens
    if token_id != NOT_FINITE_TOKEN:
        roster.pages.register_full(seq, row.start, end)
    if row.num_prompt_logprobs is not None:
        prompt_logprobs.collect(seq, row.start, result.prompt_logprobs[i] or [])
    if seq.status is Status.RUNNING:
        if token_id is not None and token_id != NOT_FINITE_TOKEN:
            for child in roster.shares.on_computed(seq, end):
                roster.queue.push(child)
        if end >= seq.drop_at:
            roster.pages.drop_unseen(seq, roster.shares.end_unshared(seq, end))
        seq.attend_at = _next_attention(seq, end, limits.page_size)
    if row.num_pooled_tokens:
        return _pool(roster, seq, row, result, i)
    if token_id is None:
        return []
    seq.num_pending_tokens -= 1
    if token_id == NOT_FINITE_TOKEN:
        return [_end_not_finite(roster, seq, NOT_FINITE)]
    seq.token_ids.append(token_id)
    if check_stop(seq, limits.eos_token_ids):
        assert seq.finish_reason is not None
        roster.end(seq, seq.finish_reason)
    return [first_or_last_event(seq, token_id, result.logprobs[i])]


def _next_attention(seq: Sequence, end: int, page_size: int) -> int:
    """`Sequence.attend_at` once `end` tokens are computed and committed."""
    if end < seq.rope_length or seq.params.stop_token_ids:
        return 0
    return min((end // page_size + 1) * page_size, seq.drop_at, seq.max_length - 1)


def _pool(roster: Roster, seq: Sequence, row: Row, result: StepResult, i: int) -> list[TokenEvent]:
    """Take a row's part of an embedding; the sequence ends with the last of its prompt."""
    assert result.pooled is not None
    if not pooling.collect(seq, row, result.pooled[i]):
        return [_end_not_finite(roster, seq, POOLED_NOT_FINITE)]
    if row.start + row.num_tokens < seq.num_prompt_tokens:
        return []
    roster.end(seq, FinishReason.STOP)
    return [embedding_event(seq)]


def _end_not_finite(roster: Roster, seq: Sequence, error: str) -> TokenEvent:
    roster.pages.forget(seq)  # what is not finite may have come from a page
    roster.end(seq, FinishReason.ERROR)
    return end_event(seq, error=error)
