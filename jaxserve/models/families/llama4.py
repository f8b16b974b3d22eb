"""Llama 4 (text): chunked attention with RoPE, every fourth layer full and without; one expert of many for each token, and a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.families.common import LLAMA_NORMS, Config
from jaxserve.models.spec import Cut, Family, LayerSpec, ModelSpec, MoESpec, NormSpec, QKNormSpec

_DEFAULTS = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 1, "num_local_experts": 16, "interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Llama4TextConfig."""
    config = Config(values, _DEFAULTS)
    norm, rope = NormSpec(config.number("rms_norm_eps")), config.rope(default_theta=500_000.0, is_interleaved=True)
    step, interval, has_bias = (
        config.size("interleave_moe_layer_step"), config.size("no_rope_layer_interval"), config.flag("attention_bias"),
    )  # fmt: skip
    rotates = config.values.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(config.num_layers)]
    chunked = [kind == "chunked_attention" for kind in config.values.get("layer_types") or ()] or [bool(r) for r in rotates]
    moe_layers = config.values.get("moe_layers")
    moe_layers = set(range(step - 1, config.num_layers, step) if moe_layers is None else moe_layers)
    if len(rotates) != config.num_layers or len(chunked) != config.num_layers:
        raise CheckpointError(f"config.json: no_rope_layers and layer_types must have {config.num_layers} entries, one for each layer.")
    size, chunk = config.size("intermediate_size"), config.size("attention_chunk_size")
    moe = config.moe(num_experts=config.size("num_local_experts"), size=size, scoring="sigmoid", is_input_weighted=True, shared_size=size)
    mlp = config.mlp(size=config.size("intermediate_size_mlp"))
    temperature = (config.number("floor_scale"), config.number("attn_scale")) if config.flag("attn_temperature_tuning") else None
    qk_norm = QKNormSpec(norm=norm, scope="plain") if config.flag("use_qk_norm") else None
    layers = []
    for i in range(config.num_layers):
        attention = config.attention(
            rope if rotates[i] else None,
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            qk_norm=qk_norm if rotates[i] else None,
            temperature=None if rotates[i] else temperature,
            chunk=chunk if chunked[i] else None,
        )
        layers.append(LayerSpec(attention=attention, mlp=moe if i in moe_layers else mlp))
    return config.model("llama4", "Llama4ForCausalLM", layers, norm)


def names(spec: ModelSpec) -> Mapping[str, str | tuple[str, Cut]]:
    """Llama's norms; experts are stacked with the input axis first: [E, D, 2 * F] (gate, then up) and [E, F, D]."""
    d, moe = spec.hidden_size, next((layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)), None)
    result: dict[str, str | tuple[str, Cut]] = {**LLAMA_NORMS, "layers.{i}.mlp.router.weight": "layers.{i}.feed_forward.router.weight"}
    for part in ("gate", "up", "down"):
        result[f"layers.{{i}}.mlp.{part}_proj.weight"] = f"layers.{{i}}.feed_forward.{part}_proj.weight"
        result[f"layers.{{i}}.mlp.shared_expert.{part}_proj.weight"] = f"layers.{{i}}.feed_forward.shared_expert.{part}_proj.weight"
    for x in range(moe.num_experts if moe is not None else 0):
        assert moe is not None
        e, f, every = moe.num_experts, moe.size, slice(None)
        ours, theirs = f"layers.{{i}}.mlp.experts.{x}.", "layers.{i}.feed_forward.experts."
        for half, name in enumerate(("gate", "up")):
            cut = Cut((e, d, 2 * f), (e, d, 2, f), (x, every, half), is_transposed=True)
            result[f"{ours}{name}_proj.weight"] = theirs + "gate_up_proj", cut
        result[ours + "down_proj.weight"] = theirs + "down_proj", Cut((e, f, d), (e, f, d), (x,), is_transposed=True)
    return result


LLAMA4 = Family(
    name="llama4",
    architectures={"Llama4ForCausalLM": "llama4_text", "Llama4ForConditionalGeneration": "llama4"},
    resolve=resolve,
    names=names,
)
