"""EXAONE 4: norms after attention and MLP alone, normalized queries and keys; where some layers have a window, only those rotate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Config
from jaxserve.models.families.olmo import OUTPUT_NORMS
from jaxserve.models.spec import BlockSpec, Family, LayerSpec, ModelSpec, NormSpec, QKNormSpec

_DEFAULTS = {
    "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4,
}  # fmt: skip


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Exaone4Config."""
    config = Config(values, _DEFAULTS)
    norm, rope, mlp = NormSpec(config.number("rms_norm_eps")), config.rope(), config.mlp()
    pattern = config.values["sliding_window_pattern"]
    period = len(pattern) if isinstance(pattern, str) else pattern

    def is_sliding(i: int) -> bool:
        return bool(period) and (i + 1) % period != 0

    windows = config.windows(is_sliding)
    rotates_all = not config.values.get("sliding_window")
    layers = [
        LayerSpec(
            attention=config.attention(rope if rotates_all or window is not None else None, window=window, qk_norm=QKNormSpec(norm=norm)),
            mlp=mlp,
        )
        for window in windows
    ]
    block = BlockSpec(has_input_norms=False, has_output_norms=True)
    return config.model("exaone4", "Exaone4ForCausalLM", layers, norm, block=block)


EXAONE4 = Family(name="exaone4", architectures={"Exaone4ForCausalLM": "exaone4"}, resolve=resolve, names=lambda spec: OUTPUT_NORMS)
