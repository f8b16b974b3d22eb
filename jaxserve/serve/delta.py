"""What `Service.generate` yields: the part of a token event that answers are made of. Knows no protocol.

Next: `openai_answers` and `grpc_messages`, which write it down.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.core.events import Logprobs, TokenEvent
from jaxserve.core.sequence import FinishReason
from jaxserve.text.sequence_text import TextDelta


@dataclass(slots=True, kw_only=True)
class Delta:
    """What is new of one sequence of a call.

    Attributes:
        prompt_index: Which prompt of the call.
        index: Which of that prompt's n sequences.
        text: See `TextDelta`; likewise token_ids, logprobs, finish_reason, stop_reason.
        prompt_logprobs: With the first delta of a sequence, when asked; None for the first prompt token.
        embedding: The pooled vector, with the only delta of a prompt that is embedded.
        error: What went wrong, when finish_reason is ERROR.
    """

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: list[Logprobs | None] | None
    error: str | None
    embedding: list[float] | None = None


def make_delta(event: TokenEvent, text: TextDelta, prompt_index: int) -> Delta:
    """What an event and its text say."""
    return Delta(
        prompt_index=prompt_index,
        index=event.index,
        text=text.text,
        token_ids=text.token_ids,
        logprobs=text.logprobs,
        finish_reason=text.finish_reason,
        stop_reason=text.stop_reason,
        num_prompt_tokens=event.num_prompt_tokens,
        num_cached_tokens=event.num_cached_tokens,
        prompt_logprobs=event.prompt_logprobs,
        error=event.error,
        embedding=event.embedding,
    )
