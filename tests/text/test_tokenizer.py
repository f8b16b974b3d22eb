from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
KINDS = ["byte_level", "spm", "metaspace", "spaced"]


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in GOLDEN.glob("*/expected.json")))
def test_golden_samples_encode_and_decode(folder: str) -> None:
    samples = json.loads((GOLDEN / folder / "expected.json").read_text())["tokenizer"]
    tokenizer = Tokenizer.from_directory(GOLDEN / folder)
    for text, ids in zip(samples["texts"], samples["ids"], strict=True):
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text


def test_special_tokens_and_ids(byte_level: Tokenizer, spm: Tokenizer) -> None:
    assert (byte_level.bos_token_id, byte_level.eos_token_id, byte_level.max_token_id) == (0, 1, 319)
    assert byte_level.special_token_ids == {0, 1, 2, 3}
    assert byte_level.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert byte_level.added_tokens[3] == "<|im_end|>"
    assert spm.encode("hello")[0] == spm.bos_token_id == 1
    assert spm.encode("hello", add_special_tokens=False)[0] != 1


@given(ids=st.lists(st.integers(0, 330), max_size=30))
def test_byte_level_decode_equals_the_library(byte_level: Tokenizer, ids: list[int]) -> None:
    library = tokenizers.Tokenizer.from_file(str(GOLDEN / "llama-bias" / "tokenizer.json"))
    assert byte_level.decode(ids) == library.decode(ids)
    assert byte_level.decode(ids, skip_special_tokens=False) == library.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", ["spm", "metaspace", "spaced"])
def test_decode_equals_the_library(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    texts = ["hello world", " hello", "  a b", "日本 🙂 é", "a. b,", "lo", ""]
    for text in texts:
        ids = tokenizer.encode(text)
        for skips in (True, False):
            assert tokenizer.decode(ids, skips) == tokenizer._backend.decode(ids, skip_special_tokens=skips)
    if kind == "spm":
        assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
        space = 3 + 0x20
        assert tokenizer.decode([space, space]) == tokenizer._backend.decode([space, space]) == " "


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token_id", [-1, 10**6, 2**32, 2**70])
def test_unknown_ids_decode_to_nothing(kind: str, token_id: int, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    assert tokenizer.decode([token_id]) == tokenizer.token_text(token_id) == ""
    assert tokenizer.decode([4, token_id, 4]) == tokenizer.decode([4, 4])
    assert tokenizer.token_bytes(token_id) == b""


def test_broken_byte_runs_keep_their_good_characters(spm: Tokenizer) -> None:
    byte = {value: 3 + value for value in range(256)}
    assert spm.decode([byte[b] for b in "日".encode()]) == "日"
    assert spm.decode([byte[b] for b in "日本".encode()[:-1]]) == "日\ufffd"


def test_token_bytes_and_text(byte_level: Tokenizer, spm: Tokenizer) -> None:
    ids = byte_level.encode("é the", add_special_tokens=False)
    assert b"".join(map(byte_level.token_bytes, ids)) == "é the".encode()
    assert [byte_level.token_bytes(i) for i in ids[:2]] == [b"\xc3", b"\xa9"]
    assert byte_level.token_text(ids[0]) == "\ufffd"
    assert byte_level.token_text(264) == " the"
    assert byte_level.token_text(1) == "</s>"
    hello = spm.token_id("▁hello")
    assert hello is not None
    assert (spm.token_text(hello), spm.decode([hello])) == (" hello", "hello")
    assert spm.token_bytes(3 + 0xE6) == b"\xe6"


def test_config_adds_and_marks_tokens(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eot>": 2}, unk_token="a"))
    backend.enable_truncation(1)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    config = {
        "added_tokens_decoder": {
            "4": {"content": "<tool>", "special": False, **flags},
            "3": {"content": "<x>", "special": True, **flags},
        },
        "eos_token": {"content": "<eot>"},
        "bos_token": None,
        "additional_special_tokens": ["<y>"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.added_tokens == {2: "<eot>", 3: "<x>", 4: "<tool>", 5: "<y>"}
    assert tokenizer.special_token_ids == {2, 3, 5}
    assert (tokenizer.max_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (5, 2, None)
    assert tokenizer.encode("a<x>b<tool>") == [0, 3, 1, 4], "truncation and padding of the file do not apply"


def test_add_bos_and_eos_rules_of_the_config(tmp_path: Path) -> None:
    source = json.loads((GOLDEN / "llama-bias" / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_text((GOLDEN / "llama-bias" / "tokenizer.json").read_text())
    for rule, expected in [
        ({}, [0, 71]),
        ({"add_bos_token": False}, [71]),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 71, 1]),
        ({"add_eos_token": True}, [71, 1]),
    ]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(source | rule))
        assert Tokenizer.from_directory(tmp_path).encode("d") == expected


def test_lone_surrogate_is_the_clients_error(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_level.encode("a\ud800")


def test_damaged_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.from_directory(tmp_path)
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="WordPiece"):
        Tokenizer.from_directory(tmp_path)
    for text in ("[1]", "{"):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(CheckpointError, match="tokenizer_config"):
            Tokenizer.from_directory(tmp_path)


def test_threads_agree(byte_level: Tokenizer) -> None:
    texts = [f"Thread {i} reads the café 日本 {i * i}." * 20 for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(byte_level.encode, texts))
        assert list(pool.map(byte_level.decode, ids)) == texts


def test_import_is_light_and_quick() -> None:
    code = """
import sys
from jaxserve.text import chat_template, sequence_text
print(sorted({"jax", "transformers", "numpy", "torch"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_added_tokens_of_a_byte_level_tokenizer(tmp_path: Path) -> None:
    """Where they have a character that no byte-level stand-in has (a space, CJK); otherwise as the library reads them."""
    backend = tokenizers.Tokenizer.from_file(str(GOLDEN / "llama-bias" / "tokenizer.json"))
    backend.add_tokens(["  ", "日本", "<think>", "é"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    for ids in ([71, 320, 71], [321, 322, 71], [320], [71, 323, 322]):
        assert tokenizer.decode(ids) == backend.decode(ids)
    assert tokenizer.decode(tokenizer.encode("d  日本<think>")) == "d  日本<think>"


def test_chat_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((GOLDEN / "llama-bias" / name).read_bytes())
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "{{ messages }}"}
