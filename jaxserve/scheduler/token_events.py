"""What is told about a sequence: a new token, its end, or both."""

from __future__ import annotations

from time import monotonic

from jaxserve.core.events import Logprobs, TokenEvent
from jaxserve.core.sequence import Sequence


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


def token_event(sequence: Sequence, token_id: int, logprobs: Logprobs | None) -> TokenEvent:
    """A new token, and the end if it was the last. The prompt's log-probabilities and the sequence's times go with the first."""
    is_first = len(sequence.token_ids) == sequence.num_prompt_tokens + 1
    queue_s = prefill_s = None
    if is_first:
        assert sequence.started_s is not None
        queue_s = sequence.started_s - sequence.request.arrival_time_s
        prefill_s = monotonic() - sequence.started_s
    return TokenEvent(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_ids=[token_id],
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        logprobs=None if logprobs is None else [logprobs],
        prompt_logprobs=sequence.prompt_logprobs if is_first else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        queue_s=queue_s,
        prefill_s=prefill_s,
    )
