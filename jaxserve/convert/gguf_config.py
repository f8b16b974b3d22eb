"""From GGUF metadata to a Hugging Face config, for each architecture that is read.

A metadata key that is not understood is an error: it may change what the model computes. Knows nothing of tensors (`gguf_names.py`) nor
of files (`gguf_file.py`); who uses this is `read_gguf.py`. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; what
llama.cpp fixes for an architecture without writing it is said where it is filled in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""What each rotary frequency is divided by: always, in long contexts, in short ones."""

# Known, and without a meaning for the computation.
_WITHOUT_MEANING = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}

# Layers of the largest Gemma 2 and 3, whose scores llama.cpp scales by D / N in place of H.
_NUM_LAYERS_27B = {"gemma2": 46, "gemma3": 62}


class _Keys:
    """Reads the architecture's keys and remembers which were asked for."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        prefix = architecture + "."
        self.architecture = architecture
        self._values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        self._read: set[str] = set(_WITHOUT_MEANING)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.get_each(key, default)
        if isinstance(value, list):
            # Per-layer values are allowed by the format; layers of these architectures are alike.
            if len(set(value)) != 1:
                raise CheckpointError(f"GGUF metadata: {self.architecture}.{key} differs between layers ({value}), which is not supported.")
            value = value[0]
        # Floats are stored in 32 bits; their shortest decimal form is what the original config said.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def get_each(self, key: str, default: Any = None) -> Any:
        """The value as it is, which may be a list with one for each layer."""
        self._read.add(key)
        return self._values.get(key, default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"GGUF metadata: {self.architecture}.{key} is missing.")
        return value

    def unread(self) -> list[str]:
        return sorted(set(self._values) - self._read)


def hugging_face_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_tensors: Mapping[str, list[float]]
) -> dict[str, Any]:
    """The `config.json` of a GGUF file.

    Args:
        metadata: All metadata of the file.
        shapes: Shapes of the file's other tensors by their GGUF names.
        rope_tensors: Values of those of `ROPE_TENSORS` that the file has.

    Raises:
        CheckpointError: An unknown architecture, a missing key, or one that cannot be honoured exactly.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(_ARCHITECTURES)}.")
    if "token_embd.weight" not in shapes:
        raise CheckpointError("GGUF tensor token_embd.weight is missing.")
    keys = _Keys(metadata, architecture)
    config = _common(keys, shapes, rope_tensors)
    config |= _ARCHITECTURES[architecture](keys, config, shapes)
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if (value := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = value
    if unread := keys.unread():
        names = ", ".join(f"{architecture}.{key}" for key in unread)
        raise CheckpointError(f"GGUF metadata: {names} is not supported, and may change what the model computes.")
    return config


def _common(keys: _Keys, shapes: Mapping[str, tuple[int, ...]], rope_tensors: Mapping[str, list[float]]) -> dict[str, Any]:
    """What every architecture has."""
    hidden_size, num_heads = keys.need("embedding_length"), keys.need("attention.head_count")
    head_dim = keys.get("attention.key_length", hidden_size // num_heads)
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"GGUF metadata: {keys.architecture}.attention.key_length and value_length differ, which is not supported.")
    context_length = keys.need("context_length")
    rope = _rope_parameters(keys, context_length, rope_tensors)
    rotary_dim = keys.get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    return {
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
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _rope_parameters(keys: _Keys, context_length: int, tensors: Mapping[str, list[float]]) -> dict[str, Any]:
    params: dict[str, Any] = {"rope_type": "default", "rope_theta": float(keys.get("rope.freq_base", 10000.0))}
    kind = keys.get("rope.scaling.type")
    # The older form of linear scaling is a key of its own.
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
    # Phi 3 says it although it may not scale.
    original = keys.get("rope.scaling.original_context_length")
    divisors, long, short = (tensors.get(name) for name in ROPE_TENSORS)
    if long is not None and short is not None and kind in (None, "none", "longrope") and original is not None:
        params |= {"rope_type": "longrope", "long_factor": long, "short_factor": short, "original_max_position_embeddings": original}
        scale = context_length / original
        usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        given = keys.get("rope.scaling.attn_factor")
        if given is not None and not math.isclose(given, usual, rel_tol=1e-6):
            params["attention_factor"] = given
        kind = "longrope"
    elif long is not None or short is not None:
        raise CheckpointError(
            f"GGUF: {ROPE_TENSORS[1]} and {ROPE_TENSORS[2]} need each other and "
            f"{keys.architecture}.rope.scaling.original_context_length, and no other rope.scaling.type."
        )
    elif kind == "linear" or (kind is None and factor != 1.0):
        params |= {"rope_type": "linear", "factor": factor}
        kind = "linear"
    elif kind == "yarn":
        length = keys.need("rope.scaling.original_context_length")
        params |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    elif kind not in (None, "none"):
        raise CheckpointError(
            f"GGUF metadata: {keys.architecture}.rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn, and "
            f"longrope with its tensors."
        )
    if divisors is not None and any(divisor != 1.0 for divisor in divisors):
        if params["rope_type"] != "default":
            raise CheckpointError(f"GGUF: {ROPE_TENSORS[0]} together with {keys.architecture}.rope.scaling.type {kind!r} is not supported.")
        params["freq_divisors"] = divisors
    return params


def _llama(keys: _Keys, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Llama and Mistral; with experts it is Mixtral."""
    num_experts, num_used = keys.get("expert_count", 0), keys.get("expert_used_count", 0)
    if num_experts:
        name = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
        return name | {"num_local_experts": num_experts, "num_experts_per_tok": num_used}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }


def _qwen2(keys: _Keys, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False, "sliding_window": None}


def _qwen3(keys: _Keys, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    name = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False, "sliding_window": None}
    return name | {"attention_bias": "blk.0.attn_q.bias" in shapes}


def _qwen3moe(keys: _Keys, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """llama.cpp makes the chosen experts' shares add up to one, and every layer is a mixture."""
    return _qwen3(keys, config, shapes) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(keys: _Keys, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}


def _gemma2(keys: _Keys, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(keys.architecture, config),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
        "sliding_window": keys.get("attention.sliding_window", 4096),
        **_layer_types(keys, config, pattern=2),
    }


def _gemma3(keys: _Keys, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Windowed layers have a rotary embedding of their own, which is not scaled."""
    local = {"rope_type": "default", "rope_theta": float(keys.get("rope.freq_base_swa", 10000.0))}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(keys.architecture, config),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "sliding_window": keys.get("attention.sliding_window"),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        **_layer_types(keys, config, pattern=6),
    }


def _phi3(keys: _Keys, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """A window of 0 is none."""
    window = keys.get("attention.sliding_window") or None
    name = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": window}
    original = keys.get("rope.scaling.original_context_length")
    return name | ({} if original is None else {"original_max_position_embeddings": original})


def _query_scalar(architecture: str, config: Mapping[str, Any]) -> int:
    """Scores are scaled by its square root; no key says it."""
    is_largest = config["num_hidden_layers"] == _NUM_LAYERS_27B[architecture]
    return int(config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"])


def _layer_types(keys: _Keys, config: Mapping[str, Any], pattern: int) -> dict[str, Any]:
    """Which layers have a window: all but every `pattern`-th, unless the file says otherwise."""
    given = keys.get_each("attention.sliding_window_pattern", pattern)
    num_layers = config["num_hidden_layers"]
    is_sliding = given if isinstance(given, list) else [(i + 1) % given != 0 for i in range(num_layers)]
    return {"layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in is_sliding]}


_ARCHITECTURES: dict[str, Callable[[_Keys, Mapping[str, Any], Mapping[str, tuple[int, ...]]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}


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
