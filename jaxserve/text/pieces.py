"""What bytes each token stands for: the one definition of decoding, used for whole texts, streams and log-probabilities.

Decoders of generative models treat each token by itself, except that some drop a space at the start of a text. So a token has
two byte strings, `first` and `middle`, and a text is their concatenation read as UTF-8. This makes streams linear in cost and
equal to `Tokenizer.decode` by construction. Knows nothing of special tokens being skipped; that is `detokenizer`'s.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

from jaxserve.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TOKENWISE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
"""Decoders that act on one token at a time, besides ByteLevel (a strip after Fuse acts on the start of the text only)."""


class TokenPieces:
    """Bytes of each token of one tokenizer, found on first use and kept. Safe to use from several threads.

    Args:
        backend: The `tokenizers` object, with all added tokens in place.

    Raises:
        CheckpointError: The decoder joins tokens in a way that depends on their neighbours (WordPiece, CTC).
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        kinds = _decoder_kinds(backend)
        self._backend = backend
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        unknown = kinds - ({"ByteLevel", "Fuse"} if self._is_byte_level else _TOKENWISE)
        if unknown:
            raise CheckpointError(
                f"tokenizer.json has a decoder of kind {', '.join(sorted(kinds))}; supported are ByteLevel alone, or any of "
                f"{', '.join(sorted(_TOKENWISE))}."
            )
        self._middle: dict[int, bytes] = {}

    def middle(self, token_id: int) -> bytes:
        """Bytes of a token that follows another one; empty when the tokenizer lacks the id."""
        piece = self._middle.get(token_id)
        if piece is None:
            piece = self._middle[token_id] = self._find_middle(token_id)
        return piece

    def first(self, token_id: int) -> bytes:
        """Bytes of a token that starts a text, where some decoders drop a leading space."""
        piece = self.middle(token_id)
        if self._is_byte_level or not piece or (self._byte_value(token_id) is not None and piece != b" "):
            return piece
        return self._decode([token_id]).encode()

    def _find_middle(self, token_id: int) -> bytes:
        token = _token_of(self._backend, token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return _byte_level_bytes(token)
        value = self._byte_value(token_id)
        if value is not None:
            return bytes([value])
        # Twice the token is its first form and then its middle form, whatever the decoder does.
        return self._decode([token_id, token_id])[len(self._decode([token_id])) :].encode()

    def _byte_value(self, token_id: int) -> int | None:
        """The byte that a byte-fallback token such as <0xE6> stands for."""
        token = _token_of(self._backend, token_id) if self._has_byte_tokens else None
        match = _BYTE_TOKEN.fullmatch(token) if token else None
        return int(match[1], 16) if match else None

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)


def _token_of(backend: tokenizers.Tokenizer, token_id: int) -> str | None:
    return backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    def walk(spec: dict[str, Any]) -> set[str]:
        if spec["type"] == "Sequence":
            return {kind for part in spec["decoders"] for kind in walk(part)}
        return {spec["type"]}

    return set() if backend.decoder is None else walk(json.loads(backend.decoder.__getstate__()))


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next code point from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    # A token with a character outside the alphabet is an added one: it stands for its own text.
    values = [_BYTE_OF.get(char) for char in token]
    return token.encode() if None in values else bytes(value for value in values if value is not None)
