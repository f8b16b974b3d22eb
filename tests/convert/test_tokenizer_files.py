"""Tokenizers in other forms than tokenizer.json: the ids that their own libraries give, and what is refused.

`tokenizers.json` holds small SentencePiece models (sentencepiece 0.2.3; zlib, base64) and tiktoken ranks (tiktoken 0.14), trained on this
project's pages, with the ids and texts that those libraries give.
"""

from __future__ import annotations

import base64
import json
import shutil
import zlib
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from jaxserve.convert.read_safetensors import read_directory
from jaxserve.convert.tokenizer_files import convert_tokenizer
from jaxserve.errors import CheckpointError
from jaxserve.text.tokenizer import Tokenizer

DATA = json.loads((Path(__file__).parents[1] / "data" / "tokenizers.json").read_text())
SENTENCEPIECE = DATA["sentencepiece"]
LLAMA = {"model_type": "llama"}


def sentencepiece_model(kind: str) -> bytes:
    return zlib.decompress(base64.b64decode(SENTENCEPIECE[kind]["model"]))


def converted(path: Path, config: dict | None = None) -> Tokenizer:
    """The tokenizer made from what lies in `path`, as the server reads it."""
    out = path / "converted"
    out.mkdir(exist_ok=True)
    for name, content in convert_tokenizer(path, config or LLAMA).items():
        (out / name).write_bytes(content)
    return Tokenizer.from_directory(out)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@pytest.mark.parametrize("file", ["tokenizer.model", "spiece.model"])
def test_sentencepiece(tmp_path, kind, file):
    (tmp_path / file).write_bytes(sentencepiece_model(kind))
    tokenizer = converted(tmp_path)
    for text, ids, back in SENTENCEPIECE[kind]["cases"]:
        if "<tool>" in text or "<0x" in text:
            continue
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == [1, *ids]  # BOS
        if 0 not in ids:  # unknown
            assert tokenizer.decode(ids) == back
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.added_tokens[3] == "<tool>"


def test_text_that_looks_like_a_byte_piece(tmp_path):
    kind = "bpe-bytes"
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(kind))
    tokenizer = converted(tmp_path)
    text, ids, _ = next(case for case in SENTENCEPIECE[kind]["cases"] if "<0x41>" in case[0])
    assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_byte_fallback_round_trips(tmp_path):
    for kind in ("bpe-bytes", "unigram-bytes"):
        (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(kind))
        tokenizer = converted(tmp_path)
        for text in ("日本語 🙂", "tab\tand\nline", "Ünïcödé ¿?"):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_after_a_symbol(tmp_path):
    kind = "bpe-bytes"
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(kind))
    text, ids, back = next(case for case in SENTENCEPIECE[kind]["cases"] if "<tool>" in case[0])
    # As transformers: with `legacy` (its default), text after a symbol gets a space too; without, what sentencepiece gives.
    assert converted(tmp_path).encode(text, add_special_tokens=False) != ids
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": False}))
    tokenizer = converted(tmp_path)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == back == text


def test_settings_of_the_directory_win(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model("bpe-bytes"))
    settings = {"add_bos_token": False, "eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    settings["added_tokens_decoder"] = {"701": {"content": "<|im_end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 700}))
    tokenizer = converted(tmp_path)
    assert tokenizer.encode("<|im_start|>a<|im_end|>")[::3] in ([700, 701], [700])
    assert tokenizer.encode("<|im_start|>")[0] == 700
    assert tokenizer.eos_token_id == 701 and tokenizer.chat_templates == {"default": "{{ messages }}"}


def tiktoken_file(kind: str) -> bytes:
    return DATA[kind]["ranks"].encode()


@pytest.mark.parametrize("file", ["tokenizer.model", "my.tiktoken"])
def test_tiktoken(tmp_path, file):
    (tmp_path / file).write_bytes(tiktoken_file("llama3"))
    tokenizer = converted(tmp_path)
    for text, ids in DATA["llama3"]["cases"]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode(text) == [420, *ids]
        assert tokenizer.decode(ids) == text
    # Llama 3's own numbers, counted from its 128,000 ranks.
    numbers = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|start_header_id|>": 6, "<|end_header_id|>": 7, "<|eot_id|>": 9}
    for text, number in numbers.items():
        assert tokenizer.token_id(text) == 420 + number
    assert tokenizer.max_token_id == 420 + 255 and tokenizer.eos_token_id == 421


