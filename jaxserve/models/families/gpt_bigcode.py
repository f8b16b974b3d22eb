"""StarCoder and SantaCoder (GPT-BigCode): GPT-2's network with one key and value head for all queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families import gpt2
from jaxserve.models.families.common import Config, attention_of, with_biases
from jaxserve.models.spec import Cut, EmbeddingSpec, Family, LayerSpec, ModelSpec, NormSpec


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' GPTBigCodeConfig."""
    config = Config(values, gpt2.DEFAULTS | {"hidden_act": "gelu_pytorch_tanh", "multi_query": True}, gpt2.ALIASES)
    config.refuse("add_cross_attention", unless=False, reason="this is a decoder without an encoder")
    scale = config.head_dim**-0.5 if config.flag("scale_attn_weights") else 1.0
    num_kv_heads = 1 if config.flag("multi_query") else config.num_heads
    attention = config.attention(None, num_kv_heads=num_kv_heads, scale=scale, has_qkv_bias=True, has_out_bias=True)
    mlp = config.mlp(size=config.size("intermediate_size", 4 * config.hidden_size), is_gated=False, has_bias=True)
    norm = NormSpec(config.number("layer_norm_epsilon"), is_centered=True, has_bias=True)
    embedding = EmbeddingSpec(num_positions=config.max_position_embeddings)
    layers = [LayerSpec(attention=attention, mlp=mlp)] * config.num_layers
    return config.model("gpt_bigcode", "GPTBigCodeForCausalLM", layers, norm, embedding=embedding)


def names(spec: ModelSpec) -> Mapping[str, str | tuple[str, Cut]]:
    """GPT-2's names; with one kv head the fused matrix is queries, key, value, else [N, 3, H, D]."""
    attention, d = attention_of(spec), spec.hidden_size
    n, h = attention.num_heads, attention.head_dim
    result: dict[str, str | tuple[str, Cut]] = {
        **gpt2.NAMES,
        **with_biases(
            {
                "layers.{i}.self_attn.o_proj.weight": "h.{i}.attn.c_proj.weight",
                "layers.{i}.mlp.up_proj.weight": "h.{i}.mlp.c_fc.weight",
                "layers.{i}.mlp.down_proj.weight": "h.{i}.mlp.c_proj.weight",
            }
        ),
    }
    places = {"q": slice(n), "k": slice(n, n + 1), "v": slice(n + 1, n + 2)}
    for j, (name, place) in enumerate(places.items()):
        for kind, tail in (("weight", (d,)), ("bias", ())):
            if attention.num_kv_heads == 1:
                cut = Cut(((n + 2) * h, *tail), (n + 2, h, *tail), (place,))
            else:
                cut = Cut((3 * n * h, *tail), (n, 3, h, *tail), (slice(None), j))
            result[f"layers.{{i}}.self_attn.{name}_proj.{kind}"] = f"h.{{i}}.attn.c_attn.{kind}", cut
    return result


GPT_BIGCODE = Family(
    name="gpt_bigcode",
    architectures={"GPTBigCodeForCausalLM": "gpt_bigcode"},
    resolve=resolve,
    names=names,
    prefixes=gpt2.PREFIXES,
)
