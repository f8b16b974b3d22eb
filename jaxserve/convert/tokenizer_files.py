"""Makes tokenizer.json from the other forms in which checkpoints carry a tokenizer, or refuses them with what to do.

SentencePiece models, tiktoken files, tekken.json, and vocab.json with merges.txt; how each is read is in the modules imported here. A form
that does not say how text is cut is taken only where the model's own tokenizer is known: a near miss gives wrong ids for some texts,
which nobody notices. Called by `read_safetensors.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.convert.byte_ranks import is_tiktoken, ranked_pipeline, read_tekken, read_tiktoken
from jaxserve.convert.gguf_byte_level import LLAMA3_PATTERN, PRE_TOKENIZERS, QWEN2_PATTERN, byte_level_bpe
from jaxserve.convert.sentencepiece_model import CONTROL, UNKNOWN, USER_DEFINED, read_sentencepiece, sentencepiece_pipeline
from jaxserve.convert.tokenizer_json import post_processor, whole
from jaxserve.errors import CheckpointError

SOURCES = ("tekken.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "*.tiktoken", "vocab.json")
"""Looked for in this order, as globs."""

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")

_TIKTOKEN_PATTERNS = {"llama": LLAMA3_PATTERN, "qwen": QWEN2_PATTERN, "qwen2": QWEN2_PATTERN}
"""By model_type. tiktoken files do not say how text is cut."""

_CLASSES = {
    "GPT2Tokenizer": "gpt-2",
    "GPT2TokenizerFast": "gpt-2",
    "GPTNeoXTokenizerFast": "gpt-2",
    "CodeGenTokenizer": "gpt-2",
    "CodeGenTokenizerFast": "gpt-2",
    "Qwen2Tokenizer": "qwen2",
    "Qwen2TokenizerFast": "qwen2",
}
"""How text is cut for vocab.json with merges.txt, by the config's tokenizer_class."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a source says: the pipeline, added tokens by id with whether they are special, named tokens, and whether BOS is added."""

    pipeline: dict[str, Any]
    added: dict[int, tuple[str, bool]] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    adds_bos: bool = False


