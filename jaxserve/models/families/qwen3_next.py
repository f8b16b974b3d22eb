"""Qwen3-Next: three of four layers are gated delta nets, the fourth is attention with a gate; experts and a shared expert in every layer.

The source keeps the projections of a recurrent layer by key head: queries, keys, values and gates as one matrix, rates and decays as
another (Qwen3NextGatedDeltaNet.fix_query_key_value_ordering), and attention's queries and gates head by head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models import config_values
from jaxserve.models.families.common import Config, attention_of
from jaxserve.models.families.qwen_moe import NAMES, mlps_of
from jaxserve.models.spec import Cut, Family, LayerSpec, MLPSpec, ModelSpec, MoESpec, NormSpec, QKNormSpec, RecurrentSpec

_DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "decoder_sparse_step": 1, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10,
    "num_experts": 512, "norm_topk_prob": True, "full_attention_interval": 4,
}  # fmt: skip


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Qwen3NextConfig."""
    config = Config(values, _DEFAULTS)
    eps, has_bias = config.number("rms_norm_eps"), config.flag("attention_bias")
    norm = NormSpec(eps, is_offset=True, is_wide=True)
    rope, qk_norm = config.rope(default_partial=0.25), QKNormSpec(norm=norm)
    attention = config.attention(rope, has_qkv_bias=has_bias, has_out_bias=has_bias, qk_norm=qk_norm, has_gate=True)
    recurrent = _recurrent(config, NormSpec(eps))
    layers = [
        LayerSpec(attention=recurrent if is_recurrent else attention, mlp=mlp)
        for is_recurrent, mlp in zip(_recurrent_layers(config), _mlps(config), strict=True)
    ]
    return config.model("qwen3_next", "Qwen3NextForCausalLM", layers, norm)


def _mlps(config: Config) -> list[MLPSpec | MoESpec]:
    if config.values["num_experts"] == 0:
        return [config.mlp()] * config.num_layers
    shared = config.size("shared_expert_intermediate_size")
    moe = config.moe(is_normalized=config.flag("norm_topk_prob"), shared_size=shared, has_shared_gate=True)
    return mlps_of(config, moe)


def _recurrent_layers(config: Config) -> list[bool]:
    """Which layers are recurrent: by `layer_types` where the config has them, else all but every fourth or so."""
    interval = config.size("full_attention_interval")
    types = config.values.get("layer_types")
    if types is None:
        types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(config.num_layers)]
    if len(types) != config.num_layers or not {"full_attention"} <= set(types) <= {"linear_attention", "full_attention"}:
        raise CheckpointError(
            f"config.json: layer_types must name linear_attention or full_attention for each of {config.num_layers} layers, and "
            f"full_attention at least once, got {types!r}."
        )
    return [kind == "linear_attention" for kind in types]


def _recurrent(config: Config, norm: NormSpec) -> RecurrentSpec:
    spec = RecurrentSpec(
        num_key_heads=config.size("linear_num_key_heads"),
        num_value_heads=config.size("linear_num_value_heads"),
        key_dim=config.size("linear_key_head_dim"),
        value_dim=config.size("linear_value_head_dim"),
        kernel_size=config.size("linear_conv_kernel_dim"),
        activation=config_values.activation(config.values),
        norm=norm,
    )
    if spec.num_value_heads % spec.num_key_heads or spec.kernel_size < 2:
        raise CheckpointError(
            f"config.json: linear_num_value_heads {spec.num_value_heads} must be a multiple of linear_num_key_heads {spec.num_key_heads}, "
            f"and linear_conv_kernel_dim {spec.kernel_size} at least 2."
        )
    return spec


def names(spec: ModelSpec) -> Mapping[str, str | tuple[str, Cut]]:
    """Llama's and the experts' names; what the source fuses is cut out head by head."""
    d, attention, every = spec.hidden_size, attention_of(spec), slice(None)
    result: dict[str, str | tuple[str, Cut]] = {**NAMES}
    for half, name in enumerate(("q", "gate")):
        heads, width = attention.num_heads, attention.head_dim
        for kind, tail in (("weight", (d,)), ("bias", ())):
            cut = Cut((2 * heads * width, *tail), (heads, 2, width, *tail), (every, half))
            result[f"layers.{{i}}.self_attn.{name}_proj.{kind}"] = f"layers.{{i}}.self_attn.q_proj.{kind}", cut
    for recurrent in spec.recurrent_layers[:1]:
        result |= _recurrent_names(recurrent, d)
    return result


def _recurrent_names(spec: RecurrentSpec, d: int) -> dict[str, str | tuple[str, Cut]]:
    ours, heads, every = "layers.{i}.linear_attn.", spec.num_key_heads, slice(None)
    result: dict[str, str | tuple[str, Cut]] = {
        ours + "decay_log": ours + "A_log",
        ours + "decay_bias": ours + "dt_bias",
        ours + "o_proj.weight": ours + "out_proj.weight",
    }
    fused = {
        "in_proj_qkvz": {"q": spec.key_dim, "k": spec.key_dim, "v": spec.values_dim, "gate": spec.values_dim},
        "in_proj_ba": {"rate": spec.num_value_groups, "decay": spec.num_value_groups},
    }
    for source, sizes in fused.items():
        width, stop = sum(sizes.values()), 0
        for name, size in sizes.items():
            start, stop = stop, stop + size
            cut = Cut((heads * width, d), (heads, width, d), (every, slice(start, stop)))
            result[f"{ours}{name}_proj.weight"] = f"{ours}{source}.weight", cut
    channels, stop = heads * spec.conv_dim, 0
    for name, size in (("q", spec.key_dim), ("k", spec.key_dim), ("v", spec.values_dim)):
        start, stop = stop, stop + heads * size
        cut = Cut((channels, 1, spec.kernel_size), (channels, 1, spec.kernel_size), (slice(start, stop),))
        result[f"{ours}{name}_conv.weight"] = ours + "conv1d.weight", cut
    return result


QWEN3_NEXT = Family(
    name="qwen3_next",
    architectures={"Qwen3NextForCausalLM": "qwen3_next"},
    resolve=resolve,
    names=names,
    ignored=lambda spec: (r"^mtp\.",),
)
