"""OPT: learned positions with two rows to spare, LayerNorm before each part, a ReLU MLP without a gate, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Config, with_biases
from jaxserve.models.spec import EmbeddingSpec, Family, LayerSpec, ModelSpec, NormSpec

_DEFAULTS = {
    "vocab_size": 50272, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "hidden_act": "relu", "max_position_embeddings": 2048, "enable_bias": True, "tie_word_embeddings": True,
}  # fmt: skip
_ALIASES = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
_NAMES = with_biases(
    {
        "layers.{i}.attention_norm.weight": "layers.{i}.self_attn_layer_norm.weight",
        "layers.{i}.mlp_norm.weight": "layers.{i}.final_layer_norm.weight",
        "layers.{i}.self_attn.o_proj.weight": "layers.{i}.self_attn.out_proj.weight",
        "layers.{i}.mlp.up_proj.weight": "layers.{i}.fc1.weight",
        "layers.{i}.mlp.down_proj.weight": "layers.{i}.fc2.weight",
        "norm.weight": "final_layer_norm.weight",
    }
)
_EPS = 1e-5  # torch's default: the config has no field for it


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' OPTConfig."""
    config = Config(values, _DEFAULTS, _ALIASES)
    config.refuse("do_layer_norm_before", unless=True, reason="norms after the addition (OPT-350M) are another network")
    config.refuse("word_embed_proj_dim", unless=config.hidden_size, reason="embeddings narrower than the model (OPT-350M) are not built")
    config.refuse("_remove_final_layer_norm", unless=False, reason="the last norm is part of this network")
    config.refuse("layer_norm_elementwise_affine", unless=True, reason="norms have weights in this network")
    has_bias = config.flag("enable_bias")
    attention = config.attention(None, has_qkv_bias=has_bias, has_out_bias=has_bias)
    layer = LayerSpec(attention=attention, mlp=config.mlp(is_gated=False, has_bias=has_bias))
    norm = NormSpec(_EPS, is_centered=True, has_bias=True)
    embedding = EmbeddingSpec(num_positions=config.max_position_embeddings, position_offset=2)
    return config.model("opt", "OPTForCausalLM", [layer] * config.num_layers, norm, embedding=embedding)


OPT = Family(
    name="opt",
    architectures={"OPTForCausalLM": "opt"},
    resolve=resolve,
    names=lambda spec: _NAMES,
    prefixes=("model.decoder.", "decoder.", "model."),
)