def test_tekken(tmp_path):
    ranks = [line.split() for line in DATA["tekken"]["ranks"].split("\n")]
    value = {
        "config": {"pattern": DATA["tekken"]["pattern"], "default_vocab_size": 430, "default_num_special_tokens": 30},
        "vocab": [{"rank": int(rank), "token_bytes": token, "token_str": None} for token, rank in ranks],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(value))
    tokenizer = converted(tmp_path, {"model_type": "mistral"})
    assert tokenizer.max_token_id == 429  # 400 of the 420 ranks
    for text, ids in DATA["tekken"]["cases"]:
        got = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(got) == text
        if max(ids, default=0) < 390:  # of words that use the last ranks, whole or on the way, others are left
            assert got == [i + 30 for i in ids]
    assert tokenizer.token_id("<s>") == 1 and tokenizer.token_id("[INST]") == 3 and tokenizer.token_id("<SPECIAL_29>") == 29
    assert tokenizer.encode("a")[0] == 1 and tokenizer.eos_token_id == 2
    value["special_tokens"] = [{"rank": 2, "token_str": "<end>", "is_control": True}]
    (tmp_path / "tekken.json").write_text(json.dumps(value))
    assert converted(tmp_path).token_id("<end>") == 2


@pytest.fixture(scope="module")
def byte_level():
    """A byte-level BPE, trained."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([case[0] for case in DATA["llama3"]["cases"]] * 2 + [Path(__file__).read_text()], trainer)
    return backend


@pytest.mark.parametrize("name", [None, "GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocab_and_merges(tmp_path, byte_level, name):
    byte_level.model.save(str(tmp_path))
    if name:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    tokenizer = converted(tmp_path)
    for text, _ in DATA["llama3"]["cases"]:
        ids = tokenizer.encode(text)
        if name != "Qwen2Tokenizer":
            assert ids == byte_level.encode(text).ids
            assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<|endoftext|>")[-1] == 0 == tokenizer.eos_token_id
    # Qwen cuts every digit off.
    assert len(tokenizer.encode("1234")) == 4 or name != "Qwen2Tokenizer"


def test_no_tokenizer_at_all(tmp_path):
    assert convert_tokenizer(tmp_path, LLAMA) == {}
    (tmp_path / "vocab.json").write_text("{}")
    assert convert_tokenizer(tmp_path, LLAMA) == {}


@pytest.mark.parametrize(
    ("files", "config", "match"),
    [
        ({"x.tiktoken": tiktoken_file("llama3")}, {"model_type": "glm"}, r"types llama, qwen, qwen2, not for 'glm'\. .*transformers"),
        ({"x.tiktoken": b"YQ== 0\nYg== 1\n"}, LLAMA, "damaged: its ranks must be 0 to 1, and every byte"),
        ({"x.tiktoken": b"YQ== 0\nYg== x\n"}, LLAMA, "is no tiktoken file"),
        ({"tokenizer.model": b"\x0a\xff\xff"}, LLAMA, "is no SentencePiece model"),
        ({"tokenizer.model": b""}, LLAMA, "it has 0 pieces"),
        ({"tokenizer.model": b"\x0a\x03\x0a\x01a\x12\x02\x18\x03"}, LLAMA, "type word; supported: BPE, Unigram"),
        ({"tokenizer.model": b"\x0a\x03\x0a\x01a\x12\x03\xc0\x01\x01"}, LLAMA, "treat_whitespace_as_suffix True is not supported"),
        ({"tekken.json": b"{}"}, LLAMA, r"is no tekken\.json: KeyError\('config'\)"),
        ({"vocab.json": b'{"a": 0}', "merges.txt": b"", "tokenizer_config.json": b'{"tokenizer_class": "NewTokenizer"}'}, LLAMA,
         r"tokenizer class 'NewTokenizer', of which .*pip install transformers"),
        ({"vocab.json": b'{"a": 0, "b": 0}', "merges.txt": b""}, LLAMA, "damaged: its ids must be 0 to 1"),
        ({"vocab.json": b'{"a": 0, "b": 1}', "merges.txt": b"#version: 0.2\na b\n"}, LLAMA, r"merges\.txt holds 'a b', which does"),
    ],
)  # fmt: skip
def test_refused(tmp_path, files, config, match):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        convert_tokenizer(tmp_path, config)


def test_in_a_checkpoint(tmp_path, golden_dir):
    source = tmp_path / "source"
    shutil.copytree(golden_dir / "llama-bias", source, copy_function=shutil.copyfile)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    (source / "tokenizer.model").write_bytes(sentencepiece_model("bpe-bytes"))
    source_files = read_directory(source).small_files
    assert json.loads(source_files["tokenizer.json"])["model"]["type"] == "BPE"
    (source / "tokenizer.model").unlink()
    read = read_directory(source)
    assert "tokenizer.json" not in read.small_files and "no tokenizer.json" in read.notes[0]
