"""Llama 1 to 3, and Mistral and Ministral: pre-norm RMS layers, grouped-query attention with RoPE, gated MLP.

The same network for all of them; Mistral's first models see a window. SmolLM2, Yi, Vicuna and many more call themselves Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config
from jaxserve.models.spec import Family, LayerSpec, ModelSpec, NormSpec

_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip
_MISTRAL = _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "MinistralForCausalLM": "ministral"}


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' LlamaConfig, MistralConfig or MinistralConfig."""
    architecture = next((a for a, t in ARCHITECTURES.items() if a in (values.get("architectures") or ()) or _is_silent(values, t)), "")
    is_llama = architecture == "LlamaForCausalLM"
    config = Config(values, _LLAMA if is_llama else _MISTRAL)
    has_bias = is_llama and config.flag("attention_bias")
    windows = [None] * config.num_layers if is_llama else config.windows(lambda i: True)
    rope, mlp = config.rope(), config.mlp(has_bias=is_llama and config.flag("mlp_bias"))
    layers = [
        LayerSpec(attention=config.attention(rope, has_qkv_bias=has_bias, has_out_bias=has_bias, window=window), mlp=mlp)
        for window in windows
    ]
    return config.model("llama", architecture, layers, NormSpec(config.number("rms_norm_eps")))


def _is_silent(values: Mapping[str, Any], model_type: str) -> bool:
    return not values.get("architectures") and values.get("model_type") == model_type


LLAMA = Family(name="llama", architectures=ARCHITECTURES, resolve=resolve, names=lambda spec: LLAMA_NORMS)
