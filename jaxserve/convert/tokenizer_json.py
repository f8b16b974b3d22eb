"""Parts of a tokenizer.json that every tokenizer needs, in the form of the `tokenizers` library.

Knows no source; who builds whole ones are `gguf_tokenizer.py` and `tokenizer_files.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Added tokens are found in text as they are.
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def post_processor(bos: list[tuple[int, str]], eos: list[tuple[int, str]]) -> dict[str, Any] | None:
    """Puts BOS before and EOS after a text, each given as no or one (id, token)."""
    if not bos and not eos:
        return None

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        before, after = ([{"SpecialToken": {"id": token, "type_id": type_id}} for _, token in affix] for affix in (bos, eos))
        return [*before, {"Sequence": {"id": sequence, "type_id": type_id}}, *after]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]} for i, token in bos + eos},
    }


def whole(pipeline: Mapping[str, Any], added: Mapping[int, tuple[str, bool]], processor: dict[str, Any] | None) -> dict[str, Any]:
    """The document: normalizer, pre-tokenizer, decoder and model, with its added tokens (text, and whether it is special) by id."""
    tokens = [{"id": i, "content": text, **FLAGS, "special": is_special} for i, (text, is_special) in sorted(added.items())]
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "post_processor": processor}
    return {**pipeline, **head}
