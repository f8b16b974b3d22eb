"""What leaves the engine after a step: tokens, finishes and figures. Plain data; the front end turns it into text."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.core.sequence import FinishReason

if TYPE_CHECKING:
    import numpy as np


class Logprobs(NamedTuple):
    """Raw log-probabilities (before penalties and temperature) at one position.

    Attributes:
        token_id: The sampled (or prompt) token.
        logprob: Its natural-log probability.
        rank: Its rank in the vocabulary, 1 is the most likely.
        top_ids, top_logprobs: The most likely tokens, best first; may or may not hold `token_id`.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: SequenceABC[int]
    top_logprobs: SequenceABC[float]


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What the runner hands back for a Plan, on the host.

    Attributes:
        token_ids: One for each row in plan order; None where the row sampled nothing, -1 where its logits were not finite.
        logprobs: For each row, None unless asked.
        prompt_logprobs: For each row, None unless asked; one entry for each target >= 0 of the chunk, in order.
        pooled: Float32 [rows, hidden size], the sum over each row's `num_pooled_tokens` last hidden states; None unless asked.
    """

    token_ids: list[int | None]
    logprobs: list[Logprobs | None]
    prompt_logprobs: list[list[Logprobs] | None]
    pooled: np.ndarray | None = None


@dataclass(slots=True)
class TokenEvent:
    """New tokens and/or the end of one sequence.

    Attributes:
        request_id, index: Which sequence of which request.
        token_ids: Tokens new since the last event (empty for an abort or error).
        logprobs: One for each new token, when asked.
        prompt_logprobs: With the first event only, when asked: None for the first prompt token, then one for each.
        num_prompt_tokens, num_cached_tokens: For usage.
        finish_reason, stop_reason: Set on the last event; stop_reason is the matched stop token id (None for EOS).
        embedding: The pooled hidden state of an embedding's prompt, with its end.
        error: What went wrong, when finish_reason is ERROR.
        queue_s, prefill_s: Only with the first token of a sequence, or its embedding: seconds from its arrival at the engine to its
            first step, and from there to that.
    """

    request_id: str
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    # Given by name. Not keyword-only: Python would look up each default by its name, for every token.
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    embedding: list[float] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    queue_s: float | None = None
    prefill_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Figures of one step and of the engine right after it.

    Attributes:
        num_kv_tokens: Positions computed for the running sequences; what `num_used_pages` hold beyond it is waste. Pages that
            sequences share count for each.
        num_preemptions, num_cache_queries, num_cache_hits: Totals since start; queries and hits in tokens.
    """

    step_id: int
    num_decode_rows: int
    num_prefill_rows: int
    num_tokens: int
    num_running: int
    num_waiting: int
    num_used_pages: int
    num_pages: int
    num_preemptions: int
    num_cache_queries: int
    num_cache_hits: int
    num_kv_tokens: int = 0
