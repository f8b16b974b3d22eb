"""SmolLM3: Llama's network; every fourth layer does not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config
from jaxserve.models.spec import Family, LayerSpec, ModelSpec, NormSpec

_DEFAULTS = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}  # fmt: skip


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' SmolLM3Config."""
    config = Config(values, _DEFAULTS)
    rotates = config.values.get("no_rope_layers")
    if rotates is None:
        rotates = [(i + 1) % config.size("no_rope_layer_interval") != 0 for i in range(config.num_layers)]
    rope, mlp, has_bias = (
        config.rope(default_theta=2_000_000.0),
        config.mlp(has_bias=config.flag("mlp_bias")),
        config.flag("attention_bias"),
    )
    # transformers: without layer_types, windows are on the layers that do not rotate, where they are used at all.
    windows = config.windows(lambda i: not rotates[i]) if config.flag("use_sliding_window") else [None] * config.num_layers
    layers = [
        LayerSpec(
            attention=config.attention(rope if is_rotated else None, window=window, has_qkv_bias=has_bias, has_out_bias=has_bias), mlp=mlp
        )
        for is_rotated, window in zip(rotates, windows, strict=True)
    ]
    return config.model("smollm3", "SmolLM3ForCausalLM", layers, NormSpec(config.number("rms_norm_eps")))


SMOLLM3 = Family(name="smollm3", architectures={"SmolLM3ForCausalLM": "smollm3"}, resolve=resolve, names=lambda spec: LLAMA_NORMS)
