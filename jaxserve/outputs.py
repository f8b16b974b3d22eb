"""What `LLM.generate` and `LLM.embed` return, with vLLM's names, and how token events add up to it.

Knows no engine and no prompt formats (`llm`); text comes from `text.sequence_text`, as everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from jaxserve.core.events import Logprobs, TokenEvent
from jaxserve.core.pooling_params import PoolingParams
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.errors import RequestFailed
from jaxserve.text.sequence_text import SequenceText, TextDelta
from jaxserve.text.tokenizer import Tokenizer


class Logprob(NamedTuple):
    """One token's natural-log probability, its rank in the vocabulary (1 is the most likely), and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of a request's n answers.

    Attributes:
        index: Which of the n.
        text: The generated text.
        token_ids: The generated tokens, with the one that ended the sequence.
        cumulative_logprob: Sum over the generated tokens, when logprobs were asked.
        logprobs: For each generated token, a dict by token id of the most likely ones and itself, when asked.
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: The stop string or stop token id that matched; None for the model's own EOS.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """When things happened to a request, by `time.monotonic()` in seconds.

    Attributes:
        arrival_time_s: It was handed to the engine.
        first_token_time_s: Its first token was there; None when it ended without any.
        finished_time_s: Its last sequence ended.
    """

    arrival_time_s: float
    first_token_time_s: float | None = None
    finished_time_s: float | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt.

    Attributes:
        request_id: The engine's name for the request.
        prompt: The prompt's text; None when it was given as token ids.
        prompt_token_ids: Its tokens, with special tokens that were added.
        prompt_logprobs: For each prompt token, as `CompletionOutput.logprobs`, when asked; None for the first token.
        outputs: The n answers, by index.
        finished: All answers are complete.
        metrics: When things happened.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        error: What went wrong, where an answer's finish_reason is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: list[float]


@dataclass(slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """The answer to one prompt of `embed`.

    Attributes:
        request_id, prompt, prompt_token_ids, metrics, num_cached_tokens: As in `RequestOutput`.
        outputs: The vector.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    metrics: RequestMetrics
    num_cached_tokens: int = 0


class OutputBuilder:
    """Adds up one request's events to its `RequestOutput`, available as `output` at any time.

    Args:
        request_id: As in the events.
        prompt: The prompt's text, when it was given as text.
        prompt_token_ids: The prompt as the engine sees it.
        params: As the engine sees them.
        tokenizer: The model's.
    """

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        self._params = params
        self._tokenizer = tokenizer
        self._pooled: list[float] | None = None
        self._texts = [SequenceText(tokenizer, params, prompt_token_ids) for _ in range(params.n)]
        has_logprobs = params.logprobs is not None
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            outputs=[
                CompletionOutput(index=i, logprobs=[] if has_logprobs else None, cumulative_logprob=0.0 if has_logprobs else None)
                for i in range(params.n)
            ],
            metrics=RequestMetrics(arrival_time_s=time.monotonic()),
        )

    def push(self, event: TokenEvent) -> TextDelta:
        """Adds an event; the caller aborts the sequence in the engine when the delta says that a stop string hit."""
        output, answer = self.output, self.output.outputs[event.index]
        delta = self._texts[event.index].push(event)
        answer.text += delta.text
        answer.token_ids += delta.token_ids
        if answer.logprobs is not None and delta.logprobs:
            answer.logprobs += [self._position(entry, self._params.logprobs) for entry in delta.logprobs]
            answer.cumulative_logprob = (answer.cumulative_logprob or 0.0) + sum(entry.logprob for entry in delta.logprobs)
        if event.prompt_logprobs is not None and output.prompt_logprobs is None:
            k = self._params.prompt_logprobs
            output.prompt_logprobs = [None if entry is None else self._position(entry, k) for entry in event.prompt_logprobs]
        if output.metrics.first_token_time_s is None and delta.token_ids:
            output.metrics.first_token_time_s = time.monotonic()
            output.num_cached_tokens = event.num_cached_tokens
        if event.embedding is not None:
            self._pooled, output.num_cached_tokens = event.embedding, event.num_cached_tokens
        if delta.finish_reason is not None:
            answer.finish_reason, answer.stop_reason = delta.finish_reason.value, delta.stop_reason
            output.error = output.error or event.error
            output.finished = all(text.is_finished for text in self._texts)
            output.metrics.finished_time_s = time.monotonic() if output.finished else None
        return delta

    def embedding_output(self, params: PoolingParams) -> EmbeddingRequestOutput:
        """The answer of an embedding that has ended; raises RequestFailed for one that ended without a vector."""
        output = self.output
        if self._pooled is None:
            raise RequestFailed(output.error or f"the embedding ended with {output.outputs[0].finish_reason}")
        return EmbeddingRequestOutput(
            request_id=output.request_id,
            prompt=output.prompt,
            prompt_token_ids=output.prompt_token_ids,
            outputs=EmbeddingOutput(embedding=params.finish(self._pooled)),
            metrics=output.metrics,
            num_cached_tokens=output.num_cached_tokens,
        )

    def _position(self, entry: Logprobs, k: int | None) -> dict[int, Logprob]:
        """The k most likely tokens, best first, and the token itself; -1 is all (which come in vocabulary order)."""
        top: Iterable[tuple[int, float]] = zip(entry.top_ids, entry.top_logprobs, strict=True)
        top = sorted(top, key=lambda item: -item[1]) if k == -1 else islice(top, k)
        text = self._tokenizer.token_text
        position = {token_id: Logprob(logprob, rank, text(token_id)) for rank, (token_id, logprob) in enumerate(top, start=1)}
        return position | {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
