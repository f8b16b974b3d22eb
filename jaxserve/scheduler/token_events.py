"""What is told about a sequence: a new token, an embedding, its end."""

from __future__ import annotations

from time import monotonic

from jaxserve.core.events import Logprobs, TokenEvent
from jaxserve.core.sequence import Sequence
from jaxserve.scheduler.pooling import embedding


def end_event(sequence: Sequence, *, error: str | None = None) -> TokenEvent:
    """The end of a sequence without a new token."""
    return TokenEvent(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_ids=[],
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        finish_reason=sequence.finish_reason,
        error=error,
    )


def embedding_event(sequence: Sequence) -> TokenEvent:
    """The end of a sequence whose prompt is embedded."""
    assert sequence.started_s is not None
    event = end_event(sequence)
    event.embedding = embedding(sequence)
    event.queue_s = sequence.started_s - sequence.request.arrival_time_s
    event.prefill_s = monotonic() - sequence.started_s
    return event


def token_event(seq: Sequence, token_id: int, logprobs: Logprobs | None) -> TokenEvent:
    """A new token, neither the first nor the last. Made for nearly every row of every step."""
    event = TokenEvent(seq.request.request_id, seq.index, [token_id], seq.num_prompt_tokens, seq.num_cached_tokens or 0)
    if logprobs is not None:
        event.logprobs = [logprobs]
    return event


def first_or_last_event(seq: Sequence, token_id: int, logprobs: Logprobs | None) -> TokenEvent:
    """A new token of any kind. The prompt's log-probabilities and the sequence's times go with the first, the reason with the last."""
    event = token_event(seq, token_id, logprobs)
    if seq.num_output_tokens == 1:
        assert seq.started_s is not None
        event.prompt_logprobs = seq.prompt_logprobs
        event.queue_s = seq.started_s - seq.request.arrival_time_s
        event.prefill_s = monotonic() - seq.started_s
    event.finish_reason, event.stop_reason = seq.finish_reason, seq.stop_reason
    return event
