"""Qwen2, Qwen2.5 and Qwen3, dense: Llama's network with biases on queries, keys and values (2), or normalized queries and keys (3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config
from jaxserve.models.spec import Family, LayerSpec, ModelSpec, NormSpec, QKNormSpec

_DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip


def windows_of(config: Config) -> list[int | None]:
    """The window of every layer: those from `max_window_layers` on have one, where windows are on at all."""
    if not config.flag("use_sliding_window"):
        return [None] * config.num_layers
    first = config.values["max_window_layers"]
    return config.windows(lambda i: i >= first)


def resolve_qwen2(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Qwen2Config."""
    config = Config(values, _DEFAULTS)
    rope, mlp = config.rope(), config.mlp()
    layers = [LayerSpec(attention=config.attention(rope, has_qkv_bias=True, window=window), mlp=mlp) for window in windows_of(config)]
    return config.model("qwen2", "Qwen2ForCausalLM", layers, NormSpec(config.number("rms_norm_eps")))


def resolve_qwen3(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Qwen3Config."""
    config = Config(values, _DEFAULTS | {"head_dim": 128})
    norm, has_bias = NormSpec(config.number("rms_norm_eps")), config.flag("attention_bias")
    options = {"has_qkv_bias": has_bias, "has_out_bias": has_bias, "qk_norm": QKNormSpec(norm=norm)}
    rope, mlp = config.rope(), config.mlp()
    layers = [LayerSpec(attention=config.attention(rope, window=window, **options), mlp=mlp) for window in windows_of(config)]
    return config.model("qwen3", "Qwen3ForCausalLM", layers, norm)


QWEN2 = Family(name="qwen2", architectures={"Qwen2ForCausalLM": "qwen2"}, resolve=resolve_qwen2, names=lambda spec: LLAMA_NORMS)
QWEN3 = Family(name="qwen3", architectures={"Qwen3ForCausalLM": "qwen3"}, resolve=resolve_qwen3, names=lambda spec: LLAMA_NORMS)
