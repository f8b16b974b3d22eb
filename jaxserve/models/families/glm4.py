"""GLM-4 (0414): norms before and after attention and MLP, half of each head rotated in neighbouring pairs, fused gate and up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Config
from jaxserve.models.families.phi3 import gate_up_names
from jaxserve.models.spec import BlockSpec, Cut, Family, LayerSpec, ModelSpec, NormSpec

_DEFAULTS = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "attention_bias": True,
}  # fmt: skip
_NORMS = {
    "layers.{i}.attention_norm.weight": "layers.{i}.input_layernorm.weight",
    "layers.{i}.attention_out_norm.weight": "layers.{i}.post_self_attn_layernorm.weight",
    "layers.{i}.mlp_norm.weight": "layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp_out_norm.weight": "layers.{i}.post_mlp_layernorm.weight",
}


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Glm4Config."""
    config = Config(values, _DEFAULTS)
    rope = config.rope(default_partial=0.5, is_interleaved=True)
    layer = LayerSpec(attention=config.attention(rope, has_qkv_bias=config.flag("attention_bias")), mlp=config.mlp())
    norm = NormSpec(config.number("rms_norm_eps"))
    return config.model("glm4", "Glm4ForCausalLM", [layer] * config.num_layers, norm, block=BlockSpec(has_output_norms=True))


def names(spec: ModelSpec) -> Mapping[str, str | tuple[str, Cut]]:
    """Norms by their place, and the halves of the fused MLP matrix."""
    return _NORMS | gate_up_names("layers.{i}.mlp.gate_up_proj.weight", spec.layers[0].mlp.size, spec.hidden_size)


GLM4 = Family(name="glm4", architectures={"Glm4ForCausalLM": "glm4"}, resolve=resolve, names=names)
