"""Granite, dense: Llama's network with multipliers on embedding, attention scores, residual additions and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config
from jaxserve.models.spec import BlockSpec, EmbeddingSpec, Family, LayerSpec, ModelSpec, NormSpec

DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}  # fmt: skip


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' GraniteConfig."""
    config = Config(values, DEFAULTS)
    has_bias = config.flag("attention_bias")
    scale = config.number("attention_multiplier")
    attention = config.attention(config.rope(), scale=scale, has_qkv_bias=has_bias, has_out_bias=has_bias)
    layer = LayerSpec(attention=attention, mlp=config.mlp(has_bias=config.flag("mlp_bias")))
    return finished(config, "granite", "GraniteForCausalLM", [layer] * config.num_layers)


def finished(config: Config, family: str, architecture: str, layers: list[LayerSpec]) -> ModelSpec:
    """The spec with Granite's multipliers around the layers."""
    return config.model(
        family,
        architecture,
        layers,
        NormSpec(config.number("rms_norm_eps")),
        block=BlockSpec(residual_multiplier=config.number("residual_multiplier")),
        embedding=EmbeddingSpec(multiplier=config.number("embedding_multiplier")),
        multiplier=1.0 / config.number("logits_scaling"),
    )


GRANITE = Family(name="granite", architectures={"GraniteForCausalLM": "granite"}, resolve=resolve, names=lambda spec: LLAMA_NORMS)
