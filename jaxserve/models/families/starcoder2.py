"""StarCoder2: LayerNorm, grouped-query attention with RoPE, an MLP without a gate, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config, with_biases
from jaxserve.models.spec import Family, LayerSpec, ModelSpec, NormSpec

_DEFAULTS = {
    "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30, "num_attention_heads": 24,
    "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "use_bias": True,
    "tie_word_embeddings": True,
}  # fmt: skip
_NAMES = with_biases(
    LLAMA_NORMS
    | {
        "layers.{i}.mlp.up_proj.weight": "layers.{i}.mlp.c_fc.weight",
        "layers.{i}.mlp.down_proj.weight": "layers.{i}.mlp.c_proj.weight",
    }
)


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Starcoder2Config."""
    config = Config(values, _DEFAULTS)
    has_bias, rope = config.flag("use_bias"), config.rope()
    mlp = config.mlp(is_gated=False, has_bias=has_bias)
    layers = [
        LayerSpec(attention=config.attention(rope, has_qkv_bias=has_bias, has_out_bias=has_bias, window=window), mlp=mlp)
        for window in config.windows(lambda i: True)
    ]
    norm = NormSpec(config.number("norm_epsilon"), is_centered=True, has_bias=True)
    return config.model("starcoder2", "Starcoder2ForCausalLM", layers, norm)


STARCODER2 = Family(name="starcoder2", architectures={"Starcoder2ForCausalLM": "starcoder2"}, resolve=resolve, names=lambda spec: _NAMES)
