"""ERNIE 4.5, dense: Llama's network with neighbouring rotated pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config
from jaxserve.models.spec import Family, LayerSpec, ModelSpec, NormSpec

_DEFAULTS = {
    "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Ernie4_5Config."""
    config = Config(values, _DEFAULTS)
    has_bias, rope = config.flag("use_bias"), config.rope(default_theta=500_000.0, is_interleaved=True)
    attention = config.attention(rope, has_qkv_bias=has_bias, has_out_bias=has_bias)
    layer = LayerSpec(attention=attention, mlp=config.mlp(has_bias=has_bias))
    return config.model("ernie4_5", "Ernie4_5ForCausalLM", [layer] * config.num_layers, NormSpec(config.number("rms_norm_eps")))


ERNIE4_5 = Family(
    name="ernie4_5",
    architectures={"Ernie4_5ForCausalLM": "ernie4_5", "Ernie4_5_ForCausalLM": "ernie4_5"},
    resolve=resolve,
    names=lambda spec: LLAMA_NORMS,
)
