"""GLM-4.5 and 4.6: half of each head rotated, a mixture of experts with sigmoid routing after the first dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config
from jaxserve.models.spec import Family, LayerSpec, ModelSpec, MoESpec, NormSpec, QKNormSpec

_DEFAULTS = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
NAMES = LLAMA_NORMS | {
    "layers.{i}.mlp.router.weight": "layers.{i}.mlp.gate.weight",
    "layers.{i}.mlp.router.score_bias": "layers.{i}.mlp.gate.e_score_correction_bias",
    **{f"layers.{{i}}.mlp.shared_expert.{part}_proj.weight": f"layers.{{i}}.mlp.shared_experts.{part}_proj.weight"
       for part in ("gate", "up", "down")},
}  # fmt: skip


def sigmoid_moe(config: Config) -> MoESpec:
    """DeepSeek-V3's routing: sigmoid scores, a bias for the choice, groups ranked by their best two."""
    return config.moe(
        num_experts=config.size("n_routed_experts"),
        scoring="sigmoid",
        is_normalized=config.flag("norm_topk_prob"),
        scale=config.number("routed_scaling_factor"),
        has_score_bias=True,
        num_groups=config.size("n_group"),
        num_top_groups=config.size("topk_group"),
        num_group_scores=2,
        shared_size=config.size("n_shared_experts") * config.size("moe_intermediate_size"),
    )


def next_token_layers(spec: ModelSpec) -> str:
    """A pattern of the layers that predict several tokens ahead: they stand after the last one."""
    return rf"(^|\.)layers\.({spec.num_layers}|{spec.num_layers + 1}|{spec.num_layers + 2})\."


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Glm4MoeConfig."""
    config = Config(values, _DEFAULTS)
    norm = NormSpec(config.number("rms_norm_eps"))
    qk_norm = QKNormSpec(norm=norm) if config.flag("use_qk_norm") else None
    attention = config.attention(config.rope(default_partial=0.5), has_qkv_bias=config.flag("attention_bias"), qk_norm=qk_norm)
    num_dense, mlp, moe = config.values["first_k_dense_replace"], config.mlp(), sigmoid_moe(config)
    layers = [LayerSpec(attention=attention, mlp=mlp if i < num_dense else moe) for i in range(config.num_layers)]
    return config.model("glm4_moe", "Glm4MoeForCausalLM", layers, norm)


GLM4_MOE = Family(
    name="glm4_moe",
    architectures={"Glm4MoeForCausalLM": "glm4_moe"},
    resolve=resolve,
    names=lambda spec: NAMES,
    ignored=lambda spec: (next_token_layers(spec),),
)
