"""Granite MoE: Granite's multipliers around a mixture of experts, whose matrices are stored stacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families import granite
from jaxserve.models.families.common import LLAMA_NORMS, Config
from jaxserve.models.spec import Cut, Family, LayerSpec, ModelSpec, MoESpec


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' GraniteMoeConfig."""
    config = Config(values, granite.DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2})
    has_bias, scale = config.flag("attention_bias"), config.number("attention_multiplier")
    attention = config.attention(config.rope(), scale=scale, has_qkv_bias=has_bias, has_out_bias=has_bias)
    moe = config.moe(num_experts=config.size("num_local_experts"), size=config.size("intermediate_size"), is_normalized=True)
    return granite.finished(config, "granitemoe", "GraniteMoeForCausalLM", [LayerSpec(attention=attention, mlp=moe)] * config.num_layers)


def names(spec: ModelSpec) -> Mapping[str, str | tuple[str, Cut]]:
    """Llama's names; all experts of a layer are two tensors, [E, 2 * F, D] (gate, then up) and [E, D, F]."""
    moe, d = spec.layers[0].mlp, spec.hidden_size
    assert isinstance(moe, MoESpec)
    e, f = moe.num_experts, moe.size
    result: dict[str, str | tuple[str, Cut]] = {
        **LLAMA_NORMS,
        "layers.{i}.mlp.router.weight": "layers.{i}.block_sparse_moe.router.layer.weight",
    }
    for x in range(e):
        prefix = f"layers.{{i}}.mlp.experts.{x}."
        for half, name in enumerate(("gate", "up")):
            cut = Cut((e, 2 * f, d), (e, 2, f, d), (x, half))
            result[f"{prefix}{name}_proj.weight"] = "layers.{i}.block_sparse_moe.input_linear.weight", cut
        result[prefix + "down_proj.weight"] = "layers.{i}.block_sparse_moe.output_linear.weight", Cut((e, d, f), (e, d, f), (x,))
    return result


GRANITEMOE = Family(name="granitemoe", architectures={"GraniteMoeForCausalLM": "granitemoe"}, resolve=resolve, names=names)
