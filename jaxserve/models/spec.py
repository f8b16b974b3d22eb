"""What a model is, as data: the frozen, hashable description that a family derives from a checkpoint's `config.json`.

A model is a stack of layers, a layer an attention and an MLP with norms around them; each part is described by a small spec of
its own, and layers of equal kind share equal specs. Everything that the decoder, the page arrays and the memory plan need is in
here. Knows no JAX, reads no files, and knows no architecture: families fill it in (`families/`), `registry.py` finds the family,
`tensors.py` lists the logical tensors, `load.py` and `decoder.py` build modules. Letters: N query heads, K kv heads, H head dim,
D model, F mlp, V vocab, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary embedding: which table, with every default already filled in. `rope.py` holds the formulas.

    Attributes:
        kind: default, linear, dynamic, llama3, yarn or longrope.
        theta: Base of the frequencies.
        rotary_dim: Leading dimensions of a head that are rotated; even, at most H.
        attention_factor: Multiplies cos and sin (yarn, longrope).
        factor: Context extension (linear, dynamic, llama3, yarn).
        original_length: Where the table depends on the sequence's length (dynamic, longrope): the longest sequence that uses
            the original table. None for every other kind.
        pretrained_length: Context length before extension that the formulas of llama3 and yarn read.
        low_freq_factor, high_freq_factor: llama3's band limits.
        beta_fast, beta_slow, is_truncated: yarn's ramp, and whether its ends are rounded outwards to integers.
        short_factors, long_factors: longrope's divisors, one for each frequency.
        is_interleaved: Pairs are neighbouring dimensions (2i, 2i + 1) instead of (i, i + half); loading reorders queries and keys.
        freq_divisors: Divisors of the default frequencies as stored in a checkpoint (GGUF `rope_freqs`), one for each.
    """

    kind: str
    theta: float
    rotary_dim: int
    attention_factor: float = 1.0
    factor: float = 1.0
    original_length: int | None = None
    pretrained_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    freq_divisors: tuple[float, ...] = ()
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A normalization over the last axis.

    Attributes:
        eps: Added to the mean square or variance.
        is_centered: Subtract the mean (LayerNorm); else RMS.
        has_bias: Add a bias after the weight.
        is_offset: The weight is stored minus one (Gemma).
        is_wide: Multiply by the weight in float32, before rounding to the activations' dtype; it matters in bfloat16 only.
        has_weight: Multiply by a weight at all (OLMo 1 does not).
    """

    eps: float
    is_centered: bool = False
    has_bias: bool = False
    is_offset: bool = False
    is_wide: bool = False
    has_weight: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class QKNormSpec:
    """Normalization of queries and keys.

    Attributes:
        norm: Its formula.
        scope: "head": over each head, one weight [H]; "heads": over each head, a weight for each [N, H]; "all": over all heads
            together, weight [N * H]; "plain": over each head, no weight, after the rotation (Llama 4).
    """

    norm: NormSpec
    scope: str = "head"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Grouped-query attention.

    Attributes:
        rope: None: no rotation.
        scale: Multiplies the dot products.
        window: A token sees the last `window` positions, itself included; None sees all.
        chunk: A token sees its own chunk of `chunk` positions alone, up to itself (Llama 4).
        soft_cap: Scores become `soft_cap * tanh(score / soft_cap)` (Gemma 2).
        has_sinks: A learned logit for each head that takes part in the softmax without a value (GPT-OSS).
        clip: Queries, keys and values are clipped to [-clip, clip] (OLMo).
        has_gate: Each head's output is multiplied by the sigmoid of a projection of its own (Qwen3-Next).
        temperature: (floor, scale): queries are multiplied by `1 + scale * log(1 + floor((position + 1) / floor))` (Llama 4).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    scale: float
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    qk_norm: QKNormSpec | None = None
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    clip: float | None = None
    has_gate: bool = False
    temperature: tuple[float, float] | None = None

    @property
    def num_query_groups(self) -> int:
        """G, query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one small vector per position.

    Pages hold that vector, normalized, and behind it the part of the key that is rotated and shared by the heads.

    Attributes:
        query_rank: Width of the vector that queries come from; None: they come from the residual stream.
        kv_rank: Width of the vector that keys and values come from.
        nope_dim, rope_dim, value_dim: Of each head: key without position, rotated key, value.
        norm: Of both vectors.
        has_bias: On the projections to the vectors and on the output.
    """

    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeSpec
    scale: float
    norm: NormSpec
    has_bias: bool = False
    window: None = None
    chunk: None = None

    @property
    def head_dim(self) -> int:
        """Width of what is stored for a position."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentSpec:
    """A gated delta net in place of attention (arXiv 2412.06464): what it knows of earlier tokens is one matrix for each value head.

    It has no pages and no positions. A key head with its query serves the same number of neighbouring value heads each.

    Attributes:
        key_dim, value_dim: Of each head.
        kernel_size: Tokens that the convolution over queries, keys and values sees, the current one included.
        activation: After the convolution, a key of `mlp.ACTIVATIONS`.
        norm: Of each value head's output, before its gate.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    activation: str
    norm: NormSpec
    rope: None = None

    @property
    def num_value_groups(self) -> int:
        """Value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def values_dim(self) -> int:
        """Width of all value heads of one key head together."""
        return self.num_value_groups * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Width of what the convolution sees of one key head: query, key and its values."""
        return 2 * self.key_dim + self.values_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPSpec:
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` without a gate.

    Attributes:
        size: F, the width inside.
        activation: A key of `mlp.ACTIVATIONS`.
    """

    size: int
    activation: str
    is_gated: bool = True
    has_bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MoESpec:
    """A mixture of experts in place of an MLP.

    Attributes:
        size: F, the width inside an expert.
        top_k: Experts of a token.
        scoring: "softmax" over all experts, or "sigmoid" of each.
        is_normalized: A token's weights are divided by their sum.
        scale: Multiplies the weights.
        has_score_bias: A bias that takes part in the choice and not in the weights (DeepseekV3TopkRouter).
        num_groups, num_top_groups, num_group_scores: Experts are chosen from the best groups alone, ranked by the sum of their best scores.
        is_input_weighted: The weight multiplies what an expert reads instead of what it gives (Llama4TextMoe).
        clamp: (alpha, limit) of GPT-OSS's activation.
        shared_size: Width of an expert that sees every token; None: there is none.
        has_shared_gate: What it gives is multiplied by the sigmoid of a projection (Qwen2MoeSparseMoeBlock).
    """

    num_experts: int
    top_k: int
    size: int
    activation: str
    scoring: str = "softmax"
    is_normalized: bool = False
    scale: float = 1.0
    has_score_bias: bool = False
    num_groups: int = 1
    num_top_groups: int = 1
    num_group_scores: int = 1
    is_input_weighted: bool = False
    has_router_bias: bool = False
    has_expert_bias: bool = False
    clamp: tuple[float, float] | None = None
    shared_size: int | None = None
    has_shared_gate: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One layer: attention or a recurrent net, and an MLP or a mixture of them."""

    attention: AttentionSpec | LatentAttentionSpec | RecurrentSpec
    mlp: MLPSpec | MoESpec


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSpec:
    """How norms and parts stand in a layer, the same for all layers of a model.

    Attributes:
        has_input_norms: Attention and MLP each read a normalized residual stream (all models but OLMo 2 and its kind).
        has_output_norms: What each gives is normalized before it is added.
        is_parallel: Both read the same residual stream and are added at once.
        has_shared_norm: With is_parallel: one norm before both instead of one each.
        residual_multiplier: Multiplies what is added.
    """

    has_input_norms: bool = True
    has_output_norms: bool = False
    is_parallel: bool = False
    has_shared_norm: bool = False
    residual_multiplier: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSpec:
    """From hidden states to logits.

    Attributes:
        is_tied: The head is the embedding.
        multiplier: Multiplies the logits.
        soft_cap: Logits become `soft_cap * tanh(logit / soft_cap)`, after the multiplier.
    """

    is_tied: bool
    has_bias: bool = False
    multiplier: float = 1.0
    soft_cap: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSpec:
    """From token ids to the residual stream.

    Attributes:
        multiplier: Multiplies the embedding, rounded to the activations' dtype first.
        num_positions: Rows of a learned position embedding that is added; None: there is none.
        position_offset: Row of position 0 (OPT keeps two rows before it).
    """

    multiplier: float = 1.0
    num_positions: int | None = None
    position_offset: int = 0


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a page table. The group's j-th layer uses page array j.

    Attributes:
        window, chunk: As in `AttentionSpec`; both None for layers that see everything.
    """

    layer_ids: tuple[int, ...]
    window: int | None = None
    chunk: int | None = None

    @property
    def num_layers(self) -> int:
        """How many layers the group has."""
        return len(self.layer_ids)


