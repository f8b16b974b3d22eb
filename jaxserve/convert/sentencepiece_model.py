"""A SentencePiece model (`tokenizer.model`) as the parts of a tokenizer.json: BPE or Unigram, with or without byte fallback.

The file is a protobuf message of which a few fields matter; they are declared here, since the library itself is not needed to read them.
What the library does to spaces is said by normalizers. Called by `tokenizer_files.py`.
"""

from __future__ import annotations

import base64
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from jaxserve.convert.gguf_sentencepiece import BYTES, NORMAL, score_merges
from jaxserve.errors import CheckpointError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
_UNIGRAM, _BPE = 1, 2
_KINDS = {1: "Unigram", 2: "BPE", 3: "word", 4: "character"}

# Message, field, number, type, default: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
_FIELDS = (
    ("Piece", "piece", 1, "STRING", ""),
    ("Piece", "score", 2, "FLOAT", "0"),
    ("Piece", "type", 3, "INT32", "1"),
    ("Trainer", "model_type", 3, "INT32", "1"),
    ("Trainer", "treat_whitespace_as_suffix", 24, "BOOL", "false"),
    ("Trainer", "byte_fallback", 35, "BOOL", "false"),
    ("Trainer", "unk_id", 40, "INT32", "0"),
    ("Trainer", "bos_id", 41, "INT32", "1"),
    ("Trainer", "eos_id", 42, "INT32", "2"),
    ("Trainer", "pad_id", 43, "INT32", "-1"),
    ("Normalizer", "precompiled_charsmap", 2, "BYTES", ""),
    ("Normalizer", "add_dummy_prefix", 3, "BOOL", "true"),
    ("Normalizer", "remove_extra_whitespaces", 4, "BOOL", "true"),
    ("Normalizer", "escape_whitespaces", 5, "BOOL", "true"),
)


@cache
def _message_class() -> type[Message]:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece.proto", package="jaxserve.sentencepiece", syntax="proto2")
    messages = {name: file.message_type.add(name=name) for name in ("Piece", "Trainer", "Normalizer", "Model")}
    for message, name, number, kind, default in _FIELDS:
        field = messages[message].field.add(name=name, number=number, label=kinds.LABEL_OPTIONAL, default_value=default)
        field.type = kinds.Type.Value(f"TYPE_{kind}")
    parts = (
        ("pieces", "Piece", kinds.LABEL_REPEATED),
        ("trainer", "Trainer", kinds.LABEL_OPTIONAL),
        ("normalizer", "Normalizer", kinds.LABEL_OPTIONAL),
    )
    for number, (name, message, label) in enumerate(parts, start=1):
        type_name = f".jaxserve.sentencepiece.{message}"
        messages["Model"].field.add(name=name, number=number, label=label, type=kinds.TYPE_MESSAGE, type_name=type_name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("jaxserve.sentencepiece.Model"))


def read_sentencepiece(content: bytes, name: str) -> Any:
    """The message in a file: `pieces`, `trainer` and `normalizer`; CheckpointError where it is none, or of a kind that is not supported."""
    model: Any = _message_class()()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        raise CheckpointError(f"{name} is no SentencePiece model: {error}.") from None
    if not model.pieces or len({piece.piece for piece in model.pieces}) < len(model.pieces):
        raise CheckpointError(f"{name} is no SentencePiece model: it has {len(model.pieces)} pieces, or the same twice.")
    kind = model.trainer.model_type
    if kind not in (_UNIGRAM, _BPE):
        raise CheckpointError(f"{name} is a SentencePiece model of type {_KINDS.get(kind, kind)}; supported: BPE, Unigram.")
    for spec, key, supported in ((model.trainer, "treat_whitespace_as_suffix", False), (model.normalizer, "escape_whitespaces", True)):
        if getattr(spec, key) != supported:
            raise CheckpointError(f"{name}: a SentencePiece model with {key} {not supported} is not supported.")
    return model


def sentencepiece_pipeline(model: Any, *, is_legacy: bool) -> dict[str, Any]:
    """Normalizer, pre-tokenizer, decoder and model. With `is_legacy` text after a special token gets a space in front too."""
    normalizer = model.normalizer
    steps: list[dict[str, Any]] = []
    if normalizer.precompiled_charsmap:
        charsmap = base64.b64encode(normalizer.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if normalizer.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if normalizer.add_dummy_prefix and is_legacy:
        steps.append({"type": "Prepend", "prepend": "▁"})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    has_pre_tokenizer = normalizer.add_dummy_prefix and not is_legacy
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if normalizer.add_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": metaspace if has_pre_tokenizer else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _unigram(model) if model.trainer.model_type == _UNIGRAM else _bpe(model),
    }


def _bpe(model: Any) -> dict[str, Any]:
    tokens = [piece.piece for piece in model.pieces]
    return {
        "type": "BPE",
        "unk_token": tokens[_unknown(model)],
        "fuse_unk": True,
        "byte_fallback": _has_bytes(model),
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": score_merges(tokens, [piece.score for piece in model.pieces], [piece.type for piece in model.pieces]),
    }


def _unigram(model: Any) -> dict[str, Any]:
    """Pieces that stand for no text of their own, such as <0x0A>, get the least score, so that text which looks so is cut as usual.

    Where every character of such text is unknown, the piece wins nevertheless, as in transformers' conversion.
    """
    least = min((piece.score for piece in model.pieces if piece.type == NORMAL), default=0.0)
    vocab = [(piece.piece, piece.score if piece.type == NORMAL else least) for piece in model.pieces]
    return {"type": "Unigram", "unk_id": _unknown(model), "byte_fallback": _has_bytes(model), "vocab": vocab}


def _unknown(model: Any) -> int:
    return next((i for i, piece in enumerate(model.pieces) if piece.type == UNKNOWN), 0)


def _has_bytes(model: Any) -> bool:
    return bool(model.trainer.byte_fallback) and {piece.piece for piece in model.pieces}.issuperset(BYTES)
