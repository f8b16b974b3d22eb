"""Writes golden checkpoints as GGUF files, as llama.cpp's convert_hf_to_gguf.py does for each architecture.

Written from what that script does, not from our reader: tensor names are those of the `gguf` package's own map.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MixtralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe", "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}  # fmt: skip


def write_gguf(source: Path, path: Path, *, changes: dict[str, Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    """Writes the checkpoint `source` with `changes` in its config; returns that config. Matrices are stored as `dtype`."""
    config = json.loads((source / "config.json").read_text()) | (changes or {})
    weights = {name: array for file in source.glob("model*.safetensors") for name, array in load_file(file).items()}
    arch = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, arch)
    write_keys(writer, arch, config)
    write_tokenizer(writer, json.loads((source / "tokenizer.json").read_text()), config)
    kind = gguf.GGMLQuantizationType[dtype]
    for name, array in tensors_of(arch, config, weights).items():
        is_quantized = array.ndim > 1 and kind != gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(array, kind) if is_quantized else array, raw_dtype=kind if is_quantized else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


def write_keys(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(0)
    if arch not in ("gemma", "gemma2"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if arch == "llama":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    if arch != "phi3" and config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if arch == "phi3":
        write_phi3_keys(writer, config, rope)
    if arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if num_experts := config.get("num_local_experts", config.get("num_experts")):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch == "qwen3moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def write_phi3_keys(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any]) -> None:
    length, original = config["max_position_embeddings"], config["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim))
    writer.add_sliding_window(config["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        scale = length / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(True)


def tensors_of(arch: str, config: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    result: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, original in weights.items():
        array = original.astype(np.float32)
        if arch == "llama" and (match := re.search(r"\.([qk])_proj\.", name)):
            array = permute(array, config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = array
            continue
        result[new_name(names, name)] = array
    for name, stack in experts.items():
        result[new_name(names, name)] = np.stack([stack[i] for i in range(len(stack))])
    return result


def new_name(names: gguf.TensorNameMap, name: str) -> str:
    new = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert new is not None, name
    return new


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """LlamaModel.permute of convert_hf_to_gguf.py."""
    return weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
