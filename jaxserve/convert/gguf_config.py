"""From GGUF metadata to a Hugging Face config, and from GGUF tensor names to Hugging Face names, for the llama architecture.

A metadata key that is not understood is an error: it may change what the model computes. Knows nothing of files and quantization
(`gguf_file.py`); who uses this is `read_gguf.py`. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError

ROPE_FREQS = "rope_freqs.weight"
"""Each rotary frequency is divided by it."""

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Known, and without a meaning for the computation (or checked to have none by their value).
_WITHOUT_MEANING = {"vocab_size", "expert_count", "expert_used_count", "tensor_data_layout", "rope.scaling.finetuned"}


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name that is not known stays as it is."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}"
    return name


class _Keys:
    """Reads the architecture's keys and remembers which were asked for."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str) -> None:
        self._values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        self._read: set[str] = set(_WITHOUT_MEANING)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        value = self._values.get(key, default)
        if isinstance(value, list):
            # Per-layer values are allowed by the format; layers of this architecture are alike.
            if len(set(value)) != 1:
                raise CheckpointError(f"GGUF metadata: llama.{key} differs between layers ({value}), which is not supported.")
            return value[0]
        # Floats are stored in 32 bits; their shortest decimal form is what the original config said.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"GGUF metadata: llama.{key} is missing.")
        return value

    def unread(self) -> list[str]:
        return sorted(set(self._values) - self._read)


def llama_config(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], freq_divisors: list[float]) -> dict[str, Any]:
    """The `config.json` of a GGUF file.

    Args:
        metadata: All metadata of the file.
        shapes: Shapes of the file's tensors by their GGUF names.
        freq_divisors: Values of `rope_freqs.weight`; empty where the file has none.

    Raises:
        CheckpointError: Another architecture, a missing key, or one that cannot be honoured exactly.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"GGUF architecture {architecture!r} is not supported; supported: llama.")
    keys = _Keys(metadata, "llama.")
    if metadata.get("llama.expert_count"):
        raise CheckpointError(f"GGUF metadata: llama.expert_count {metadata['llama.expert_count']} (mixture of experts) is not supported.")
    if "token_embd.weight" not in shapes:
        raise CheckpointError("GGUF tensor token_embd.weight is missing.")
    hidden_size, num_heads = keys.need("embedding_length"), keys.need("attention.head_count")
    head_dim = keys.get("attention.key_length", hidden_size // num_heads)
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise CheckpointError("GGUF metadata: llama.attention.key_length and value_length differ, which is not supported.")
    context_length = keys.need("context_length")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.need("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context_length,
        "rope_parameters": _rope_parameters(keys, freq_divisors),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    rotary_dim = keys.get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["rope_parameters"]["partial_rotary_factor"] = rotary_dim / head_dim
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if (value := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = value
    if unread := keys.unread():
        raise CheckpointError(f"GGUF metadata: llama.{', llama.'.join(unread)} is not supported, and may change what the model computes.")
    return config


def _rope_parameters(keys: _Keys, freq_divisors: list[float]) -> dict[str, Any]:
    params: dict[str, Any] = {"rope_type": "default", "rope_theta": float(keys.get("rope.freq_base", 10000.0))}
    kind = keys.get("rope.scaling.type")
    # The older form of linear scaling is a key of its own.
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
    if kind is None:
        kind = "none" if factor == 1.0 else "linear"
    if kind == "linear":
        params |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        params |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": keys.need("rope.scaling.original_context_length"),
        }
    elif kind == "none":
        keys.get("rope.scaling.original_context_length")
    else:
        raise CheckpointError(f"GGUF metadata: llama.rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn.")
    if any(divisor != 1.0 for divisor in freq_divisors):
        if kind != "none":
            raise CheckpointError(f"GGUF: {ROPE_FREQS} together with llama.rope.scaling.type {kind!r} is not supported.")
        params["freq_divisors"] = freq_divisors
    return params


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The `generation_config.json`: begin, pad, and every id that ends a text (end of sequence, end of turn)."""
    config: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (value := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = value
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    known = list(dict.fromkeys(value for value in ends if value is not None))
    if known:
        config["eos_token_id"] = known if len(known) > 1 else known[0]
    return config
