"""What is told about a sequence: a new token, its end, or both."""

from __future__ import annotations

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
    """A new token, and the end if it was the last. The prompt's log-probabilities go with the first."""
    is_first = len(sequence.token_ids) == sequence.num_prompt_tokens + 1
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
    )
