"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one LayerNorm, biases everywhere, part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Config, with_biases
from jaxserve.models.spec import BlockSpec, Family, LayerSpec, ModelSpec, NormSpec, QKNormSpec

_DEFAULTS = {
    "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
    "hidden_act": "gelu_new", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
}  # fmt: skip
_NAMES = with_biases(
    {
        "layers.{i}.attention_norm.weight": "layers.{i}.input_layernorm.weight",
        "layers.{i}.self_attn.o_proj.weight": "layers.{i}.self_attn.dense.weight",
        "layers.{i}.self_attn.q_norm.weight": "layers.{i}.self_attn.q_layernorm.weight",
        "layers.{i}.self_attn.k_norm.weight": "layers.{i}.self_attn.k_layernorm.weight",
        "layers.{i}.mlp.up_proj.weight": "layers.{i}.mlp.fc1.weight",
        "layers.{i}.mlp.down_proj.weight": "layers.{i}.mlp.fc2.weight",
        "norm.weight": "final_layernorm.weight",
    }
)


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' PhiConfig."""
    config = Config(values, _DEFAULTS)
    norm = NormSpec(config.number("layer_norm_eps"), is_centered=True, has_bias=True)
    qk_norm = QKNormSpec(norm=norm) if config.flag("qk_layernorm") else None
    attention = config.attention(config.rope(default_partial=0.5), has_qkv_bias=True, has_out_bias=True, qk_norm=qk_norm)
    layer = LayerSpec(attention=attention, mlp=config.mlp(is_gated=False, has_bias=True))
    block = BlockSpec(is_parallel=True, has_shared_norm=True)
    return config.model("phi", "PhiForCausalLM", [layer] * config.num_layers, norm, block=block, has_bias=True)


PHI = Family(name="phi", architectures={"PhiForCausalLM": "phi"}, resolve=resolve, names=lambda spec: _NAMES)
