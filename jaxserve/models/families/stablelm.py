"""StableLM: LayerNorm, part of each head rotated, a gated MLP; attention and MLP in parallel in some of its models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config, with_biases
from jaxserve.models.spec import BlockSpec, Family, LayerSpec, ModelSpec, NormSpec

_DEFAULTS = {
    "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5,
}  # fmt: skip


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' StableLmConfig."""
    config = Config(values, _DEFAULTS)
    config.refuse("qk_layernorm", unless=False, reason="its norms are stored as a tensor for each head")
    norm = NormSpec(config.number("layer_norm_eps"), is_centered=True, has_bias=True)
    attention = config.attention(config.rope(default_partial=0.25), has_qkv_bias=config.flag("use_qkv_bias"))
    is_parallel = config.flag("use_parallel_residual")
    block = BlockSpec(is_parallel=is_parallel, has_shared_norm=is_parallel)
    layer = LayerSpec(attention=attention, mlp=config.mlp())
    return config.model("stablelm", "StableLmForCausalLM", [layer] * config.num_layers, norm, block=block)


STABLELM = Family(
    name="stablelm", architectures={"StableLmForCausalLM": "stablelm"}, resolve=resolve, names=lambda spec: with_biases(LLAMA_NORMS)
)
