"""Gemma 1, 2 and 3 (text): norm weights stored minus one, a scaled embedding, GELU-gated MLP, tied head.

Gemma 2 adds norms after attention and MLP, soft caps and windows on every other layer; Gemma 3 normalizes queries and keys instead
of capping, and its windowed layers have a rotary embedding of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config
from jaxserve.models.rope_config import with_rope_of
from jaxserve.models.spec import BlockSpec, EmbeddingSpec, Family, LayerSpec, ModelSpec, NormSpec, QKNormSpec

_GEMMA = {
    "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA2 = _GEMMA | {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6, "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0, "final_logit_softcapping": None, "attn_logit_softcapping": None,
}  # fmt: skip
_ALIASES = {"hidden_act": "hidden_activation"}
_OUTPUT_NORMS = {
    "layers.{i}.attention_norm.weight": "layers.{i}.input_layernorm.weight",
    "layers.{i}.attention_out_norm.weight": "layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp_norm.weight": "layers.{i}.pre_feedforward_layernorm.weight",
    "layers.{i}.mlp_out_norm.weight": "layers.{i}.post_feedforward_layernorm.weight",
}


def _config(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Config:
    config = Config(values, defaults, _ALIASES)
    if config.values["hidden_act"] == "gelu":  # what old configs say and do not mean (transformers' GemmaConfig)
        config.values["hidden_act"] = "gelu_pytorch_tanh"
    config.refuse("use_bidirectional_attention", unless=False, reason="it is for encoders")
    return config


def _finished(config: Config, family: str, architecture: str, layers: list[LayerSpec], **options: Any) -> ModelSpec:
    norm = NormSpec(config.number("rms_norm_eps"), is_offset=True, is_wide=True)
    embedding = EmbeddingSpec(multiplier=config.hidden_size**0.5)
    return config.model(family, architecture, layers, norm, embedding=embedding, **options)


def resolve_gemma(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' GemmaConfig."""
    config = _config(values, _GEMMA)
    has_bias = config.flag("attention_bias")
    layer = LayerSpec(attention=config.attention(config.rope(), has_qkv_bias=has_bias, has_out_bias=has_bias), mlp=config.mlp())
    return _finished(config, "gemma", "GemmaForCausalLM", [layer] * config.num_layers)


def resolve_gemma2(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Gemma2Config."""
    config = _config(values, _GEMMA2)
    has_bias = config.flag("attention_bias")
    options = {
        "scale": config.number("query_pre_attn_scalar") ** -0.5, "soft_cap": config.optional_number("attn_logit_softcapping"),
        "has_qkv_bias": has_bias, "has_out_bias": has_bias,
    }  # fmt: skip
    rope, mlp = config.rope(), config.mlp()
    windows = config.windows(lambda i: i % 2 == 0)
    layers = [LayerSpec(attention=config.attention(rope, window=window, **options), mlp=mlp) for window in windows]
    cap = config.optional_number("final_logit_softcapping")
    return _finished(config, "gemma2", "Gemma2ForCausalLM", layers, block=BlockSpec(has_output_norms=True), soft_cap=cap)


def resolve_gemma3(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Gemma3TextConfig."""
    config = _config(values, _GEMMA3)
    norm, has_bias = NormSpec(config.number("rms_norm_eps"), is_offset=True, is_wide=True), config.flag("attention_bias")
    options = {
        "scale": config.number("query_pre_attn_scalar") ** -0.5, "soft_cap": config.optional_number("attn_logit_softcapping"),
        "has_qkv_bias": has_bias, "has_out_bias": has_bias, "qk_norm": QKNormSpec(norm=norm),
    }  # fmt: skip
    pattern = config.size("sliding_window_pattern", config.values.get("_sliding_window_pattern"))
    full = config.rope(with_rope_of(config.values, "full_attention"), default_theta=1_000_000.0)
    local = config.rope(with_rope_of(config.values, "sliding_attention", theta_key="rope_local_base_freq"))
    mlp = config.mlp()
    layers = [
        LayerSpec(attention=config.attention(full if window is None else local, window=window, **options), mlp=mlp)
        for window in config.windows(lambda i: (i + 1) % pattern != 0)
    ]
    cap = config.optional_number("final_logit_softcapping")
    return _finished(config, "gemma3", "Gemma3ForCausalLM", layers, block=BlockSpec(has_output_norms=True), soft_cap=cap,
                     max_model_len=config.max_position_embeddings)  # fmt: skip


GEMMA = Family(name="gemma", architectures={"GemmaForCausalLM": "gemma"}, resolve=resolve_gemma, names=lambda spec: LLAMA_NORMS)
GEMMA2 = Family(name="gemma2", architectures={"Gemma2ForCausalLM": "gemma2"}, resolve=resolve_gemma2, names=lambda spec: _OUTPUT_NORMS)
GEMMA3 = Family(
    name="gemma3",
    architectures={"Gemma3ForCausalLM": "gemma3_text", "Gemma3ForConditionalGeneration": "gemma3"},
    resolve=resolve_gemma3,
    names=lambda spec: _OUTPUT_NORMS,
)
