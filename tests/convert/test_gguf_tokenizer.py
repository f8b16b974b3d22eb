"""Tokenizers rebuilt from GGUF metadata: every kind of cut, special tokens, BOS rules, SentencePiece, and what is refused.

`sentencepiece.json` holds two small BPE models trained with the sentencepiece library (0.2.3; with and without its dummy prefix,
byte fallback, one user-defined symbol), as a GGUF file would hold them, and the ids that library gives.
"""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jaxserve.convert.gguf_byte_level import PRE_TOKENIZERS
from jaxserve.convert.gguf_tokenizer import tokenizer_files
from jaxserve.errors import CheckpointError

SENTENCEPIECE = json.loads((Path(__file__).parents[1] / "data" / "sentencepiece.json").read_text())

TEXTS = [
    "The small engine reads one token.",
    "  two  spaces\n\n\tand\r\n lines   ",
    "it's I'LL we'Ve don't",
    "1 22 333 4444 1234567 3.14159 ½ ²",
    "Straße → café 日本語 e\u0301 🙂👍🏽",
    "foo(bar, *args) != {'a': [1]} /* x */ //",
    "HTTPServer camelCase XMLHttp",
    "<|end|>after <|end|>",
    "",
]


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE as a GGUF file holds it: tokens, types, merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, Path(__file__).read_text()], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [3, 3] + [1] * (len(tokens) - 2), [" ".join(merge) for merge in model["merges"]]


def metadata_of(trained, **changes):
    tokens, types, merges = trained
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items() if value is not None}


def build(trained, **changes) -> Tokenizer:
    files = tokenizer_files(metadata_of(trained, **changes), vocab_size=600)
    return Tokenizer.from_str(files["tokenizer.json"].decode())


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_kind_keeps_text(trained, pre):
    tokenizer = build(trained, pre=pre)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        back = tokenizer.decode(ids, skip_special_tokens=False)
        assert back == (unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].is_nfc else text)
        assert ids.count(1) == text.count("<|end|>")


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", "Ġ1234", "Ġ'", "S", "ĠĠ", "Ġx", "ĊĊ"]),
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "Ġ'", "S", "ĠĠ", "Ġx", "ĊĊ"]),
        ("llama-bpe", ["a", "Ġ", "123", "4", "Ġ'", "S", "ĠĠ", "Ġx", "ĊĊ"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "Ġ'", "S", "ĠĠ", "Ġx", "ĊĊ"]),
        ("tekken", ["a", "Ġ", "1", "2", "3", "4", "Ġ'", "S", "ĠĠ", "Ġx", "ĊĊ"]),
    ],
)
def test_how_text_is_cut(trained, pre, pieces):
    tokenizer = build(trained, pre=pre)
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a 1234 'S   x\n\n")] == pieces


def test_case_is_cut_by_tekken_only(trained):
    cut = {
        pre: [piece for piece, _ in build(trained, pre=pre).pre_tokenizer.pre_tokenize_str("camelCase HTTPServer")]
        for pre in PRE_TOKENIZERS
    }
    assert cut.pop("tekken") == ["camel", "Case", "ĠHTTPServer"]
    assert all(pieces == ["camelCase", "ĠHTTPServer"] for pieces in cut.values())


def test_bos_and_eos_rules(trained):
    ids = build(trained).encode("a").ids
    assert build(trained, add_bos_token=True).encode("a").ids == [0, *ids]
    assert build(trained, add_bos_token=True, add_eos_token=True).encode("a").ids == [0, *ids, 1]
    # llama3 files may leave the rule out; BOS is then added.
    assert build(trained, pre="llama-bpe").encode("a").ids == [0, *ids]
    assert build(trained, pre="llama-bpe", add_bos_token=False).encode("a").ids == ids


