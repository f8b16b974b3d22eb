"""OLMoE: a mixture of experts in every layer, queries and keys normalized over all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Config
from jaxserve.models.families.qwen_moe import NAMES
from jaxserve.models.spec import Family, LayerSpec, ModelSpec, NormSpec, QKNormSpec

_DEFAULTS = {
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_experts": 64,
}  # fmt: skip


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' OlmoeConfig."""
    config = Config(values, _DEFAULTS)
    norm, has_bias = NormSpec(config.number("rms_norm_eps")), config.flag("attention_bias")
    attention = config.attention(
        config.rope(),
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        qk_norm=QKNormSpec(norm=norm, scope="all"),
        clip=config.optional_number("clip_qkv"),
    )
    moe = config.moe(size=config.size("intermediate_size"), is_normalized=config.flag("norm_topk_prob"))
    return config.model("olmoe", "OlmoeForCausalLM", [LayerSpec(attention=attention, mlp=moe)] * config.num_layers, norm)


OLMOE = Family(name="olmoe", architectures={"OlmoeForCausalLM": "olmoe"}, resolve=resolve, names=lambda spec: NAMES)
