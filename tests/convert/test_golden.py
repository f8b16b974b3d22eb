"""Golden checkpoints convert: tensors equal to an independent reader's, fused ones taken apart, GGUF by the logits it must give."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from jaxserve.checkpoint import open_checkpoint
from jaxserve.models.registry import family_of, resolve_spec
from jaxserve.models.tensors import logical_tensors

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
DIRECTORIES = sorted(path.name for path in GOLDEN.glob("llama*") if path.name != "llama4-text" and (path / "config.json").exists())
GGUF = sorted(path.parent.name for path in GOLDEN.glob("*/*.gguf"))


def source_tensors(name: str) -> dict[str, np.ndarray]:
    source = {}
    for file in (GOLDEN / name).glob("model*.safetensors"):
        with safe_open(file, framework="numpy") as opened:
            source |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    return source


@pytest.mark.parametrize("name", DIRECTORIES)
def test_tensors_equal_the_source(name, converted):
    checkpoint = open_checkpoint(converted(name))
    source, entries = source_tensors(name), checkpoint.manifest.tensors
    assert sorted(entry.source for entry in entries.values()) == sorted(source)
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    for key, entry in entries.items():
        stored, value = checkpoint.read(key), source[entry.source]
        assert key == re.sub("input_layernorm|post_attention_layernorm", lambda m: norms[m[0]], entry.source.removeprefix("model."))
        assert stored.dtype == value.dtype and stored.shape == value.shape
        np.testing.assert_array_equal(stored.view(np.uint8), value.view(np.uint8))


FUSED = {
    # Rows: queries, keys, values; gate, up.
    ("phi3", "layers.1.self_attn.q_proj.weight"): ("model.layers.1.self_attn.qkv_proj.weight", lambda w: w[:32]),
    ("phi3", "layers.1.self_attn.v_proj.weight"): ("model.layers.1.self_attn.qkv_proj.weight", lambda w: w[-16:]),
    ("phi3", "layers.0.mlp.up_proj.weight"): ("model.layers.0.mlp.gate_up_proj.weight", lambda w: w[w.shape[0] // 2 :]),
    # The input axis first; thirds of the columns.
    ("gpt2", "layers.0.self_attn.k_proj.weight"): ("transformer.h.0.attn.c_attn.weight", lambda w: np.split(w, 3, 1)[1].T),
    ("gpt2", "layers.0.self_attn.k_proj.bias"): ("transformer.h.0.attn.c_attn.bias", lambda b: np.split(b, 3)[1]),
    ("gpt2", "layers.1.mlp.down_proj.weight"): ("transformer.h.1.mlp.c_proj.weight", lambda w: w.T),
    # Each of 2 heads' query, key and value together.
    ("gpt-neox", "layers.1.self_attn.v_proj.weight"): (
        "gpt_neox.layers.1.attention.query_key_value.weight",
        lambda w: np.concatenate([head[2 * len(head) // 3 :] for head in np.split(w, 2)]),
    ),
    # One tensor of all experts, the input axis first, gate and up in turns.
    ("gpt-oss", "layers.1.mlp.experts.2.up_proj.weight"): ("model.layers.1.mlp.experts.gate_up_proj", lambda w: w[2, :, 1::2].T),
    ("gpt-oss", "layers.1.mlp.experts.3.gate_proj.bias"): ("model.layers.1.mlp.experts.gate_up_proj_bias", lambda b: b[3, ::2]),
    ("gpt-oss", "layers.0.mlp.experts.1.down_proj.weight"): ("model.layers.0.mlp.experts.down_proj", lambda w: w[1].T),
    ("granitemoe", "layers.0.mlp.experts.3.up_proj.weight"): (
        "model.layers.0.block_sparse_moe.input_linear.weight",
        lambda w: w[3, w.shape[1] // 2 :],
    ),
}
"""(folder, logical name): the source tensor, and the part of it that must be there."""


@pytest.mark.parametrize(("name", "key"), FUSED, ids=lambda value: value)
def test_fused_tensors_are_taken_apart(name, key, converted):
    checkpoint, (source, part) = open_checkpoint(converted(name)), FUSED[name, key]
    assert checkpoint.manifest.tensors[key].source == source
    np.testing.assert_array_equal(checkpoint.read(key), part(source_tensors(name)[source]))


@pytest.mark.parametrize("name", DIRECTORIES)
def test_small_files_are_copied(name, converted):
    path = converted(name)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (path / file).read_bytes() == (GOLDEN / name / file).read_bytes()
    assert json.loads((path / "config.json").read_text()) == json.loads((GOLDEN / name / "config.json").read_text())


@pytest.mark.parametrize("name", GGUF)
def test_gguf_gives_the_golden_logits(name, converted):
    # The rows of q and k, the rope divisors and the dequantization are right together or the logits are wrong.
    checkpoint = open_checkpoint(converted(name))
    weights = {key: checkpoint.read(key).astype(np.float32) for key in checkpoint.names}
    expected = json.loads((GOLDEN / name / "expected.json").read_text())
    logits = load_file(GOLDEN / name / "expected.safetensors")
    for i, prompt in enumerate(expected["prompts"]):
        np.testing.assert_allclose(llama_logits(weights, checkpoint.config, prompt), logits[f"logits_{i}"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", GGUF)
def test_gguf_tokenizer_gives_the_golden_ids(name, converted):
    path = converted(name)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    original = Tokenizer.from_file(str(GOLDEN / name / "tokenizer.json"))
    expected = json.loads((GOLDEN / name / "expected.json").read_text())["tokenizer"]
    for text, ids in zip(expected["texts"], expected["ids"], strict=True):
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == original.decode(ids, skip_special_tokens=True)
    assert tokenizer.encode("a<|im_end|>").ids == original.encode("a<|im_end|>").ids
    config = json.loads((path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<s>", "</s>", "<pad>")
    assert open_checkpoint(path).eos_token_ids == {1}


def test_manifest_tells_where_it_came_from(converted):
    import hashlib

    manifest = open_checkpoint(converted("llama-sharded")).manifest
    files = sorted((GOLDEN / "llama-sharded").glob("model-*.safetensors"))
    assert [(file.name, file.sha256) for file in manifest.source_files] == [
        (file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files
    ]
    assert manifest.quantization == "none" and manifest.layout == "logical" and manifest.dtype == "float32"
    assert manifest.num_tensors == len(manifest.tensors) == 21
    assert manifest.num_parameters * 4 == manifest.num_bytes == sum(entry.num_bytes for entry in manifest.tensors.values())


def test_half_precision_is_kept(converted):
    assert open_checkpoint(converted("llama-bf16")).manifest.dtype == "bfloat16"
    assert open_checkpoint(converted("llama-fp16")).manifest.dtype == "float16"
    assert open_checkpoint(converted("llama3-rope-gguf-f16")).manifest.dtype == "float16"
    assert open_checkpoint(converted("llama3-rope-gguf-q8_0")).manifest.dtype == "float32"


def test_orbax_restores_the_whole_tree(converted):
    import orbax.checkpoint.experimental.v1 as ocp

    path = converted("llama3-rope")
    checkpoint = open_checkpoint(path)
    tree = ocp.load(path / "weights")
    assert set(tree) == set(checkpoint.names)
    for name in checkpoint.names:
        np.testing.assert_array_equal(np.asarray(tree[name]), checkpoint.read(name))


@pytest.mark.parametrize("name", [name for name in DIRECTORIES if (GOLDEN / name / "config.legacy.json").exists()])
def test_both_config_spellings_name_the_same_tensors(name):
    specs = [resolve_spec(json.loads((GOLDEN / name / file).read_text())) for file in ("config.json", "config.legacy.json")]
    assert specs[0] == specs[1]
    assert logical_tensors(family_of(specs[0]), specs[0]) == logical_tensors(family_of(specs[1]), specs[1])


def llama_logits(weights: dict[str, np.ndarray], config: dict, token_ids: list[int]) -> np.ndarray:
    """The llama network in NumPy, for default RoPE with stored divisors: the reference of this file."""
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    count = len(token_ids)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[name]

    rope = config["rope_parameters"]
    frequencies = rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim) / np.array(rope["freq_divisors"])
    angles = np.tile(np.arange(count)[:, None] * frequencies, 2)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotate(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate([-second, first], -1) * sin

    x = weights["embed_tokens.weight"][token_ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}."
        h = norm(x, layer + "attention_norm.weight")
        q, k, v = (h @ weights[f"{layer}self_attn.{p}_proj.weight"].T for p in "qkv")
        q, k, v = rotate(q.reshape(count, heads, dim)), rotate(k.reshape(count, kv_heads, dim)), v.reshape(count, kv_heads, dim)
        k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(dim)
        scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        attended = np.einsum("nts,snh->tnh", scores, v).reshape(count, -1)
        x = x + attended @ weights[layer + "self_attn.o_proj.weight"].T
        h = norm(x, layer + "mlp_norm.weight")
        gate = h @ weights[layer + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ weights[layer + "mlp.up_proj.weight"].T)) @ weights[layer + "mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    return (norm(x, "norm.weight") @ head.T).astype(np.float32)
