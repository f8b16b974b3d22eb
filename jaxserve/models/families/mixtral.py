"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config
from jaxserve.models.spec import Family, LayerSpec, ModelSpec, NormSpec

_DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2, "num_local_experts": 8,
}  # fmt: skip
_NAMES = LLAMA_NORMS | {
    "layers.{i}.mlp.router.weight": "layers.{i}.block_sparse_moe.gate.weight",
    "layers.{i}.mlp.experts.{e}.gate_proj.weight": "layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
    "layers.{i}.mlp.experts.{e}.down_proj.weight": "layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
    "layers.{i}.mlp.experts.{e}.up_proj.weight": "layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
}


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' MixtralConfig."""
    config = Config(values, _DEFAULTS)
    moe = config.moe(num_experts=config.size("num_local_experts"), size=config.size("intermediate_size"), is_normalized=True)
    rope = config.rope(default_theta=1_000_000.0)
    layers = [LayerSpec(attention=config.attention(rope, window=window), mlp=moe) for window in config.windows(lambda i: True)]
    return config.model("mixtral", "MixtralForCausalLM", layers, NormSpec(config.number("rms_norm_eps")))


MIXTRAL = Family(name="mixtral", architectures={"MixtralForCausalLM": "mixtral"}, resolve=resolve, names=lambda spec: _NAMES)
