"""OLMo 1, 2 and 3. The first: norms without weights, queries, keys and values clipped in some models.

OLMo 2 and 3: norms after attention and MLP alone, queries and keys normalized over all heads together; windows in 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Config
from jaxserve.models.rope_config import with_rope_of
from jaxserve.models.spec import BlockSpec, Family, LayerSpec, ModelSpec, NormSpec, QKNormSpec

_OLMO = {
    "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}  # fmt: skip
_OLMO2 = _OLMO | {"rms_norm_eps": 1e-5}
_EPS = 1e-5  # OlmoLayerNorm's: the config has no field for it
OUTPUT_NORMS = {
    "layers.{i}.attention_out_norm.weight": "layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.mlp_out_norm.weight": "layers.{i}.post_feedforward_layernorm.weight",
}


def resolve_olmo(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' OlmoConfig."""
    config = Config(values, _OLMO)
    norm, has_bias = NormSpec(_EPS, is_centered=True, has_weight=False), config.flag("attention_bias")
    clip = config.optional_number("clip_qkv")
    attention = config.attention(config.rope(), has_qkv_bias=has_bias, has_out_bias=has_bias, clip=clip)
    return config.model("olmo", "OlmoForCausalLM", [LayerSpec(attention=attention, mlp=config.mlp())] * config.num_layers, norm)


def _finished(config: Config, family: str, architecture: str, ropes: Mapping[bool, Any], windows: list[int | None]) -> ModelSpec:
    norm, has_bias, mlp = NormSpec(config.number("rms_norm_eps"), is_wide=True), config.flag("attention_bias"), config.mlp()
    options = {"has_qkv_bias": has_bias, "has_out_bias": has_bias, "qk_norm": QKNormSpec(norm=norm, scope="all")}
    layers = [LayerSpec(attention=config.attention(ropes[w is not None], window=w, **options), mlp=mlp) for w in windows]
    return config.model(family, architecture, layers, norm, block=BlockSpec(has_input_norms=False, has_output_norms=True))


def resolve_olmo2(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Olmo2Config."""
    config = Config(values, _OLMO2)
    return _finished(config, "olmo2", "Olmo2ForCausalLM", {False: config.rope()}, [None] * config.num_layers)


def resolve_olmo3(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' Olmo3Config."""
    config = Config(values, _OLMO2 | {"sliding_window": 4096})
    full, local = (with_rope_of(config.values, kind) for kind in ("full_attention", "sliding_attention"))
    ropes = {False: config.rope(full, default_theta=500_000.0), True: config.rope(local, default_theta=500_000.0)}
    return _finished(config, "olmo3", "Olmo3ForCausalLM", ropes, config.windows(lambda i: (i + 1) % 4 != 0))


OLMO = Family(name="olmo", architectures={"OlmoForCausalLM": "olmo"}, resolve=resolve_olmo)
OLMO2 = Family(name="olmo2", architectures={"Olmo2ForCausalLM": "olmo2"}, resolve=resolve_olmo2, names=lambda spec: OUTPUT_NORMS)
OLMO3 = Family(name="olmo3", architectures={"Olmo3ForCausalLM": "olmo3"}, resolve=resolve_olmo3, names=lambda spec: OUTPUT_NORMS)
