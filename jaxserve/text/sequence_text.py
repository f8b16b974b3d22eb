"""The one way from a sequence's token events to what a client reads, for streams and whole answers alike (station 9).

Detokenizer, then stop strings, token by token, so that the result does not depend on how tokens were grouped into events.
Knows no protocol and no engine: the caller aborts the sequence there when `is_stop_string_hit`. Next: `jaxserve.serve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.core.events import Logprobs, TokenEvent
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.stop import StopStrings
from jaxserve.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class TextDelta:
    """What is new since the last delta; all deltas concatenated are the whole answer.

    Attributes:
        text: New text; lags behind `token_ids` while a character is incomplete or a stop string may be beginning.
        token_ids: New tokens, with those that ended the sequence.
        logprobs: One for each of `token_ids`, when asked.
        finish_reason, stop_reason: Set on the last delta; stop_reason is the stop string or stop token id that matched.
        is_stop_string_hit: The engine still runs the sequence; abort it.
    """

    text: str = ""
    token_ids: list[int]
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    is_stop_string_hit: bool = False


class SequenceText:
    """Text of one sequence.

    Args:
        tokenizer: The model's.
        params: The request's; stop strings, min_tokens and the fields about text are read.
        prompt_token_ids: What the sequence continues.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._detokenizer = (
            Detokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            if params.detokenize
            else None
        )
        self._stop = StopStrings(params.stop, is_included=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._keeps_stop_token = params.include_stop_str_in_output
        self._num_tokens = 0
        self.is_finished = False

    def push(self, event: TokenEvent) -> TextDelta:
        """The event's text. Events after the end (tokens already on their way when a stop string hit) give an empty delta."""
        if self.is_finished:
            return TextDelta(token_ids=[])
        texts: list[str] = []
        for i, token_id in enumerate(event.token_ids):
            self._num_tokens += 1
            is_stop_token = event.finish_reason is FinishReason.STOP and i == len(event.token_ids) - 1
            if self._detokenizer is None or (is_stop_token and not self._keeps_stop_token):
                continue
            if stop := self._release(self._detokenizer.push(token_id), texts):
                return self._delta(event, texts, num_tokens=i + 1, stop=stop)
        if event.finish_reason is None:
            return self._delta(event, texts, num_tokens=len(event.token_ids), stop=None)
        stop = self._release(self._detokenizer.flush() if self._detokenizer else "", texts)
        texts.append(self._stop.flush())
        return self._delta(event, texts, num_tokens=len(event.token_ids), stop=stop)

    def _release(self, text: str, texts: list[str]) -> str | None:
        """Appends what may go out now; the stop string that hit, if one did."""
        if not text:
            return None
        released = self._stop.push(text, can_match=self._num_tokens > self._min_tokens)
        texts.append(released.text)
        return released.stop

    def _delta(self, event: TokenEvent, texts: list[str], *, num_tokens: int, stop: str | None) -> TextDelta:
        self.is_finished = stop is not None or event.finish_reason is not None
        return TextDelta(
            text="".join(texts),
            token_ids=event.token_ids[:num_tokens],
            logprobs=None if event.logprobs is None else event.logprobs[:num_tokens],
            finish_reason=event.finish_reason if stop is None else FinishReason.STOP,
            stop_reason=event.stop_reason if stop is None else stop,
            is_stop_string_hit=stop is not None,
        )
