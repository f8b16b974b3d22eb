"""GPT-OSS: windows on every other layer, attention sinks, a mixture of experts with a bounded activation; biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config
from jaxserve.models.spec import Cut, Family, LayerSpec, ModelSpec, MoESpec, NormSpec

_DEFAULTS = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "sliding_window": 128,
    "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
         "original_max_position_embeddings": 4096}  # fmt: skip


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' GptOssConfig."""
    silent = not (values.get("rope_parameters") or values.get("rope_scaling"))
    config = Config(values, _DEFAULTS | ({"rope_scaling": _YARN} if silent else {}))
    rope, has_bias = config.rope(default_theta=150_000.0), config.flag("attention_bias")
    moe = config.moe(
        num_experts=config.size("num_local_experts"),
        size=config.size("intermediate_size"),
        is_normalized=True,
        has_router_bias=True,
        has_expert_bias=True,
        clamp=(config.number("swiglu_alpha"), config.number("swiglu_limit")),
    )
    layers = [
        LayerSpec(attention=config.attention(rope, window=window, has_qkv_bias=has_bias, has_out_bias=has_bias, has_sinks=True), mlp=moe)
        for window in config.windows(lambda i: i % 2 == 0)
    ]
    norm = NormSpec(config.number("rms_norm_eps"), is_wide=True)
    return config.model("gpt_oss", "GptOssForCausalLM", layers, norm, max_model_len=config.max_position_embeddings)


def names(spec: ModelSpec) -> Mapping[str, str | tuple[str, Cut]]:
    """Llama's names; experts are stacked with the input axis first, gate and up in turns: [E, D, 2 * F] and [E, F, D]."""
    moe, d = spec.layers[0].mlp, spec.hidden_size
    assert isinstance(moe, MoESpec)
    e, f, every = moe.num_experts, moe.size, slice(None)
    result: dict[str, str | tuple[str, Cut]] = {**LLAMA_NORMS}
    for x in range(e):
        ours, theirs = f"layers.{{i}}.mlp.experts.{x}.", "layers.{i}.mlp.experts."
        for turn, name in enumerate(("gate", "up")):
            weight = Cut((e, d, 2 * f), (e, d, f, 2), (x, every, every, turn), is_transposed=True)
            result[f"{ours}{name}_proj.weight"] = theirs + "gate_up_proj", weight
            result[f"{ours}{name}_proj.bias"] = theirs + "gate_up_proj_bias", Cut((e, 2 * f), (e, f, 2), (x, every, turn))
        result[ours + "down_proj.weight"] = theirs + "down_proj", Cut((e, f, d), (e, f, d), (x,), is_transposed=True)
        result[ours + "down_proj.bias"] = theirs + "down_proj_bias", Cut((e, d), (e, d), (x,))
    return result


GPT_OSS = Family(name="gpt_oss", architectures={"GptOssForCausalLM": "gpt_oss"}, resolve=resolve, names=names)
