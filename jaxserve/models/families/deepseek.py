"""DeepSeek-V2, V2-Lite, V3 and R1: latent attention and a mixture of experts after the first dense layers.

V2 routes by softmax, V3 by sigmoid with a bias for the choice. The layers that predict several tokens ahead are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.families.common import Config
from jaxserve.models.families.glm4_moe import NAMES, next_token_layers, sigmoid_moe
from jaxserve.models.rope_config import yarn_mscale
from jaxserve.models.spec import Family, LatentAttentionSpec, LayerSpec, ModelSpec, MoESpec, NormSpec

_V2 = {
    "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "n_routed_experts": 64, "n_shared_experts": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "routed_scaling_factor": 1.0, "topk_method": "greedy", "moe_intermediate_size": 1407,
}  # fmt: skip
_V3 = _V2 | {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True, "max_position_embeddings": 4096, "rope_interleave": True,
}  # fmt: skip
_LATENT_NORM = NormSpec(1e-6)  # transformers takes the default of its norm here, not the config's


def latent_attention(config: Config, *, is_interleaved: bool, norm: NormSpec = _LATENT_NORM) -> LatentAttentionSpec:
    """Latent attention of the config's sizes; with YaRN and mscale_all_dim the scores are scaled up (transformers' yarn_apply_mscale)."""
    nope, rotated, value = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim"), config.size("v_head_dim")
    rope = config.rope(head_dim=rotated, is_interleaved=is_interleaved)
    params = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
    mscale = yarn_mscale(rope.factor, params["mscale_all_dim"]) if rope.kind != "default" and params.get("mscale_all_dim") else 1.0
    return LatentAttentionSpec(
        num_heads=config.num_heads,
        query_rank=None if config.values.get("q_lora_rank") is None else config.size("q_lora_rank"),
        kv_rank=config.size("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=value,
        rope=rope,
        scale=(nope + rotated) ** -0.5 * mscale**2,
        norm=norm,
        has_bias=config.flag("attention_bias"),
    )


def _finished(config: Config, family: str, architecture: str, moe: MoESpec, *, is_interleaved: bool) -> ModelSpec:
    attention, mlp = latent_attention(config, is_interleaved=is_interleaved), config.mlp(has_bias=config.flag("mlp_bias"))
    num_dense = config.values["first_k_dense_replace"]
    layers = [LayerSpec(attention=attention, mlp=mlp if i < num_dense else moe) for i in range(config.num_layers)]
    return config.model(family, architecture, layers, NormSpec(config.number("rms_norm_eps")))


def resolve_v2(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' DeepseekV2Config."""
    config = Config(values, _V2)
    method = config.values["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(f"config.json: topk_method {method!r} is not supported; supported: greedy, group_limited_greedy.")
    has_groups = method == "group_limited_greedy"
    moe = config.moe(
        num_experts=config.size("n_routed_experts"),
        scale=config.number("routed_scaling_factor"),
        num_groups=config.size("n_group") if has_groups else 1,
        num_top_groups=config.size("topk_group") if has_groups else 1,
        shared_size=config.size("n_shared_experts") * config.size("moe_intermediate_size"),
    )
    return _finished(config, "deepseek_v2", "DeepseekV2ForCausalLM", moe, is_interleaved=True)


def resolve_v3(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' DeepseekV3Config."""
    config = Config(values, _V3)
    return _finished(config, "deepseek_v3", "DeepseekV3ForCausalLM", sigmoid_moe(config), is_interleaved=config.flag("rope_interleave"))


DEEPSEEK_V2 = Family(
    name="deepseek_v2", architectures={"DeepseekV2ForCausalLM": "deepseek_v2"}, resolve=resolve_v2, names=lambda spec: NAMES
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architectures={"DeepseekV3ForCausalLM": "deepseek_v3"},
    resolve=resolve_v3,
    names=lambda spec: NAMES,
    ignored=lambda spec: (next_token_layers(spec),),
)
