"""What the clients return, and how messages of `jaxserve.v1` become it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxserve.protocol import inference_pb2 as pb

FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


class Token(NamedTuple):
    """A token with its text and the natural logarithm of its probability."""

    id: int
    text: str
    logprob: float


class TokenLogprob(NamedTuple):
    """A generated token, its rank in the vocabulary (1 is the likeliest), and the likeliest tokens at its place, best first."""

    token: Token
    rank: int
    top: list[Token]


class Usage(NamedTuple):
    """Token counts of a call: its prompt, how much of that was found in the prefix cache, and all answers together."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(slots=True, kw_only=True)
class Output:
    """One of the n answers to a call.

    Attributes:
        index: Which of the n.
        text: The generated text, without the prompt.
        token_ids: The generated tokens, with the one that ended the answer.
        logprobs: One for each token when asked, else empty.
        finish_reason: "stop", "length" or "abort"; None in a piece that is not the last of its answer.
        stop_reason: The stop string or stop token id that matched; None for the model's own end token.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True, kw_only=True)
class Piece(Output):
    """What is new of one answer: text, token_ids and logprobs are to be appended.

    Attributes:
        usage: Of the whole call, with its last piece.
    """

    usage: Usage | None


@dataclass(slots=True, kw_only=True)
class Answer:
    """A whole answer.

    Attributes:
        outputs: The n answers, by index.
        usage: Token counts.
    """

    outputs: list[Output]
    usage: Usage

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text


def answer(message: pb.GenerateResponse) -> Answer:
    """An answer from its message."""
    return Answer(outputs=[Output(**_fields(output)) for output in message.outputs], usage=_usage(message.usage))


def piece(message: pb.GenerateChunk) -> Piece:
    """A piece of a stream from its message."""
    return Piece(**_fields(message.output), usage=_usage(message.usage) if message.HasField("usage") else None)


def _fields(output: pb.Output) -> dict[str, Any]:
    stop = output.WhichOneof("stop_reason")
    return {
        "index": output.index,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "logprobs": [TokenLogprob(_token(entry.token), entry.rank, [_token(top) for top in entry.top]) for entry in output.logprobs],
        "finish_reason": FINISH_REASONS.get(output.finish_reason),
        "stop_reason": None if stop is None else getattr(output, stop),
    }


def _token(message: pb.Token) -> Token:
    return Token(message.id, message.text, message.logprob)


def _usage(message: pb.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.cached_tokens, message.completion_tokens)
