"""Phi-3, Phi-3.5 and Phi-4: Llama's network with queries, keys and values stored as one matrix, gate and up as another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config, attention_of
from jaxserve.models.spec import Cut, Family, LayerSpec, ModelSpec, NormSpec

_DEFAULTS = {
    "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Phi3Config."""
    config = Config(values, _DEFAULTS)
    rope, mlp = config.rope(), config.mlp()
    layers = [LayerSpec(attention=config.attention(rope, window=window), mlp=mlp) for window in config.windows(lambda i: True)]
    return config.model("phi3", "Phi3ForCausalLM", layers, NormSpec(config.number("rms_norm_eps")))


def names(spec: ModelSpec) -> Mapping[str, str | tuple[str, Cut]]:
    """Llama's, with the parts of the fused matrices as rows of them."""
    attention, d = attention_of(spec), spec.hidden_size
    query, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    result: dict[str, str | tuple[str, Cut]] = {**LLAMA_NORMS}
    for name, start, stop in (("q", 0, query), ("k", query, query + kv), ("v", query + kv, query + 2 * kv)):
        result[f"layers.{{i}}.self_attn.{name}_proj.weight"] = rows("layers.{i}.self_attn.qkv_proj.weight", query + 2 * kv, d, start, stop)
    return result | gate_up_names("layers.{i}.mlp.gate_up_proj.weight", spec.layers[0].mlp.size, d)


def gate_up_names(source: str, size: int, d: int) -> dict[str, str | tuple[str, Cut]]:
    """Gate and up as the two halves of one matrix."""
    parts = (("gate", 0, size), ("up", size, 2 * size))
    return {f"layers.{{i}}.mlp.{name}_proj.weight": rows(source, 2 * size, d, start, stop) for name, start, stop in parts}


def rows(source: str, num_rows: int, d: int, start: int, stop: int) -> tuple[str, Cut]:
    """Rows of a source matrix."""
    return source, Cut((num_rows, d), (num_rows, d), (slice(start, stop),))


PHI3 = Family(name="phi3", architectures={"Phi3ForCausalLM": "phi3"}, resolve=resolve, names=names)
