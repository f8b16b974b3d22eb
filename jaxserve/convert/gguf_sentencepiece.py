"""The SentencePiece BPE of a GGUF file (`tokenizer.ggml.model` llama) as the parts of a tokenizer.json.

SentencePiece joins the two neighbours whose union is the piece of the highest score. The same is said by merges: for every piece
all its cuts into two pieces, ordered by the score of the union. Spaces become "▁", text gets one in front (also after a special
token, as in llama.cpp), and a character without a piece falls back to its bytes. Called by `gguf_tokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError

# tokenizer.ggml.token_type of pieces that may be merged
NORMAL = 1
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """The tokenizer.json without special tokens.

    Args:
        metadata: All metadata of the file.
        tokens: By id.
        types: `tokenizer.ggml.token_type`, one for each token.

    Raises:
        CheckpointError: No scores or no unknown token, or a text normalization that is not the identity.
    """
    scores = metadata.get("tokenizer.ggml.scores") or []
    if not len(scores) == len(types) == len(tokens):
        raise CheckpointError(
            f"GGUF metadata: {len(tokens)} tokens need as many tokenizer.ggml.scores and token_type, got {len(scores)} and {len(types)}."
        )
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise CheckpointError(f"GGUF metadata: tokenizer.ggml.{key} is not supported for tokenizer.ggml.model llama.")
    if (pre := metadata.get("tokenizer.ggml.pre", "default")) != "default":
        raise CheckpointError(
            f"GGUF metadata: tokenizer.ggml.pre {pre!r} is not supported for tokenizer.ggml.model llama; supported: default."
        )
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise CheckpointError(f"GGUF metadata: tokenizer.ggml.unknown_token_id {unknown} is not one of {len(tokens)} tokens.")
    vocab = {token: i for i, token in enumerate(tokens)}
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    prefix, strip = {"type": "Prepend", "prepend": "▁"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prefix, spaces] if has_prefix else [spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*back, strip] if has_prefix else back},
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": all(token in vocab for token in BYTES),
            "vocab": vocab,
            "merges": score_merges(tokens, scores, types),
        },
    }


def score_merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every cut of every normal piece into two, the highest score first; cuts of one piece by the ids of their parts."""
    ids = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == NORMAL}
    found = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], i, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in found]
