"""Falcon 7B, 40B, 180B and 11B: attention and MLP in parallel, one key and value head (7B) or groups of heads (the new architecture)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Config, attention_of, with_biases
from jaxserve.models.spec import BlockSpec, Cut, Family, LayerSpec, ModelSpec, NormSpec

_DEFAULTS = {
    "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5, "multi_query": True, "parallel_attn": True, "hidden_act": "gelu", "tie_word_embeddings": True,
}  # fmt: skip
_ALIASES = {
    "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_key_value_heads": "num_kv_heads", "hidden_act": "activation",
    "intermediate_size": "ffn_hidden_size",
}  # fmt: skip


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' FalconConfig."""
    values = {"num_kv_heads": values.get("n_head_kv"), **values, **({"hidden_size": values["n_embed"]} if values.get("n_embed") else {})}
    present = {ours: theirs for ours, theirs in _ALIASES.items() if values.get(theirs) is not None}
    config = Config(values, _DEFAULTS, present)
    config.refuse("alibi", unless=False, reason="positions by a bias on the scores are not built; RoPE is")
    is_new, has_bias = config.flag("new_decoder_architecture"), config.flag("bias")
    num_kv_heads = config.num_kv_heads if is_new else 1 if config.flag("multi_query") else config.num_heads
    attention = config.attention(config.rope(), num_kv_heads=num_kv_heads, has_qkv_bias=has_bias, has_out_bias=has_bias)
    mlp = config.mlp(size=config.size("intermediate_size", 4 * config.hidden_size), is_gated=False, has_bias=has_bias)
    num_norms = config.values.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    is_parallel = is_new or config.flag("parallel_attn")
    block = BlockSpec(is_parallel=is_parallel, has_shared_norm=is_parallel and num_norms == 1)
    norm = NormSpec(config.number("layer_norm_epsilon"), is_centered=True, has_bias=True)
    return config.model("falcon", "FalconForCausalLM", [LayerSpec(attention=attention, mlp=mlp)] * config.num_layers, norm, block=block)


def names(spec: ModelSpec) -> Mapping[str, str | tuple[str, Cut]]:
    """Falcon's names; the fused matrix is [K, G + 2, H, D], of each kv head: its queries, key, value."""
    attention, d, every = attention_of(spec), spec.hidden_size, slice(None)
    k, g, h = attention.num_kv_heads, attention.num_query_groups, attention.head_dim
    has_two = spec.block.is_parallel and not spec.block.has_shared_norm
    result: dict[str, str | tuple[str, Cut]] = with_biases(
        {
            "embed_tokens.weight": "word_embeddings.weight",
            "layers.{i}.attention_norm.weight": "h.{i}.ln_attn.weight" if has_two else "h.{i}.input_layernorm.weight",
            "layers.{i}.mlp_norm.weight": "h.{i}.ln_mlp.weight" if has_two else "h.{i}.post_attention_layernorm.weight",
            "layers.{i}.self_attn.o_proj.weight": "h.{i}.self_attention.dense.weight",
            "layers.{i}.mlp.up_proj.weight": "h.{i}.mlp.dense_h_to_4h.weight",
            "layers.{i}.mlp.down_proj.weight": "h.{i}.mlp.dense_4h_to_h.weight",
            "norm.weight": "ln_f.weight",
        }
    )  # type: ignore[assignment]
    parts: dict[str, int | slice] = {"q": slice(g), "k": g, "v": g + 1}
    for name, part in parts.items():
        for kind, tail in (("weight", (d,)), ("bias", ())):
            cut = Cut((k * (g + 2) * h, *tail), (k, g + 2, h, *tail), (every, part))
            result[f"layers.{{i}}.self_attn.{name}_proj.{kind}"] = f"h.{{i}}.self_attention.query_key_value.{kind}", cut
    return result


FALCON = Family(name="falcon", architectures={"FalconForCausalLM": "falcon"}, resolve=resolve, names=names, prefixes=("transformer.", ""))
