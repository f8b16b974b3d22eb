"""Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE: the dense networks with a mixture of experts in most layers; a shared expert in the older ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config
from jaxserve.models.families.qwen import windows_of
from jaxserve.models.spec import Family, LayerSpec, MLPSpec, ModelSpec, MoESpec, NormSpec, QKNormSpec

_SHARED = {
    "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "sliding_window": 4096, "max_window_layers": 28, "decoder_sparse_step": 1,
}  # fmt: skip
_QWEN2 = _SHARED | {
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60, "qkv_bias": True,
}  # fmt: skip
_QWEN3 = _SHARED | {
    "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
    "num_experts": 128,
}  # fmt: skip
NAMES = LLAMA_NORMS | {"layers.{i}.mlp.router.weight": "layers.{i}.mlp.gate.weight"}


def mlps_of(config: Config, moe: MoESpec) -> list[MLPSpec | MoESpec]:
    """The MLP of every layer: dense where the config says so."""
    dense, step = set(config.values.get("mlp_only_layers") or ()), config.size("decoder_sparse_step")
    mlp = config.mlp()
    return [moe if i not in dense and (i + 1) % step == 0 else mlp for i in range(config.num_layers)]


def resolve_qwen2(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Qwen2MoeConfig."""
    config = Config(values, _QWEN2)
    shared = config.size("shared_expert_intermediate_size")
    moe = config.moe(is_normalized=config.flag("norm_topk_prob"), shared_size=shared, has_shared_gate=True)
    rope, has_bias = config.rope(), config.flag("qkv_bias")
    layers = [
        LayerSpec(attention=config.attention(rope, has_qkv_bias=has_bias, window=window), mlp=mlp)
        for window, mlp in zip(windows_of(config), mlps_of(config, moe), strict=True)
    ]
    return config.model("qwen2_moe", "Qwen2MoeForCausalLM", layers, NormSpec(config.number("rms_norm_eps")))


def resolve_qwen3(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Qwen3MoeConfig."""
    config = Config(values, _QWEN3, {"num_experts": "num_local_experts"})
    norm, has_bias, rope = NormSpec(config.number("rms_norm_eps")), config.flag("attention_bias"), config.rope()
    # transformers' Qwen3MoeConfig: its windows, where they are on at all, are those of every layer.
    windows = config.windows(lambda i: True) if config.flag("use_sliding_window") else [None] * config.num_layers
    moe = config.moe(is_normalized=config.flag("norm_topk_prob"))
    options = {"has_qkv_bias": has_bias, "has_out_bias": has_bias, "qk_norm": QKNormSpec(norm=norm)}
    layers = [
        LayerSpec(attention=config.attention(rope, window=window, **options), mlp=mlp)
        for window, mlp in zip(windows, mlps_of(config, moe), strict=True)
    ]
    return config.model("qwen3_moe", "Qwen3MoeForCausalLM", layers, norm)


QWEN2_MOE = Family(name="qwen2_moe", architectures={"Qwen2MoeForCausalLM": "qwen2_moe"}, resolve=resolve_qwen2, names=lambda spec: NAMES)
QWEN3_MOE = Family(name="qwen3_moe", architectures={"Qwen3MoeForCausalLM": "qwen3_moe"}, resolve=resolve_qwen3, names=lambda spec: NAMES)
