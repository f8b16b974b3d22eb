"""GPT-J: attention and MLP in parallel after one LayerNorm; neighbouring dimensions are rotated, of a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families import gpt2
from jaxserve.models.families.common import Config, with_biases
from jaxserve.models.spec import BlockSpec, Family, LayerSpec, ModelSpec, NormSpec

_DEFAULTS = {
    "vocab_size": 50400, "hidden_size": 4096, "num_hidden_layers": 28, "num_attention_heads": 16, "max_position_embeddings": 2048,
    "rotary_dim": 64, "hidden_act": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip
_NAMES = {
    "embed_tokens.weight": "wte.weight",
    **{f"layers.{{i}}.self_attn.{name}_proj.weight": f"h.{{i}}.attn.{name}_proj.weight" for name in "qkv"},
    "layers.{i}.self_attn.o_proj.weight": "h.{i}.attn.out_proj.weight",
    **with_biases(
        {
            "layers.{i}.attention_norm.weight": "h.{i}.ln_1.weight",
            "layers.{i}.mlp.up_proj.weight": "h.{i}.mlp.fc_in.weight",
            "layers.{i}.mlp.down_proj.weight": "h.{i}.mlp.fc_out.weight",
            "norm.weight": "ln_f.weight",
        }
    ),
}


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' GPTJConfig."""
    config = Config(values, _DEFAULTS, gpt2.ALIASES)
    partial = config.size("rotary_dim", config.head_dim) / config.head_dim
    rope = config.rope({"partial_rotary_factor": partial}, is_interleaved=True)
    mlp = config.mlp(size=config.size("intermediate_size", 4 * config.hidden_size), is_gated=False, has_bias=True)
    layer = LayerSpec(attention=config.attention(rope), mlp=mlp)
    norm = NormSpec(config.number("layer_norm_epsilon"), is_centered=True, has_bias=True)
    block = BlockSpec(is_parallel=True, has_shared_norm=True)
    return config.model("gptj", "GPTJForCausalLM", [layer] * config.num_layers, norm, block=block, has_bias=True)


GPTJ = Family(name="gptj", architectures={"GPTJForCausalLM": "gptj"}, resolve=resolve, names=lambda spec: _NAMES, prefixes=gpt2.PREFIXES)
