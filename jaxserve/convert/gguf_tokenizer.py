"""Rebuilds tokenizer.json, tokenizer_config.json and the chat template from the metadata of a GGUF file.

What is common to all kinds is here: special tokens, the BOS and EOS rules, the config. The kinds are in `gguf_byte_level.py` and
`gguf_sentencepiece.py`; what is not known exactly is an error there. Everything is plain JSON, in the form of the `tokenizers`
library. Called by `read_gguf.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxserve.convert.gguf_byte_level import byte_level_bpe, pre_tokenizer_of
from jaxserve.convert.gguf_sentencepiece import sentencepiece_bpe
from jaxserve.convert.tokenizer_json import FLAGS, post_processor, whole
from jaxserve.errors import CheckpointError

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


def tokenizer_files(metadata: Mapping[str, Any], *, vocab_size: int) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and, if the file has one, chat_template.jinja.

    Args:
        metadata: All metadata of the file.
        vocab_size: Rows of the embedding; the tokenizer may not have more tokens.

    Raises:
        CheckpointError: No tokenizer, or one of a kind that is not supported, or damaged.
    """
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    if not 0 < len(tokens) <= vocab_size or len(set(tokens)) < len(tokens):
        raise CheckpointError(
            f"GGUF metadata: tokenizer.ggml.tokens must hold 1 to {vocab_size} different tokens (the rows of the embedding), "
            f"got {len(tokens)}, {len(set(tokens))} different."
        )
    types = metadata.get("tokenizer.ggml.token_type") or []
    tokenizer, adds_bos = _pipeline(metadata, tokens, types)
    ids = _special_ids(metadata, len(tokens))
    adds = {name: bool(metadata.get(f"tokenizer.ggml.add_{name}_token", name == "bos" and adds_bos)) for name in ("bos", "eos")}
    for name, is_added in adds.items():
        if is_added and name not in ids:
            raise CheckpointError(f"GGUF metadata: tokenizer.ggml.add_{name}_token is set but tokenizer.ggml.{name}_token_id is missing.")
    special = {i for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)} | set(ids.values())
    defined = {i for i, kind in enumerate(types) if kind == _USER_DEFINED} - special
    processor = post_processor(*([(ids[name], tokens[ids[name]])] if is_added else [] for name, is_added in adds.items()))
    tokenizer = whole(tokenizer, {i: (tokens[i], i in special) for i in special | defined}, processor)
    config = _tokenizer_config(metadata, tokens, ids, special, defined, adds)
    files = {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode(),
    }
    if template := metadata.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = template.encode()
    return files


def _pipeline(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[dict[str, Any], bool]:
    """The tokenizer.json without special tokens, and whether it prepends BOS where the file does not say."""
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        pre = pre_tokenizer_of(metadata)
        return byte_level_bpe(tokens, metadata.get("tokenizer.ggml.merges") or [], pre), pre.adds_bos
    if model == "llama":
        return sentencepiece_bpe(metadata, tokens, types), True
    raise CheckpointError(
        f"GGUF metadata: tokenizer.ggml.model {model!r} is not supported; supported: gpt2 (byte-level BPE) and llama (SentencePiece)."
    )


def _special_ids(metadata: Mapping[str, Any], num_tokens: int) -> dict[str, int]:
    ids = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            continue
        if not 0 <= value < num_tokens:
            raise CheckpointError(f"GGUF metadata: tokenizer.ggml.{key}_token_id {value} is not one of {num_tokens} tokens.")
        ids[name] = value
    return ids


def _tokenizer_config(
    metadata: Mapping[str, Any], tokens: list[str], ids: dict[str, int], special: set[int], defined: set[int], adds: dict[str, bool]
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(i): {"content": tokens[i], **FLAGS, "special": i in special} for i in sorted(special | defined)},
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
        "add_bos_token": adds["bos"],
        "add_eos_token": adds["eos"],
    }
    for name, i in ids.items():
        config[f"{name}_token"] = tokens[i]
    return config
