"""Two log lines of each request: what it asks, when it comes, and what it was answered, when it ends. Only with --log-requests.

The one place that writes prompts or answers into a log, and each up to a bound. Knows no protocol and no engine; `service.generate`
tells it of the events.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.text.sequence_text import TextDelta
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_PROMPT_TOKENS = 256
MAX_ANSWER_CHARS = 2048
"""Of all of a request's sequences together."""


@contextmanager
def logged(requests: Sequence[Request], tokenizer: Tokenizer) -> Iterator[CallLog]:
    """Logs a call's requests now, and their ends when the block ends, however it does."""
    call = CallLog(requests)
    for request in requests:
        ids = request.prompt_token_ids
        shown = list(ids[:MAX_PROMPT_TOKENS])
        logger.info(
            "%s begins: %d prompt tokens, the first of them %s %r, parameters %s",
            _name(request), len(ids), shown, tokenizer.decode(shown),
            given_params(request.params) if request.pooling is None else request.pooling,
        )  # fmt: skip
    try:
        yield call
    except BaseException as error:
        call.log_ends(error)
        raise
    call.log_ends(None)


@dataclass(slots=True)
class _Answer:
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None


class CallLog:
    """Keeps the answers of a call's requests, as far as they will be logged."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._started_s = time.monotonic()
        self._answers = {request.request_id: [_Answer() for _ in range(request.params.n)] for request in requests}

    def on_text(self, request_id: str, index: int, text: TextDelta) -> None:
        """What is new of a sequence."""
        answers = self._answers[request_id]
        answer = answers[index]
        answer.text += text.text[: max(0, MAX_ANSWER_CHARS // len(answers) - len(answer.text))]
        answer.num_tokens += len(text.token_ids)
        if text.finish_reason is not None:
            answer.finish_reason = text.finish_reason.value

    def log_ends(self, error: BaseException | None) -> None:
        """The call is over; an error tells why, where a sequence has no finish reason."""
        why = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else "its client left"
        for request in self._requests:
            answers = [f"{one.finish_reason or why}, {one.num_tokens} tokens, {one.text!r}" for one in self._answers[request.request_id]]
            logger.info("%s ended after %.3f s: %s", _name(request), time.monotonic() - self._started_s, "; ".join(answers))


def given_params(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not defaults."""
    defaults = SamplingParams()
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}


def _name(request: Request) -> str:
    """Its id in the engine, which other lines name it by, and its client's."""
    return f"request {request.request_id}" + (f" ({request.label!r})" if request.label else "")
