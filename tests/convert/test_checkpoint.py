"""Reading a converted checkpoint: version, damage, end tokens, description."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from jaxserve.checkpoint import FORMAT_VERSION, open_checkpoint
from jaxserve.checkpoint_report import describe
from jaxserve.convert import convert
from jaxserve.errors import CheckpointError


@pytest.fixture
def copy(converted, tmp_path):
    path = tmp_path / "checkpoint"
    shutil.copytree(converted("llama-bias"), path)
    return path


def test_not_a_checkpoint(tmp_path, golden_dir):
    with pytest.raises(CheckpointError, match="it does not exist"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"no manifest\.json.*Convert it first"):
        open_checkpoint(golden_dir / "llama-bias")


def test_other_format_version(copy):
    path = copy / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": FORMAT_VERSION + 1}))
    with pytest.raises(
        CheckpointError, match=rf"format version {FORMAT_VERSION + 1}, this jaxserve reads {FORMAT_VERSION}\. Convert the source again"
    ):
        open_checkpoint(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format_version": 1}'])
def test_damaged_manifest(copy, text):
    (copy / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(copy)


def test_manifest_that_is_no_text(copy):
    (copy / "manifest.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(copy)


def test_damaged_array(copy):
    checkpoint = open_checkpoint(copy)
    chunk = copy / "weights" / "state" / "norm.weight" / "c" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"norm\.weight cannot be read"):
        checkpoint.read("norm.weight")
    chunk.unlink()
    with pytest.raises(CheckpointError, match=r"norm\.weight cannot be read"):  # and not zeros
        checkpoint.read("norm.weight")
    shutil.rmtree(chunk.parents[1])
    with pytest.raises(CheckpointError, match=r"norm\.weight cannot be read"):
        checkpoint.read("norm.weight")
    assert checkpoint.read("embed_tokens.weight").shape == (320, 32)
    with pytest.raises(KeyError):
        checkpoint.read("no.such.tensor")


def test_array_of_another_shape_than_the_manifest(copy):
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tensors"]["norm.weight"]["shape"] = [16]
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest says float32 \[16\]"):
        open_checkpoint(copy).read("norm.weight")


def test_end_tokens_are_united(copy):
    def write(name, **values):
        path = copy / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    write("config.json", eos_token_id=[1, 7])
    write("generation_config.json", eos_token_id=9)
    write("tokenizer_config.json", eos_token="<|im_end|>")
    assert open_checkpoint(copy).eos_token_ids == {1, 3, 7, 9}
    write("tokenizer_config.json", eos_token={"content": "!"}, added_tokens_decoder={})
    assert open_checkpoint(copy).eos_token_ids == {1, 4, 7, 9}


def test_end_tokens_without_any(copy):
    for name in ("config.json", "tokenizer_config.json"):
        path = copy / name
        path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if not key.startswith("eos")}))
    (copy / "generation_config.json").unlink()
    checkpoint = open_checkpoint(copy)
    assert checkpoint.eos_token_ids == frozenset() and checkpoint.generation_config == {}


def test_number_of_token_ids(copy):
    assert open_checkpoint(copy).num_token_ids == 320
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {"330": {"content": "<tool>"}}}))
    assert open_checkpoint(copy).num_token_ids == 331
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": 340, "content": "<more>"})
    tokenizer["model"] = {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert open_checkpoint(copy).num_token_ids == 341
    (copy / "tokenizer.json").unlink()
    assert open_checkpoint(copy).num_token_ids is None


def test_reading_loads_no_jax(copy):
    code = f"""
import sys
from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint_report import describe
from jaxserve.convert import convert
open_checkpoint({str(copy)!r}).read("norm.weight"), describe({str(copy)!r})
assert "jax" not in sys.modules and "orbax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_description(converted):
    text = "\n".join(describe(converted("llama3-rope-gguf-q4_k_m")))
    parts = ("model-Q4_K_M.gguf", "sha256", "LlamaForCausalLM", "8 heads of 32", "stored divisors", "tied head", "[1]")
    for part in (f"version {FORMAT_VERSION}", *parts):
        assert part in text
    assert "layers.*.self_attn.q_proj.weight  float32 [256, 256]" in text
    many = "\n".join(describe(converted("llama-bias")))
    assert "layers.*.mlp.up_proj.bias  float32 [64] x 2  512 B" in many


def test_tensors_are_writable_arrays(converted):
    # The loader may fuse in place.
    value = open_checkpoint(converted("llama-bias")).read("norm.weight")
    assert isinstance(value, np.ndarray) and value.flags.writeable and value.flags.c_contiguous


def test_paths_that_go_up_first(golden_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert(golden_dir / "llama3-rope", "../there")
    assert open_checkpoint("../there").read("norm.weight").ndim == 1