def test_whole_words_come_first(trained):
    tokens, types, merges = trained
    # A token that no sequence of merges makes.
    extended = ([*tokens, "qzqz"], [*types, 1], merges)
    assert build(extended, pre="llama-bpe", add_bos_token=False).encode("qzqz").ids == [len(tokens)]
    assert build(extended, pre="gpt-2").encode("qzqz").ids != [len(tokens)]


def test_user_defined_tokens_are_found_but_not_special(trained):
    tokens, types, merges = trained
    tokenizer = build(([*tokens, "<tool>"], [*types, 4], merges))
    ids = tokenizer.encode("a<tool>b").ids
    assert len(tokens) in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"


def test_tokenizer_config_and_template(trained):
    metadata = metadata_of(trained) | {"tokenizer.chat_template": "{{ messages }}"}
    files = tokenizer_files(metadata, vocab_size=600)
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "<|end|>")
    assert config["added_tokens_decoder"]["1"]["special"] is True
    assert files["chat_template.jinja"] == b"{{ messages }}"
    assert "chat_template.jinja" not in tokenizer_files(metadata_of(trained), vocab_size=600)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"pre": "default"}, r"tokenizer\.ggml\.pre 'default' is not supported; supported: gpt-2, smollm"),
        ({"pre": "brand-new"}, "'brand-new' is not supported"),
        ({"pre": None}, "None is not supported"),
        ({"model": "bert"}, r"tokenizer\.ggml\.model 'bert' is not supported; supported: gpt2 .* and llama"),
        ({"model": "llama"}, "need as many tokenizer.ggml.scores"),
        ({"model": None}, "None is not supported"),
        ({"tokens": []}, "must hold 1 to 600 different tokens"),
        ({"tokens": ["a"] * 10}, "got 10, 1 different"),
        ({"tokens": [str(i) for i in range(601)]}, "got 601"),
        ({"merges": ["ab"]}, "'ab', which does not join two tokens"),
        ({"merges": ["nope nope"]}, "'nope nope', which does not join two tokens into a third"),
        ({"bos_token_id": 10**6}, "bos_token_id 1000000 is not one of"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
    ],
)
def test_tokenizers_that_are_refused(trained, changes, match):
    with pytest.raises(CheckpointError, match=match):
        tokenizer_files(metadata_of(trained, **changes), vocab_size=600)


def sentencepiece_metadata(kind, **changes):
    model = SENTENCEPIECE[kind]
    values = {name: model[name] for name in ("tokens", "scores", "token_type")} | {"model": "llama", "pre": "default"}
    values |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": kind == "prefix"}
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items() if value is not None}


def build_sentencepiece(kind, **changes) -> Tokenizer:
    files = tokenizer_files(sentencepiece_metadata(kind, **changes), vocab_size=700)
    return Tokenizer.from_str(files["tokenizer.json"].decode())


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_sentencepiece_ids(kind):
    tokenizer = build_sentencepiece(kind)
    for text, ids in SENTENCEPIECE[kind]["cases"]:
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert tokenizer.encode(text).ids == [1, *ids]  # BOS unless the file says otherwise
        assert tokenizer.decode(ids) == text


def test_sentencepiece_special_tokens():
    tokenizer = build_sentencepiece("prefix", add_bos_token=False)
    a = tokenizer.encode("a").ids
    # As llama.cpp: text after a special token gets its space too.
    assert tokenizer.encode("a</s>a").ids == [*a, 2, *a]
    assert tokenizer.decode([*a, 2, *a]) == "a a"
    assert 3 in tokenizer.encode("a<tool>b").ids


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"scores": None}, "700 tokens need as many tokenizer.ggml.scores and token_type, got 0 and 700"),
        ({"pre": "llama-bpe"}, "pre 'llama-bpe' is not supported for tokenizer.ggml.model llama"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is not supported"),
        ({"unknown_token_id": 700}, "unknown_token_id 700"),
    ],
)
def test_sentencepiece_that_is_refused(changes, match):
    with pytest.raises(CheckpointError, match=match):
        tokenizer_files(sentencepiece_metadata("prefix", **changes), vocab_size=700)
