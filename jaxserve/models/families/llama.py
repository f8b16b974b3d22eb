"""The llama family: pre-norm RMS layers, grouped-query attention with RoPE, gated MLP. Config to spec, and names of tensors.

Covers Llama 1 to 3, and Mistral where it has no sliding window (then it is the same network). Knows no JAX; the modules are
built from the spec by `jaxserve.models.decoder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.config_values import activation, dtype, number, positive_int, token_ids
from jaxserve.models.rope_config import derived_max_model_len, resolve_rope
from jaxserve.models.spec import Biases, Family, KVGroup, ModelSpec, TensorSpec

# Values of transformers' config classes: a multimodal `text_config` may hold only what differs from them.
_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": {"intermediate_size": 14336, "max_position_embeddings": 131072, "num_key_value_heads": 8},
}

PREFIXES = ("model.", "", "language_model.model.", "model.language_model.", "language_model.", "model.language_model.model.")
"""Where source checkpoints keep the body: causal model, bare model, multimodal wrappers old and new."""

HEAD_PREFIXES = ("", "model.", "language_model.", "model.language_model.")

IGNORED = (
    r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$",
    r"(^|\.)self_attn\.(masked_bias|bias|mask)$",
    r"(^|\.)embed_positions\.weights?$",
    r"(^|\.)position_ids$",
    r"^(model\.)?(vision_tower|vision_model|vision_encoder|vision_embed_tokens|visual|image_newline|audio_tower|audio_model)(\.|$)",
    r"^(model\.)?(multi_modal_projector|mm_projector|multimodal_projector|connector|image_projection|audio_projector)(\.|$)",
)


def resolve(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Llama or Mistral config. CheckpointError where it asks for something this network does not have."""
    architectures = tuple(config.get("architectures") or ())
    is_mistral = "MistralForCausalLM" in architectures or (not architectures and config.get("model_type") == "mistral")
    if is_mistral and config.get("sliding_window", 4096) is not None:
        raise CheckpointError(
            f"Mistral with sliding_window {config.get('sliding_window', 4096)} is not supported; only checkpoints whose config.json "
            f"says sliding_window null are."
        )
    defaults = _DEFAULTS["mistral" if is_mistral else "llama"]
    hidden_size = positive_int(config, "hidden_size", 4096)
    num_layers = positive_int(config, "num_hidden_layers", 32)
    num_heads = positive_int(config, "num_attention_heads", 32)
    num_kv_heads = positive_int(config, "num_key_value_heads", defaults.get("num_key_value_heads", num_heads))
    if num_heads % num_kv_heads:
        raise CheckpointError(f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}.")
    head_dim = positive_int(config, "head_dim", hidden_size // num_heads)
    max_position_embeddings = positive_int(config, "max_position_embeddings", defaults["max_position_embeddings"])
    rope = resolve_rope(config, head_dim=head_dim, max_position_embeddings=max_position_embeddings)
    has_attention_bias = not is_mistral and bool(config.get("attention_bias", False))
    has_mlp_bias = not is_mistral and bool(config.get("mlp_bias", False))
    return ModelSpec(
        family=LLAMA.name,
        model_type=config.get("model_type") or ("mistral" if is_mistral else "llama"),
        architectures=architectures or ("MistralForCausalLM" if is_mistral else "LlamaForCausalLM",),
        vocab_size=positive_int(config, "vocab_size", 32000),
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_size=positive_int(config, "intermediate_size", defaults["intermediate_size"]),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        activation=activation(config),
        rope=rope,
        biases=Biases(qkv=has_attention_bias, attention_out=has_attention_bias, mlp=has_mlp_bias),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=max_position_embeddings,
        derived_max_model_len=derived_max_model_len(rope, max_position_embeddings),
        dtype=dtype(config),
        bos_token_ids=token_ids(config, "bos_token_id"),
        eos_token_ids=token_ids(config, "eos_token_id"),
        kv_groups=(KVGroup(tuple(range(num_layers))),),
    )


def tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """All logical tensors: embedding, layers, final norm and, where the head is its own, `lm_head.weight` (optional)."""
    d, vocab = spec.hidden_size, spec.vocab_size
    heads = tuple(prefix + "lm_head.weight" for prefix in HEAD_PREFIXES)
    embed = _body("embed_tokens.weight", (vocab, d))
    if spec.is_tied:
        # Writers that drop duplicate tensors may keep a tied embedding under the head's name.
        return (TensorSpec(embed.name, embed.shape, embed.sources + heads), *_layers(spec), _body("norm.weight", (d,)))
    head = TensorSpec("lm_head.weight", (vocab, d), heads, is_optional=True)
    return (embed, *_layers(spec), _body("norm.weight", (d,)), head)


def _layers(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    d, f = spec.hidden_size, spec.mlp_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = (
        ("self_attn.q_proj", query, d, spec.biases.qkv),
        ("self_attn.k_proj", kv, d, spec.biases.qkv),
        ("self_attn.v_proj", kv, d, spec.biases.qkv),
        ("self_attn.o_proj", d, query, spec.biases.attention_out),
        ("mlp.gate_proj", f, d, spec.biases.mlp),
        ("mlp.up_proj", f, d, spec.biases.mlp),
        ("mlp.down_proj", d, f, spec.biases.mlp),
    )
    result = []
    for i in range(spec.num_layers):
        result += [_body(f"layers.{i}.{norm}.weight", (d,)) for norm in ("input_layernorm", "post_attention_layernorm")]
        for name, num_out, num_in, has_bias in projections:
            result.append(_body(f"layers.{i}.{name}.weight", (num_out, num_in)))
            if has_bias:
                result.append(_body(f"layers.{i}.{name}.bias", (num_out,)))
    return tuple(result)


def _body(name: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, shape, tuple(prefix + name for prefix in PREFIXES))


LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "MistralForCausalLM"),
    model_types=("llama", "mistral"),
    resolve=resolve,
    tensors=tensors,
    ignored=IGNORED,
    tied_head=r"(^|\.)lm_head\.weight$",
)
