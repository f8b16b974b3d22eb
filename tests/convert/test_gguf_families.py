"""GGUF files of every architecture that is read: the same spec and tensors as the safetensors they were made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.convert.gguf_config import hugging_face_config
from jaxserve.convert.match import match_tensors
from jaxserve.convert.read_gguf import read_gguf
from jaxserve.convert.read_safetensors import read_directory
from jaxserve.convert.source import Source
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import family_of, resolve_spec
from jaxserve.models.tensors import ignored_patterns, logical_tensors
from tests.convert.gguf_writer import write_gguf

# What llama.cpp fixes for an architecture, so that no file can say otherwise.
FIXED = {
    "llama-bias": {},
    "llama-linear-rope": {},
    "llama-tied-gqa3": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-moe": {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3-text": {
        "layer_types": ["sliding_attention"] * 4,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "phi3": {},
    "phi3-longrope": {},
}


def logical(source: Source) -> dict[str, np.ndarray]:
    """Every logical tensor of a source."""
    spec = resolve_spec(source.config)
    family = family_of(spec)
    pairs, _ = match_tensors(logical_tensors(family, spec), source.tensors, ignored_patterns(family, spec))
    return {wanted.name: tensor.read_rows(0, tensor.shape[0]) for wanted, tensor in pairs}


@pytest.mark.parametrize("name", FIXED)
def test_equals_the_safetensors(golden_dir: Path, tmp_path: Path, name: str):
    config = write_gguf(golden_dir / name, tmp_path / "model.gguf", changes=FIXED[name])
    source = read_gguf(tmp_path / "model.gguf")
    assert resolve_spec(source.config) == resolve_spec(config)
    original = read_directory(golden_dir / name)
    wanted = logical(Source("safetensors", original.files, config, original.tensors, {}))
    got = logical(source)
    assert got.keys() == wanted.keys()
    is_offset = config["architectures"][0].startswith("Gemma")
    for key, array in wanted.items():
        # One is added and taken away again, so what the sum cannot hold of a weight is lost, in the original program as well.
        expected = (array + np.float32(1)) - np.float32(1) if is_offset and key.endswith("norm.weight") else array
        np.testing.assert_array_equal(got[key], expected, err_msg=key)
    expected = json.loads((golden_dir / name / "tokenizer.json").read_text())["model"]["vocab"]
    assert json.loads(source.small_files["tokenizer.json"])["model"]["vocab"] == expected


def test_quantized_experts_are_taken_apart(golden_dir: Path, tmp_path: Path):
    # hidden and intermediate sizes of 32 and 40; blocks are of 32, so the inputs of w2 are widened.
    folder = tmp_path / "source"
    folder.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_bytes((golden_dir / "mixtral" / file).read_bytes())
    weights = load_file(golden_dir / "mixtral" / "model.safetensors")
    wide = {n: np.pad(w, ((0, 0), (0, 24))) if ".w2." in n else np.pad(w, ((0, 24), (0, 0))) if ".w1." in n or ".w3." in n else w
            for n, w in weights.items()}  # fmt: skip
    save_file(wide, folder / "model.safetensors")
    write_gguf(folder, tmp_path / "model.gguf", changes={"intermediate_size": 64}, dtype="Q8_0")
    got = logical(read_gguf(tmp_path / "model.gguf"))
    for e in range(4):
        for ours, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
            array = wide[f"model.layers.1.block_sparse_moe.experts.{e}.{theirs}.weight"]
            expected = gguf.dequantize(gguf.quantize(array, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)
            np.testing.assert_array_equal(got[f"layers.1.mlp.experts.{e}.{ours}.weight"], expected)


BASE = {"context_length": 128, "embedding_length": 64, "feed_forward_length": 96, "block_count": 12, "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-6}  # fmt: skip


def config_of(architecture: str, rope: dict[str, list[float]] | None = None, **changes) -> dict:
    values = {f"{architecture}.{key.replace('__', '.')}": value for key, value in (BASE | changes).items() if value is not None}
    return hugging_face_config({"general.architecture": architecture} | values, {"token_embd.weight": (320, 64)}, rope or {})


def test_gemma3_layers():
    config = config_of("gemma3", attention__sliding_window=32)
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11]
    assert config["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}
    config = config_of("gemma3", attention__sliding_window=32, attention__sliding_window_pattern=3, rope__freq_base_swa=500.0)
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [2, 5, 8, 11]
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 500.0
    config = config_of("gemma3", attention__sliding_window=32, attention__sliding_window_pattern=[True, False] * 6)
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [1, 3, 5, 7, 9, 11]


def test_largest_gemmas_scale_by_another_size():
    assert config_of("gemma2", attention__key_length=32, attention__value_length=32)["query_pre_attn_scalar"] == 32
    large = {"attention__key_length": 32, "attention__value_length": 32}
    assert config_of("gemma2", block_count=46, **large)["query_pre_attn_scalar"] == 16
    assert config_of("gemma3", block_count=62, **large)["query_pre_attn_scalar"] == 16


def test_phi3_window_and_attention_factor():
    assert config_of("phi3", attention__sliding_window=0)["sliding_window"] is None
    assert config_of("phi3", attention__sliding_window=2047)["sliding_window"] == 2047
    rope = {"rope_factors_long.weight": [2.0] * 8, "rope_factors_short.weight": [1.0] * 8}
    config = config_of("phi3", rope, rope__scaling__original_context_length=64, rope__scaling__attn_factor=1.5)
    assert config["rope_parameters"]["attention_factor"] == 1.5


@pytest.mark.parametrize(
    ("architecture", "rope", "changes", "match"),
    [
        ("bert", {}, {}, "architecture 'bert' is not supported; supported: llama, qwen2, qwen3, qwen3moe, gemma, gemma2, gemma3, phi3"),
        ("gemma3", {}, {"attention__temperature_scale": 0.1}, r"gemma3\.attention\.temperature_scale is not supported, and may change"),
        ("qwen2", {}, {"attention__sliding_window": 512}, r"qwen2\.attention\.sliding_window is not supported"),
        ("qwen3", {}, {"attention__head_count_kv": [1, 2]}, r"qwen3\.attention\.head_count_kv differs between layers"),
        ("qwen3moe", {}, {}, r"qwen3moe\.expert_count is missing"),
        ("phi3", {"rope_factors_long.weight": [2.0]}, {"rope__scaling__original_context_length": 64}, "need each other"),
        ("qwen2", {}, {"expert_count": 8}, r"qwen2\.expert_count is not supported"),
    ],
)
def test_what_cannot_be_honoured(architecture, rope, changes, match):
    with pytest.raises(CheckpointError, match=match):
        config_of(architecture, rope, **changes)


def test_unknown_tensor_is_named(golden_dir: Path, tmp_path: Path):
    write_gguf(golden_dir / "qwen3", tmp_path / "model.gguf")
    source = read_gguf(tmp_path / "model.gguf")
    extra = replace(source.tensors["model.norm.weight"], name="blk.0.attn_sinks.weight")
    with pytest.raises(CheckpointError, match=r"1 unexpected: blk\.0\.attn_sinks\.weight"):
        logical(replace(source, tensors={**source.tensors, extra.name: extra}))
