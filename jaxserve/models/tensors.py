"""The logical tensors of a model: names and shapes, from the spec alone, and where a family's checkpoints keep each.

A converted checkpoint holds one array under each of these names, whatever the source called it and however it fused it. Names of
parts follow Hugging Face's Llama; norms are called by what they normalize. Knows no JAX and no file format; `convert.match` finds the
tensors, `load.py` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.models.spec import (
    AttentionSpec,
    Family,
    LatentAttentionSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    RecurrentSpec,
    TensorSpec,
)

WRAPPERS = ("", "language_model.", "model.language_model.")
"""Where multimodal checkpoints, new and old, keep their text model."""

IGNORED = (
    r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$",
    r"(^|\.)(attn|attention|self_attn)\.(masked_bias|bias|mask)$",
    r"(^|\.)position_ids$",
    r"^(model\.)?(vision_tower|vision_model|vision_encoder|vision_embed_tokens|visual|image_newline|audio_tower|audio_model)(\.|$)",
    r"^(model\.)?(multi_modal_projector|mm_projector|multimodal_projector|connector|image_projection|audio_projector)(\.|$)",
)
"""Tensors of any family that the text model does not need: tables that are computed, and other modalities."""

TIED_HEAD = r"(^|\.)(lm_head|embed_out)\.weight$"
"""A head that a tied checkpoint stores although it is the embedding."""

OPTIONAL = "lm_head.weight"
"""The one tensor that may be missing: an untied head falls back to the embedding."""

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def logical_tensors(family: Family, spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """Every logical tensor of the spec with its sources, in file order: embedding, layers, last norm, head."""
    names = family.names(spec)
    body = [wrapper + prefix for wrapper in WRAPPERS for prefix in family.prefixes]
    result = []
    for name, shape in tensor_shapes(spec):
        layer, expert = _number(name, "layers."), _number(name, ".experts.")
        key = name.replace(f"layers.{layer}.", "layers.{i}.", 1)
        source = names.get(key) or names.get(general := key.replace(f".experts.{expert}.", ".experts.{e}."), general)
        template, cut = (source, None) if isinstance(source, str) else source
        is_head = name.startswith("lm_head.")
        prefixes = [wrapper + p for wrapper in WRAPPERS for p in ("", "model.")] if is_head else body
        sources = [prefix + template.replace("{i}", layer).replace("{e}", expert) for prefix in prefixes]
        if name == "embed_tokens.weight" and spec.head.is_tied:
            # Writers that drop duplicate tensors may keep a tied embedding under the head's name.
            sources += [wrapper + "lm_head.weight" for wrapper in WRAPPERS]
        result.append(TensorSpec(name, shape, tuple(dict.fromkeys(sources)), is_optional=name == OPTIONAL, cut=cut))
    return tuple(result)


def ignored_patterns(family: Family, spec: ModelSpec) -> tuple[str, ...]:
    """What is left out on purpose of a checkpoint of this spec."""
    return (*family.ignored(spec), *IGNORED, *((TIED_HEAD,) if spec.head.is_tied else ()))


def _number(name: str, before: str) -> str:
    """The number after a part of the name; empty where it has none."""
    return name.partition(before)[2].partition(".")[0]


def tensor_shapes(spec: ModelSpec) -> Shapes:
    """Name and shape of every logical tensor, in file order."""
    d, vocab = spec.hidden_size, spec.vocab_size
    yield "embed_tokens.weight", (vocab, d)
    if spec.embedding.num_positions is not None:
        yield "embed_positions.weight", (spec.embedding.num_positions + spec.embedding.position_offset, d)
    for i, layer in enumerate(spec.layers):
        for name in norm_names(spec):
            yield from norm_shapes(f"layers.{i}.{name}", spec.norm, d)
        match layer.attention:
            case RecurrentSpec() as recurrent:
                yield from _recurrent(f"layers.{i}.linear_attn.", recurrent, d)
            case LatentAttentionSpec() as latent:
                yield from _latent_attention(f"layers.{i}.self_attn.", latent, d)
            case AttentionSpec() as attention:
                yield from _attention(f"layers.{i}.self_attn.", attention, d)
        prefix = f"layers.{i}.mlp."
        yield from _moe(prefix, layer.mlp, d) if isinstance(layer.mlp, MoESpec) else _mlp(prefix, layer.mlp, d)
    yield from norm_shapes("norm", spec.norm, d)
    if not spec.head.is_tied:
        yield "lm_head.weight", (vocab, d)
    if spec.head.has_bias:
        yield "lm_head.bias", (vocab,)


def norm_names(spec: ModelSpec) -> tuple[str, ...]:
    """The norms of a layer, by what they normalize: what attention and MLP read, and what they give."""
    block = spec.block
    inputs = ("attention_norm",) if block.has_shared_norm else ("attention_norm", "mlp_norm")
    return (inputs if block.has_input_norms else ()) + (("attention_out_norm", "mlp_out_norm") if block.has_output_norms else ())


def norm_shapes(name: str, norm: NormSpec, *shape: int) -> Shapes:
    """The tensors of one norm."""
    if norm.has_weight:
        yield f"{name}.weight", shape
    if norm.has_bias:
        yield f"{name}.bias", shape


def _attention(prefix: str, spec: AttentionSpec, d: int) -> Shapes:
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield from _linear(prefix + "q_proj", query, d, spec.has_qkv_bias)
    yield from _linear(prefix + "k_proj", kv, d, spec.has_qkv_bias)
    yield from _linear(prefix + "v_proj", kv, d, spec.has_qkv_bias)
    if spec.has_gate:
        yield from _linear(prefix + "gate_proj", query, d, spec.has_qkv_bias)
    yield from _linear(prefix + "o_proj", d, query, spec.has_out_bias)
    if spec.qk_norm is not None:
        shapes: dict[str, list[tuple[int, ...]]] = {
            "head": [(spec.head_dim,)] * 2,
            "heads": [(spec.num_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim)],
            "all": [(query,), (kv,)],
        }
        for name, shape in zip(("q_norm", "k_norm"), shapes.get(spec.qk_norm.scope, []), strict=False):
            yield from norm_shapes(prefix + name, spec.qk_norm.norm, *shape)
    if spec.has_sinks:
        yield prefix + "sinks", (spec.num_heads,)


def _latent_attention(prefix: str, spec: LatentAttentionSpec, d: int) -> Shapes:
    query = spec.num_heads * (spec.nope_dim + spec.rope_dim)
    if spec.query_rank is None:
        yield prefix + "q_proj.weight", (query, d)
    else:
        yield from _linear(prefix + "q_a_proj", spec.query_rank, d, spec.has_bias)
        yield from norm_shapes(prefix + "q_a_layernorm", spec.norm, spec.query_rank)
        yield prefix + "q_b_proj.weight", (query, spec.query_rank)
    yield from _linear(prefix + "kv_a_proj_with_mqa", spec.kv_rank + spec.rope_dim, d, spec.has_bias)
    yield from norm_shapes(prefix + "kv_a_layernorm", spec.norm, spec.kv_rank)
    yield prefix + "kv_b_proj.weight", (spec.num_heads * (spec.nope_dim + spec.value_dim), spec.kv_rank)
    yield from _linear(prefix + "o_proj", d, spec.num_heads * spec.value_dim, spec.has_bias)


def _recurrent(prefix: str, spec: RecurrentSpec, d: int) -> Shapes:
    keys, values = spec.num_key_heads * spec.key_dim, spec.num_value_heads * spec.value_dim
    sizes = {"q": keys, "k": keys, "v": values, "gate": values, "rate": spec.num_value_heads, "decay": spec.num_value_heads}
    for name, size in sizes.items():
        yield f"{prefix}{name}_proj.weight", (size, d)
    for name in "qkv":
        yield f"{prefix}{name}_conv.weight", (sizes[name], spec.kernel_size)
    yield prefix + "decay_log", (spec.num_value_heads,)
    yield prefix + "decay_bias", (spec.num_value_heads,)
    yield from norm_shapes(prefix + "norm", spec.norm, spec.value_dim)
    yield prefix + "o_proj.weight", (d, values)


def _mlp(prefix: str, spec: MLPSpec, d: int) -> Shapes:
    if spec.is_gated:
        yield from _linear(prefix + "gate_proj", spec.size, d, spec.has_bias)
    yield from _linear(prefix + "up_proj", spec.size, d, spec.has_bias)
    yield from _linear(prefix + "down_proj", d, spec.size, spec.has_bias)


def _moe(prefix: str, spec: MoESpec, d: int) -> Shapes:
    yield from _linear(prefix + "router", spec.num_experts, d, spec.has_router_bias)
    if spec.has_score_bias:
        yield prefix + "router.score_bias", (spec.num_experts,)
    for e in range(spec.num_experts):
        expert = MLPSpec(size=spec.size, activation=spec.activation, has_bias=spec.has_expert_bias)
        yield from _mlp(f"{prefix}experts.{e}.", expert, d)
    if spec.shared_size is not None:
        yield from _mlp(prefix + "shared_expert.", MLPSpec(size=spec.shared_size, activation=spec.activation), d)
        if spec.has_shared_gate:
            yield prefix + "shared_expert_gate.weight", (1, d)


def _linear(name: str, num_out: int, num_in: int, has_bias: bool) -> Shapes:
    yield f"{name}.weight", (num_out, num_in)
    if has_bias:
        yield f"{name}.bias", (num_out,)
