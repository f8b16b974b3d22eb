"""What a model is, as data: the frozen, hashable description that a family derives from a checkpoint's `config.json`.

A spec says everything that the decoder, the page arrays and the memory plan need. Knows no JAX, reads no files, and knows no
architecture: families fill it in (`families/llama.py`), `registry.py` finds the family, `decoder.py` builds modules from it.
Letters: N query heads, K kv heads, H head dim, D model, F mlp, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Biases:
    """Which projections carry a bias."""

    qkv: bool = False
    attention_out: bool = False
    mlp: bool = False


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a page table and see the last `window` positions (None: all). The group's j-th layer uses page array j."""

    layer_ids: tuple[int, ...]
    window: int | None = None

    @property
    def num_layers(self) -> int:
        """How many layers the group has."""
        return len(self.layer_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One decoder-only model.

    Attributes:
        family: Name of the family that made the spec.
        model_type, architectures: As the checkpoint calls itself.
        mlp_size: F, width of the gate and up projections.
        activation: silu, gelu (erf) or gelu_tanh.
        is_tied: The head is the embedding.
        max_position_embeddings: As in the config.
        derived_max_model_len: Longest sequence the position encoding is meant for, in tokens.
        dtype: bfloat16, float16 or float32, as the config names it; None where it does not.
        bos_token_ids, eos_token_ids: As in the config; generation_config and tokenizer may add to them.
        kv_groups: Groups of layers with equal attention kind; together they hold every layer once.
    """

    family: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    norm_eps: float
    activation: str
    rope: RopeSpec
    biases: Biases
    is_tied: bool
    max_position_embeddings: int
    derived_max_model_len: int
    dtype: str | None
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    kv_groups: tuple[KVGroup, ...]

    @property
    def num_query_groups(self) -> int:
        """G, query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_places(self) -> tuple[tuple[int, int], ...]:
        """For each layer its group and its place in it, which is the index of its page array."""
        places = {layer: (x, j) for x, group in enumerate(self.kv_groups) for j, layer in enumerate(group.layer_ids)}
        return tuple(places[layer] for layer in range(self.num_layers))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor of a checkpoint.

    Attributes:
        name: Logical name: the Hugging Face name without prefix, unfused, such as `layers.0.self_attn.q_proj.weight`.
        shape: In Hugging Face's orientation; a projection is `[out, in]`.
        sources: Names it may have in a source checkpoint; the first that exists is it.
        is_optional: May be missing (an untied head falls back to the embedding).
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one layout. Adding a family is adding one of these to `registry.FAMILIES`.

    Attributes:
        name: What `ModelSpec.family` says.
        architectures: Values of the config's `architectures` that belong to it.
        model_types: Values of `model_type` that belong to it, for configs that name no architecture.
        resolve: Makes the spec from a text model's config; CheckpointError where it cannot be served exactly.
        tensors: All logical tensors of a spec, in file order: embedding, layers, final norm, head.
        ignored: Regular expressions, searched in source names, of tensors left out on purpose.
        tied_head: The same for a head that a tied checkpoint stores although it is the embedding.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    resolve: Callable[[Mapping[str, Any]], ModelSpec]
    tensors: Callable[[ModelSpec], tuple[TensorSpec, ...]]
    ignored: tuple[str, ...]
    tied_head: str

    def ignored_patterns(self, spec: ModelSpec) -> tuple[str, ...]:
        """`ignored`, and with a tied head the stored copy of it."""
        return (*self.ignored, self.tied_head) if spec.is_tied else self.ignored
