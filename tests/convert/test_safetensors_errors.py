"""What is wrong with a Hugging Face directory is said before anything is written, and names the tensor or file."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint import open_checkpoint
from jaxserve.convert import convert
from jaxserve.convert.pipeline import Silent
from jaxserve.errors import CheckpointError


class Notes(Silent):
    def __init__(self):
        self.lines = []

    def note(self, line):
        self.lines.append(line)


@pytest.fixture
def source(broken):
    return broken("llama-bias")


def edit_config(source: Path, **changes: object) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(source: Path, change) -> None:
    path = source / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def fails(source: Path, match: str, **options: object) -> str:
    """Asserts that the conversion fails with the message and leaves nothing behind."""
    target = source.parent / "out" / "converted"
    with pytest.raises(CheckpointError, match=match) as caught:
        convert(source, target, **options)
    assert not target.parent.exists() or list(target.parent.iterdir()) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_directory_of_a_gguf_file(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "model-Q4_0.gguf").write_bytes(b"GGUF")
    fails(source, r"holds no config\.json; to convert a GGUF file, name it: \S+/model-Q4_0\.gguf")


def test_missing_tensor(source):
    edit_tensors(source, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    fails(source, r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight \[64, 32\]")


def test_wrong_shape(source):
    edit_tensors(source, lambda t: t.update({"model.norm.weight": np.zeros(33, np.float32)}))
    fails(source, r"model\.norm\.weight is \[33\], not \[32\]")


def test_unexpected_tensor(source):
    edit_tensors(source, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": np.zeros(8, np.float32)}))
    fails(source, r"1 unexpected: model\.layers\.0\.self_attn\.q_norm\.weight \[8\]")


def test_all_problems_are_named_at_once(source):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["extra"] = np.zeros(2, np.float32)
        tensors["model.embed_tokens.weight"] = np.zeros((1, 32), np.float32)

    edit_tensors(source, change)
    message = fails(source, "missing")
    assert "norm.weight" in message and "extra" in message and "model.embed_tokens.weight is [1, 32]" in message


def test_ignored_tensors_are_counted(source):
    def change(tensors):
        for i in range(2):
            tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)

    edit_tensors(source, change)
    notes = Notes()
    convert(source, source.parent / "converted", progress=notes)
    (ignored,) = open_checkpoint(source.parent / "converted").manifest.ignored
    assert (ignored.count, ignored.num_bytes) == (2, 32)
    assert any("left out on purpose: 2 tensors, 32 B" in line for line in notes.lines)


def test_head_beside_a_tied_one_is_left_out(broken):
    source = broken("llama-tied-gqa3")
    edit_tensors(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    convert(source, source.parent / "converted")
    manifest = open_checkpoint(source.parent / "converted").manifest
    assert "lm_head.weight" not in manifest.tensors and manifest.ignored[0].count == 1


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_multimodal_wrapper_is_its_text_model(broken, prefix):
    source = broken("llama-tied-gqa3")
    text = json.loads((source / "config.json").read_text())
    wrapper = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text, "vision_config": {}}
    (source / "config.json").write_text(json.dumps(wrapper))
    original = load_file(source / "model.safetensors")

    def change(tensors):
        for name in list(tensors):
            # Older wrappers hold the causal model, newer ones its body.
            tensors[prefix + (name if prefix == "language_model." else name.removeprefix("model."))] = tensors.pop(name)
        tensors["vision_tower.patch.weight"] = np.zeros((3, 3), np.float32)
        tensors["multi_modal_projector.linear_1.weight"] = np.zeros((3, 3), np.float32)

    edit_tensors(source, change)
    convert(source, source.parent / "converted")
    checkpoint = open_checkpoint(source.parent / "converted")
    assert {entry.source.removeprefix(prefix).removeprefix("model.") for entry in checkpoint.manifest.tensors.values()} == {
        name.removeprefix("model.") for name in original
    }
    assert sum(ignored.count for ignored in checkpoint.manifest.ignored) == 2
    np.testing.assert_array_equal(checkpoint.read("norm.weight"), original["model.norm.weight"])
    assert checkpoint.eos_token_ids == {1}


@pytest.mark.parametrize("size", [0, 4, 8, 100, 5000, -1])
def test_truncated_file(source, size):
    path = source / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:size])
    fails(source, "truncated")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (struct.pack("<Q", 1 << 60) + b"x" * 100, "header claims"),
        (struct.pack("<Q", 4) + b"nope", "corrupt header"),
        (struct.pack("<Q", 2) + b"[]", "corrupt header"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "corrupt header"),
    ],
)
def test_corrupt_header(source, content, match):
    (source / "model.safetensors").write_bytes(content)
    fails(source, match)


def test_offsets_that_do_not_fit_the_shape(source):
    text = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [32], "data_offsets": [0, 64]}}).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(128))
    fails(source, r"model\.norm\.weight .*needs 128 bytes")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_never_read(source, name):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (source / "exploded",))

    (source / "model.safetensors").unlink()
    (source / name).write_bytes(pickle.dumps(Bomb()))
    assert name in fails(source, "pickled weights .* can run code")
    fails(source / name, "pickled file")
    assert not (source / "exploded").exists()


def test_shard_that_is_not_there(broken):
    source = broken("llama-sharded")
    (source / "model-00002-of-00003.safetensors").unlink()
    fails(source, r"lacks 1 of 3 files .*: model-00002-of-00003\.safetensors")


def test_tensor_that_only_the_index_knows(broken):
    source = broken("llama-sharded")
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    fails(source, r"model\.ghost \(model-00001-of-00003\.safetensors\)")


def test_index_that_points_elsewhere(broken):
    source = broken("llama-sharded")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    fails(source, "file names of the same directory")


def test_no_config_no_weights_no_source(source):
    (source / "model.safetensors").unlink()
    fails(source, "holds neither model.safetensors nor model.safetensors.index.json, only expected.safetensors")
    (source / "adapter_config.json").write_text("{}")
    fails(source, "is a LoRA adapter")
    (source / "model.gguf").write_text("")
    fails(source, "to convert a GGUF file, name it: .*model.gguf")
    (source / "config.json").write_text("{")
    fails(source, r"config\.json cannot be read")
    (source / "config.json").unlink()
    fails(source, r"holds no config\.json")
    fails(source / "nothing" / "there", "does not exist")


def test_file_that_cannot_be_opened(source, monkeypatch):
    from jaxserve.convert import read_safetensors

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(read_safetensors, "read_header", refuse)
    fails(source, r"source cannot be read: .*Permission denied: .*model\.safetensors")


@pytest.mark.parametrize("content", ["{}", "[]", '{"model": ', ""])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_damaged_small_files(source, name, content):
    (source / name).write_text(content)
    if (name, content) in [("tokenizer_config.json", "{}"), ("generation_config.json", "{}")]:
        convert(source, source.parent / "empty, but whole")
    else:
        fails(source, name)


def test_unsupported_models(source):
    edit_config(source, architectures=["T5ForConditionalGeneration"])
    fails(source, "T5ForConditionalGeneration.*Supported architectures: .*LlamaForCausalLM")
    edit_config(source, architectures=["LlamaForCausalLM"], quantization_config={"quant_method": "gptq"})
    fails(source, r"quantized \(gptq\)")


def test_code_in_a_checkpoint_is_not_run(source):
    edit_config(source, auto_map={"AutoModelForCausalLM": "modeling_llama.Model"})
    (source / "modeling_llama.py").write_text("raise SystemExit('code was run')")
    convert(source, source.parent / "converted")
    assert not (source.parent / "converted" / "modeling_llama.py").exists()


def test_integer_weights_are_refused(source):
    edit_tensors(source, lambda t: t.update({"model.norm.weight": np.ones(32, np.int32)}))
    fails(source, r"model\.norm\.weight is stored as I32")


def test_float64_becomes_float32(source):
    edit_tensors(source, lambda t: t.update({"model.norm.weight": np.full(32, 0.1, np.float64)}))
    convert(source, source.parent / "converted")
    stored = open_checkpoint(source.parent / "converted").read("norm.weight")
    np.testing.assert_array_equal(stored, np.full(32, 0.1, np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype(broken, dtype):
    import ml_dtypes

    source = broken("llama-bf16" if dtype == "float32" else "llama-bias")
    convert(source, source.parent / "converted", dtype=dtype)
    checkpoint = open_checkpoint(source.parent / "converted")
    assert {entry.dtype for entry in checkpoint.manifest.tensors.values()} == {dtype}
    assert checkpoint.config["dtype"] == dtype
    if dtype != "float32":
        original = load_file(source / "model.safetensors")["model.norm.weight"]
        expected = original.astype(np.float16 if dtype == "float16" else ml_dtypes.bfloat16)
        np.testing.assert_array_equal(checkpoint.read("norm.weight"), expected)


def test_value_beyond_float16(source):
    edit_tensors(source, lambda t: t.update({"model.norm.weight": np.full(32, 1e5, np.float32)}))
    fails(source, r"model\.norm\.weight has values beyond float16", dtype="float16")


def test_existing_destination(source):
    target = source.parent / "converted"
    convert(source, target)
    with pytest.raises(CheckpointError, match="exists; --overwrite replaces it"):
        convert(source, target)
    edit_tensors(source, lambda t: t.update({"model.norm.weight": np.full(32, 2, np.float32)}))
    convert(source, target, overwrite=True)
    np.testing.assert_array_equal(open_checkpoint(target).read("norm.weight"), np.full(32, 2, np.float32))
    assert sorted(path.name for path in source.parent.iterdir()) == ["converted", "source"]
    with pytest.raises(CheckpointError, match="already converted"):
        convert(target, source.parent / "again")


def test_destination_that_appears_meanwhile(source, monkeypatch):
    target = source.parent / "converted"
    monkeypatch.setattr(os, "sync", target.mkdir)
    with pytest.raises(CheckpointError, match="exists; --overwrite"):
        convert(source, target)
    assert list(target.iterdir()) == []


def test_overwrite_spares_what_is_no_checkpoint(source):
    target = source.parent / "precious"
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="is not a converted checkpoint, so it is not overwritten"):
        convert(source, target, overwrite=True)
    assert (target / "thesis.txt").exists()


def test_disk_space_is_checked_first(source, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    fails(source, r"1000 B free, 16\.2 MiB are needed")


def test_failure_while_writing_leaves_nothing(source, monkeypatch):
    from jaxserve.convert import write_orbax

    def fail(item, piece):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write_orbax, "_cast", fail)
    fails(source, "No space left on device")
