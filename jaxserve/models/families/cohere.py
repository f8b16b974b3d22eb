"""Command R (Cohere) and Command R7B (Cohere 2): attention and MLP in parallel after one LayerNorm without bias, scaled logits, tied head.

Rotated pairs are neighbouring dimensions. In Cohere 2 only the layers with a window rotate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config
from jaxserve.models.spec import AttentionSpec, BlockSpec, Family, LayerSpec, ModelSpec, NormSpec, QKNormSpec

_DEFAULTS = {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40, "num_attention_heads": 64,
    "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True,
}  # fmt: skip


def _finished(config: Config, family: str, architecture: str, attentions: list[AttentionSpec]) -> ModelSpec:
    mlp = config.mlp()
    layers = [LayerSpec(attention=attention, mlp=mlp) for attention in attentions]
    block = BlockSpec(is_parallel=True, has_shared_norm=True)
    return config.model(family, architecture, layers, _norm(config), block=block, multiplier=config.number("logit_scale"))


def _norm(config: Config) -> NormSpec:
    return NormSpec(config.number("layer_norm_eps"), is_centered=True)


def resolve_cohere(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' CohereConfig."""
    config = Config(values, _DEFAULTS)
    qk_norm = QKNormSpec(norm=_norm(config), scope="heads") if config.flag("use_qk_norm") else None
    rope = config.rope(default_theta=500_000.0, is_interleaved=True)
    has_bias = config.flag("attention_bias")
    attention = config.attention(rope, has_qkv_bias=has_bias, has_out_bias=has_bias, qk_norm=qk_norm)
    return _finished(config, "cohere", "CohereForCausalLM", [attention] * config.num_layers)


def resolve_cohere2(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Cohere2Config."""
    config = Config(values, _DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4})
    rope, pattern, has_bias = config.rope(is_interleaved=True), config.size("sliding_window_pattern"), config.flag("attention_bias")
    attentions = [
        config.attention(None if window is None else rope, window=window, has_qkv_bias=has_bias, has_out_bias=has_bias)
        for window in config.windows(lambda i: (i + 1) % pattern != 0)
    ]
    return _finished(config, "cohere2", "Cohere2ForCausalLM", attentions)


COHERE = Family(name="cohere", architectures={"CohereForCausalLM": "cohere"}, resolve=resolve_cohere, names=lambda spec: LLAMA_NORMS)
COHERE2 = Family(name="cohere2", architectures={"Cohere2ForCausalLM": "cohere2"}, resolve=resolve_cohere2, names=lambda spec: LLAMA_NORMS)
