"""Small tokenizers of the kinds that models ship, made by hand: byte-level (golden), SentencePiece style, Metaspace, and none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from jaxserve.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def save(backend: tokenizers.Tokenizer, path: Path, config: dict | None = None) -> Path:
    """Writes a checkpoint directory with only a tokenizer in it."""
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return path


def spm_backend(*, strips_space: bool = True) -> tokenizers.Tokenizer:
    """Like Llama 2: metaspace words, byte fallback, one leading space stripped from a text. Ids 0..2 are <unk>, <s>, </s>."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    words += [*"abcdefghijklmnopqrstuvwxyz.,日本", "▁hello", "▁world", "lo", "▁▁"]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "▁"), ("l", "o")], byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips_space else parts)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return backend


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """The golden 320-token byte-level BPE; ids 0..3 are <s>, </s>, <pad>, <|im_end|>."""
    return Tokenizer.from_directory(GOLDEN / "llama-bias")


@pytest.fixture(scope="session")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": False}
    return Tokenizer.from_directory(save(spm_backend(), tmp_path_factory.mktemp("spm"), config))


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    backend = spm_backend()
    backend.decoder = decoders.Metaspace()
    return Tokenizer.from_directory(save(backend, tmp_path_factory.mktemp("metaspace")))


@pytest.fixture(scope="session")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """No decoder at all: tokens are joined with spaces."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2, "<e>": 3}, unk_token="a"))
    backend.add_special_tokens(["<s>", "<e>"])
    return Tokenizer.from_directory(save(backend, tmp_path_factory.mktemp("spaced")))