def convert_tokenizer(path: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json for a directory that has no tokenizer.json; empty where it has no tokenizer at all.

    Args:
        path: A Hugging Face directory.
        config: Its config.json.

    Raises:
        CheckpointError: Its tokenizer is damaged, or cannot be converted exactly.
    """
    file = next((found for pattern in SOURCES for found in sorted(path.glob(pattern))), None)
    if file is None or (file.name == "vocab.json" and not (path / "merges.txt").is_file()):
        return {}
    settings = _json(path / "special_tokens_map.json") | _json(path / "tokenizer_config.json")
    parts = _read(file, settings, config)
    for name, text in parts.named.items():
        settings.setdefault(name, text)
    added = parts.added | {i: (text, True) for text, i in _json(path / "added_tokens.json").items()}
    for key, entry in (settings.get("added_tokens_decoder") or {}).items():
        added[int(key)] = (entry["content"], bool(entry.get("special", False)))
    vocab = parts.pipeline["model"]["vocab"]
    ids = vocab if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
    # Tokens that the model's own vocabulary holds keep their ids; others are numbered anew from its end.
    ids |= {text: i for i, (text, _) in added.items()}
    named = {name: _text(settings.get(name)) for name in _NAMED}
    added |= {ids[text]: (text, True) for text in named.values() if text in ids}
    bos = named["bos_token"]
    processor = post_processor([(ids[bos], bos)], []) if parts.adds_bos and bos in ids else None
    return {
        "tokenizer.json": json.dumps(whole(parts.pipeline, added, processor), ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False).encode(),
    }


def _read(file: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> _Parts:
    content = file.read_bytes()
    if file.name == "tekken.json":
        ranks, special, pattern = read_tekken(content, str(file))
        added = {i: (text, True) for i, text in special.items()}
        named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        known = {name: text for name, text in named.items() if text in special.values()}
        return _Parts(ranked_pipeline(ranks, pattern, offset=len(special)), added, known, adds_bos=True)
    if file.name == "vocab.json":
        return _vocab_and_merges(file, settings)
    return _tiktoken(file, content, settings, config) if is_tiktoken(content) else _sentencepiece(file, content, settings)


def _sentencepiece(file: Path, content: bytes, settings: Mapping[str, Any]) -> _Parts:
    model = read_sentencepiece(content, str(file))
    pieces, trainer = model.pieces, model.trainer
    kinds = (UNKNOWN, CONTROL, USER_DEFINED)
    added = {i: (piece.piece, piece.type != USER_DEFINED) for i, piece in enumerate(pieces) if piece.type in kinds}
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id, "pad_token": trainer.pad_id}
    named = {name: pieces[i].piece for name, i in ids.items() if 0 <= i < len(pieces)}
    return _Parts(sentencepiece_pipeline(model, is_legacy=settings.get("legacy") is not False), added, named, adds_bos=True)


def _tiktoken(file: Path, content: bytes, settings: Mapping[str, Any], config: Mapping[str, Any]) -> _Parts:
    model_type = config.get("model_type")
    if model_type not in _TIKTOKEN_PATTERNS:
        known = ", ".join(_TIKTOKEN_PATTERNS)
        raise CheckpointError(
            f"{file} is a tiktoken file, which does not say how text is cut; that is known for the model types {known}, not for "
            f"{model_type!r}. {_advice(file)}"
        )
    ranks = read_tiktoken(content, str(file))
    pipeline = ranked_pipeline(ranks, _TIKTOKEN_PATTERNS[model_type])
    if settings.get("added_tokens_decoder"):
        return _Parts(pipeline, adds_bos=model_type == "llama")
    special = _LLAMA3_SPECIAL if model_type == "llama" else ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    named = {"bos_token": special[0]} if model_type == "llama" else {}
    added = {len(ranks) + i: (text, True) for i, text in enumerate(special)}
    return _Parts(pipeline, added, named | {"eos_token": special[1 if model_type == "llama" else 0]}, adds_bos=model_type == "llama")


def _vocab_and_merges(file: Path, settings: Mapping[str, Any]) -> _Parts:
    name = settings.get("tokenizer_class", "GPT2Tokenizer")
    if name not in _CLASSES:
        raise CheckpointError(
            f"{file} with merges.txt is of the tokenizer class {name!r}, of which it is not known how text is cut; known: "
            f"{', '.join(_CLASSES)}. {_advice(file)}"
        )
    vocab = _json(file)
    if not vocab or sorted(vocab.values()) != list(range(len(vocab))):
        raise CheckpointError(f"{file} is damaged: its ids must be 0 to {len(vocab) - 1}.")
    merges_file = file.with_name("merges.txt")
    lines = merges_file.read_text(encoding="utf-8").split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    pipeline = byte_level_bpe(sorted(vocab, key=vocab.__getitem__), merges, PRE_TOKENIZERS[_CLASSES[name]], what=str(merges_file))
    if settings.get("add_prefix_space"):
        pipeline["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True
    end = "<|endoftext|>"
    names = ("eos_token", "pad_token") if name.startswith("Qwen2") else ("bos_token", "eos_token", "unk_token")
    return _Parts(pipeline, named=dict.fromkeys(names, end) if end in vocab else {})


def _advice(file: Path) -> str:
    """What a user can do about a tokenizer that is not converted here."""
    return (
        f"Make tokenizer.json with the package transformers: pip install transformers tiktoken sentencepiece, then "
        f"AutoTokenizer.from_pretrained({str(file.parent)!r}).save_pretrained({str(file.parent)!r})."
    )


def _json(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(value).__name__}.")
    return value


def _text(token: Any) -> str:
    """A token of tokenizer_config.json: a string, or an object with its text under `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _llama3_special() -> tuple[str, ...]:
    """Llama 3's 256, in the order of their ids."""
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(251))
    first = ["<|begin_of_text|>", "<|end_of_text|>", *(next(reserved) for _ in range(4)), "<|start_header_id|>", "<|end_header_id|>"]
    return (*first, next(reserved), "<|eot_id|>", *reserved)


_LLAMA3_SPECIAL = _llama3_special()