def kv_groups(layers: Sequence[LayerSpec]) -> tuple[KVGroup, ...]:
    """Layers with pages by what they see, cut into groups of at most as many layers as the rarest kind has: one pool of pages serves all.

    Where kinds are about equally frequent (up to 1.5 to 1), the groups are as long as the most frequent one: a few page arrays that a
    shorter group leaves unused cost less than more page tables.
    """
    kinds: dict[tuple[int | None, int | None], list[int]] = {}
    for i, layer in enumerate(layers):
        if not isinstance(layer.attention, RecurrentSpec):
            kinds.setdefault((layer.attention.window, layer.attention.chunk), []).append(i)
    shortest, longest = min(map(len, kinds.values())), max(map(len, kinds.values()))
    size = longest if longest <= 1.5 * shortest else shortest
    return tuple(
        KVGroup(tuple(ids[start : start + size]), window, chunk)
        for (window, chunk), ids in kinds.items()
        for start in range(0, len(ids), size)
    )


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One decoder-only model.

    Attributes:
        family: Name of the family that made the spec.
        model_type, architectures: As the checkpoint calls itself.
        norm: Formula of the layers' norms and of the last one.
        derived_max_model_len: Longest sequence the position encoding is meant for, in tokens.
        dtype: bfloat16, float16 or float32, as the config names it; None where it does not.
        bos_token_ids, eos_token_ids: As in the config; generation_config and tokenizer may add to them.
    """

    family: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    embedding: EmbeddingSpec = EmbeddingSpec()
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    block: BlockSpec = BlockSpec()
    head: HeadSpec
    derived_max_model_len: int
    dtype: str | None
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @cached_property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Groups of layers with equal attention kind; together they hold every layer but the recurrent ones once."""
        return kv_groups(self.layers)

    @cached_property
    def kv_places(self) -> tuple[tuple[int, int] | None, ...]:
        """For each layer its group and its place in it, which is the index of its page array; None for recurrent layers."""
        places = {layer: (x, j) for x, group in enumerate(self.kv_groups) for j, layer in enumerate(group.layer_ids)}
        return tuple(places.get(layer) for layer in range(self.num_layers))

    @property
    def num_page_arrays(self) -> int:
        """Page arrays: as many as the longest group has layers."""
        return max(group.num_layers for group in self.kv_groups)

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """Parts (2: keys and values; 1: latent vectors), K and H of every page array."""
        attention = self.paged_attention
        if isinstance(attention, LatentAttentionSpec):
            return 1, 1, attention.head_dim
        return 2, attention.num_kv_heads, attention.head_dim

    @property
    def paged_attention(self) -> AttentionSpec | LatentAttentionSpec:
        """Attention of the first layer that has pages; all those layers have equal heads."""
        return next(layer.attention for layer in self.layers if not isinstance(layer.attention, RecurrentSpec))

    @cached_property
    def recurrent_layers(self) -> tuple[RecurrentSpec, ...]:
        """The recurrent layers, in order; each has a state of its own for every sequence."""
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, RecurrentSpec))

    @cached_property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different rotary embeddings of the layers."""
        return tuple(dict.fromkeys(layer.attention.rope for layer in self.layers if layer.attention.rope is not None))

    @property
    def rope_original_length(self) -> int | None:
        """`RopeSpec.original_length` of the layers that have one."""
        return next((rope.original_length for rope in self.ropes if rope.original_length is not None), None)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a logical tensor lies in a source tensor that holds several: `source.reshape(view)[index]`, then the last two axes swapped.

    Attributes:
        source_shape: What the source must be.
        view: The same elements with the parts on axes of their own.
        index: Integers and slices, one for each leading axis of `view`.
        is_transposed: The source keeps the input axis first (GPT-2's Conv1D, stacked experts).
    """

    source_shape: tuple[int, ...]
    view: tuple[int, ...] = ()
    index: tuple[int | slice, ...] = ()
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor of a checkpoint.

    Attributes:
        name: Logical name, see `tensors.py`.
        shape: A projection is `[out, in]`.
        sources: Names it may have in a source checkpoint; the first that exists is it.
        is_optional: May be missing (an untied head falls back to the embedding).
        cut: None where the source tensor is the logical one.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    is_optional: bool = False
    cut: Cut | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Models of one layout. Adding a family is adding one of these to `registry.FAMILIES`.

    Attributes:
        name: What `ModelSpec.family` says.
        architectures: Values of the config's `architectures` that belong to it, each with its `model_type`, for configs that
            name no architecture.
        resolve: Makes the spec from a text model's config; CheckpointError where it cannot be served exactly.
        names: Where the source keeps what: logical name -> source name without prefix, or that with the cut. {i} stands for the layer, and
            {e} for the expert unless the expert's own number is there. A logical name that is missing is its own source name.
        prefixes: What may stand before source names of the body.
        ignored: Regular expressions, searched in source names, of tensors left out on purpose, beside `tensors.IGNORED`.
    """

    name: str
    architectures: Mapping[str, str]
    resolve: Callable[[Mapping[str, Any]], ModelSpec]
    names: Callable[[ModelSpec], Mapping[str, str | tuple[str, Cut]]] = field(default=lambda spec: {})
    prefixes: tuple[str, ...] = ("model.", "")
    ignored: Callable[[ModelSpec], tuple[str, ...]] = field(default=lambda spec: ())
