"""GPT-2: learned positions, LayerNorm, an MLP without a gate, matrices stored with the input axis first (Conv1D)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.families.common import Config
from jaxserve.models.spec import Cut, EmbeddingSpec, Family, LayerSpec, ModelSpec, NormSpec

ALIASES = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner", "hidden_act": "activation_function",
}  # fmt: skip
DEFAULTS = {
    "vocab_size": 50257, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 1024,
    "hidden_act": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "tie_word_embeddings": True,
}  # fmt: skip
PREFIXES = ("transformer.", "")
NAMES = {
    "embed_tokens.weight": "wte.weight",
    "embed_positions.weight": "wpe.weight",
    "norm.weight": "ln_f.weight",
    "norm.bias": "ln_f.bias",
    **{
        f"layers.{{i}}.{ours}.{kind}": f"h.{{i}}.{theirs}.{kind}"
        for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2"))
        for kind in ("weight", "bias")
    },
}


def resolve(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config of transformers' GPT2Config."""
    config = Config(values, DEFAULTS, ALIASES)
    config.refuse("add_cross_attention", unless=False, reason="this is a decoder without an encoder")
    mlp = config.mlp(size=config.size("intermediate_size", 4 * config.hidden_size), is_gated=False, has_bias=True)
    scale = config.head_dim**-0.5 if config.flag("scale_attn_weights") else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx")
    layers = [
        LayerSpec(attention=config.attention(None, scale=scale / (i + 1 if by_layer else 1), has_qkv_bias=True, has_out_bias=True), mlp=mlp)
        for i in range(config.num_layers)
    ]
    norm = NormSpec(config.number("layer_norm_epsilon"), is_centered=True, has_bias=True)
    embedding = EmbeddingSpec(num_positions=config.max_position_embeddings)
    return config.model("gpt2", "GPT2LMHeadModel", layers, norm, embedding=embedding)


def names(spec: ModelSpec) -> Mapping[str, str | tuple[str, Cut]]:
    """Every matrix is turned; queries, keys and values are thirds of one."""
    d, f = spec.hidden_size, spec.layers[0].mlp.size
    result: dict[str, str | tuple[str, Cut]] = {**NAMES}
    every = slice(None)
    for j, name in enumerate("qkv"):
        result[f"layers.{{i}}.self_attn.{name}_proj.weight"] = "h.{i}.attn.c_attn.weight", Cut((d, 3 * d), (d, 3, d), (every, j), True)
        result[f"layers.{{i}}.self_attn.{name}_proj.bias"] = "h.{i}.attn.c_attn.bias", Cut((3 * d,), (3, d), (j,))
    for ours, theirs, rows, columns in (
        ("self_attn.o_proj", "attn.c_proj", d, d),
        ("mlp.up_proj", "mlp.c_fc", d, f),
        ("mlp.down_proj", "mlp.c_proj", f, d),
    ):
        result[f"layers.{{i}}.{ours}.weight"] = f"h.{{i}}.{theirs}.weight", Cut((rows, columns), (rows, columns), (every,), True)
        result[f"layers.{{i}}.{ours}.bias"] = f"h.{{i}}.{theirs}.bias"
    return result


GPT2 = Family(name="gpt2", architectures={"GPT2LMHeadModel": "gpt2"}, resolve=resolve, names=names, prefixes=PREFIXES)
