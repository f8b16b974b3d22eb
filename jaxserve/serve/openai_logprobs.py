"""Log-probabilities in OpenAI's two shapes (completions and chat) and vLLM's shape for prompts. JSON has no infinities: see MIN."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from jaxserve.core.events import Logprobs
from jaxserve.text.tokenizer import Tokenizer

MIN = -9999.0
"""Stands for minus infinity, as in vLLM."""


class TokenNames:
    """How tokens are written among log-probabilities: their text, or `token_id:7` where a client asks for it."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """The name of a token."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def utf8(self, token_id: int) -> list[int]:
        """The bytes of a token, which need not be whole characters."""
        return list(self._tokenizer.token_bytes(token_id))


class TextOffsets:
    """Where in one choice's text each token begins, in characters."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, is_at_start: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._is_at_start = is_at_start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = self._offset
        if token_id not in self._skipped:
            pieces = self._tokenizer.pieces
            piece = pieces.first(token_id) if self._is_at_start else pieces.middle(token_id)
            self._is_at_start = False
            self._offset += len(self._utf8.decode(piece))
        return offset


def completion_logprobs(
    entries: Sequence[Logprobs | None], token_ids: Sequence[int], num_top: int, names: TokenNames, offsets: TextOffsets
) -> dict[str, list[Any]]:
    """Parallel lists for some tokens; an entry of None (the first prompt token) has no log-probability."""
    return {
        "text_offset": [offsets.next(token_id) for token_id in token_ids],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "tokens": [names.text(token_id) for token_id in token_ids],
        "top_logprobs": [None if entry is None else _top_by_text(entry, num_top, names) for entry in entries],
    }


def chat_logprobs(entries: Sequence[Logprobs], num_top: int, names: TokenNames) -> list[dict[str, Any]]:
    """One object for each token, with the most likely ones beside it."""
    return [
        {
            **_chat_token(entry.token_id, entry.logprob, names),
            "top_logprobs": [_chat_token(token_id, logprob, names) for token_id, logprob in most_likely(entry, num_top)],
        }
        for entry in entries
    ]


def prompt_logprobs(entries: Sequence[Logprobs | None], num_top: int, names: TokenNames) -> list[dict[str, Any] | None]:
    """For each prompt token a map from id to its log-probability; None for the first."""
    return [None if entry is None else _prompt_entry(entry, num_top, names) for entry in entries]


def most_likely(entry: Logprobs, num_top: int) -> list[tuple[int, float]]:
    """The most likely tokens, best first; -1 is all (which arrive in vocabulary order)."""
    pairs = list(zip(entry.top_ids, entry.top_logprobs, strict=True))
    if num_top == -1:
        return sorted(pairs, key=lambda pair: -pair[1])
    return pairs[:num_top]


def _prompt_entry(entry: Logprobs, num_top: int, names: TokenNames) -> dict[str, Any]:
    ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(most_likely(entry, num_top), start=1)}
    ranked[entry.token_id] = (entry.logprob, entry.rank)
    return {
        str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": names.text(token_id)}
        for token_id, (logprob, rank) in ranked.items()
    }


def _top_by_text(entry: Logprobs, num_top: int, names: TokenNames) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in [*most_likely(entry, num_top), (entry.token_id, entry.logprob)]:
        top.setdefault(names.text(token_id), _finite(logprob))  # several ids may share a text: the likelier one stays
    return top


def _chat_token(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {"token": names.text(token_id), "logprob": _finite(logprob), "bytes": names.utf8(token_id)}


def _finite(logprob: float) -> float:
    return max(logprob, MIN)
