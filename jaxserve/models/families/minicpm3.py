"""MiniCPM3: latent attention with a plain MLP; multipliers on embedding, residual additions and what the head reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import LLAMA_NORMS, Config
from jaxserve.models.families.deepseek import latent_attention
from jaxserve.models.spec import BlockSpec, EmbeddingSpec, Family, LayerSpec, ModelSpec, NormSpec

_DEFAULTS = {
    "vocab_size": 73448, "hidden_size": 2560, "intermediate_size": 6400, "num_hidden_layers": 62, "num_attention_heads": 40,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "kv_lora_rank": 256, "q_lora_rank": 768,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
}  # fmt: skip


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' MiniCPM3Config."""
    config = Config(values, _DEFAULTS)
    config.values["v_head_dim"] = config.size("v_head_dim", config.hidden_size // config.num_heads)
    attention = latent_attention(config, is_interleaved=False)
    layer = LayerSpec(attention=attention, mlp=config.mlp(has_bias=config.flag("mlp_bias")))
    return config.model(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        [layer] * config.num_layers,
        NormSpec(config.number("rms_norm_eps")),
        block=BlockSpec(residual_multiplier=config.number("scale_depth") / config.num_layers**0.5),
        embedding=EmbeddingSpec(multiplier=config.number("scale_emb")),
        multiplier=config.number("dim_model_base") / config.hidden_size,
    )


MINICPM3 = Family(name="minicpm3", architectures={"MiniCPM3ForCausalLM": "minicpm3"}, resolve=resolve, names=lambda spec: LLAMA_NORMS)
