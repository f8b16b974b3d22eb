"""GPT-NeoX and Pythia: attention and MLP in parallel (or one after the other), each after its own LayerNorm; part of each head rotated.

Queries, keys and values of each head stand together in one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config, attention_of, with_biases
from jaxserve.models.spec import BlockSpec, Cut, Family, LayerSpec, ModelSpec, NormSpec

_DEFAULTS = {
    "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44, "num_attention_heads": 64,
    "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "use_parallel_residual": True, "attention_bias": True,
}  # fmt: skip
_ALIASES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' GPTNeoXConfig."""
    config = Config(values, _DEFAULTS, _ALIASES)
    has_bias = config.flag("attention_bias")
    attention = config.attention(config.rope(default_partial=0.25), has_qkv_bias=has_bias, has_out_bias=has_bias)
    layer = LayerSpec(attention=attention, mlp=config.mlp(is_gated=False, has_bias=True))
    norm = NormSpec(config.number("layer_norm_eps"), is_centered=True, has_bias=True)
    block = BlockSpec(is_parallel=config.flag("use_parallel_residual"))
    return config.model("gpt_neox", "GPTNeoXForCausalLM", [layer] * config.num_layers, norm, block=block)


def names(spec: ModelSpec) -> Mapping[str, str | tuple[str, Cut]]:
    """GPT-NeoX' names; the fused matrix is [N, 3, H, D]."""
    attention, d = attention_of(spec), spec.hidden_size
    n, h, every = attention.num_heads, attention.head_dim, slice(None)
    result: dict[str, str | tuple[str, Cut]] = {
        "embed_tokens.weight": "embed_in.weight",
        "lm_head.weight": "embed_out.weight",
        **with_biases(
            LLAMA_NORMS
            | {
                "layers.{i}.self_attn.o_proj.weight": "layers.{i}.attention.dense.weight",
                "layers.{i}.mlp.up_proj.weight": "layers.{i}.mlp.dense_h_to_4h.weight",
                "layers.{i}.mlp.down_proj.weight": "layers.{i}.mlp.dense_4h_to_h.weight",
                "norm.weight": "final_layer_norm.weight",
            }
        ),
    }
    for j, name in enumerate("qkv"):
        for kind, tail in (("weight", (d,)), ("bias", ())):
            cut = Cut((3 * n * h, *tail), (n, 3, h, *tail), (every, j))
            result[f"layers.{{i}}.self_attn.{name}_proj.{kind}"] = f"layers.{{i}}.attention.query_key_value.{kind}", cut
    return result


GPT_NEOX = Family(
    name="gpt_neox", architectures={"GPTNeoXForCausalLM": "gpt_neox"}, resolve=resolve, names=names, prefixes=("gpt_neox.", "")
)
