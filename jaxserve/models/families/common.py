"""What families share: reading the sizes that nearly every config has, which layers have a window, and the names of Llama's tensors.

A family states the defaults of transformers' config class, since a multimodal `text_config` may hold only what differs from them.
Knows no family; start at `llama.py` for a short one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models import config_values
from jaxserve.models.rope_config import derived_max_model_len, resolve_rope
from jaxserve.models.spec import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    RopeSpec,
)

LLAMA_NORMS = {
    "layers.{i}.attention_norm.weight": "layers.{i}.input_layernorm.weight",
    "layers.{i}.mlp_norm.weight": "layers.{i}.post_attention_layernorm.weight",
}
"""Where Llama and most after it keep the two norms of a layer."""


_PLAIN_BLOCK, _PLAIN_EMBEDDING = BlockSpec(), EmbeddingSpec()

_NULLABLE = ("num_key_value_heads", "q_lora_rank", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Where null has a meaning of its own; any other null stands for the default."""


def with_biases(names: Mapping[str, str]) -> dict[str, str]:
    """The same for each bias as for its weight."""
    return {**names, **{k.replace(".weight", ".bias"): v.replace(".weight", ".bias") for k, v in names.items()}}


def attention_of(spec: ModelSpec) -> AttentionSpec:
    """The attention of all layers that have one, where it has the same heads in all, of which fused tensors are made."""
    attention = spec.paged_attention
    assert isinstance(attention, AttentionSpec)
    return attention


class Config:
    """A text model's config over the defaults of its config class, with the sizes that all families read."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], aliases: Mapping[str, str] | None = None) -> None:
        renamed = {ours: values[theirs] for ours, theirs in (aliases or {}).items() if theirs in values}
        given = {k: v for k, v in {**values, **renamed}.items() if v is not None or k in _NULLABLE or k not in defaults}
        self.values: dict[str, Any] = {**defaults, **given}
        self.hidden_size = self.size("hidden_size")
        self.num_layers = self.size("num_hidden_layers")
        self.num_heads = self.size("num_attention_heads")
        self.num_kv_heads = self.size("num_key_value_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}."
            )
        self.head_dim = self.size("head_dim", self.hidden_size // self.num_heads)
        self.max_position_embeddings = self.size("max_position_embeddings")

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        return config_values.positive_int(self.values, key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        return config_values.number(self.values, key, default)

    def optional_number(self, key: str) -> float | None:
        """A number above 0, or None where there is none."""
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        """A boolean; absent is false."""
        return bool(self.values.get(key, False))

    def refuse(self, key: str, *, unless: Any, reason: str) -> None:
        """CheckpointError where a value asks for what this network does not have."""
        value = self.values.get(key, unless)
        if value is not None and value != unless:
            raise CheckpointError(f"config.json: {key} {value!r} is not supported: {reason}.")

    def rope(self, values: Mapping[str, Any] | None = None, **options: Any) -> RopeSpec:
        """The rotary embedding; `values` in place of the config's own, for a layer type's."""
        options = {"head_dim": self.head_dim, "max_position_embeddings": self.max_position_embeddings} | options
        return resolve_rope(self.values if values is None else values, **options)

    def attention(self, rope: RopeSpec | None, **options: Any) -> AttentionSpec:
        """Attention of the config's sizes; the scale is H ** -0.5 unless given."""
        sizes: dict[str, Any] = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        return AttentionSpec(**sizes | {"rope": rope, "scale": self.head_dim**-0.5} | options)

    def mlp(self, **options: Any) -> MLPSpec:
        """A gated MLP of the config's size and activation."""
        sizes: dict[str, Any] = {}
        if "size" not in options:
            sizes["size"] = self.size("intermediate_size")
        if "activation" not in options:
            sizes["activation"] = config_values.activation(self.values)
        return MLPSpec(**sizes | options)

    def moe(self, **options: Any) -> MoESpec:
        """A mixture of experts of the config's sizes and activation."""
        sizes: dict[str, Any] = {"top_k": self.size("num_experts_per_tok"), "activation": config_values.activation(self.values)}
        if "num_experts" not in options:
            sizes["num_experts"] = self.size("num_experts")
        if "size" not in options:
            sizes["size"] = self.size("moe_intermediate_size")
        spec = MoESpec(**sizes | options)
        if spec.top_k > spec.num_experts or spec.num_experts % spec.num_groups:
            raise CheckpointError(
                f"config.json: {spec.top_k} of {spec.num_experts} experts in {spec.num_groups} groups: a token cannot choose so."
            )
        return spec

    def windows(self, default: Callable[[int], bool]) -> list[int | None]:
        """The window of every layer: by `layer_types` where the config has them, else where `default` of the layer is true."""
        types = self.values.get("layer_types")
        if types is None:
            is_sliding = [default(i) for i in range(self.num_layers)]
        else:
            unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
            if unknown or len(types) != self.num_layers:
                raise CheckpointError(
                    f"config.json: layer_types must name sliding_attention or full_attention for each of {self.num_layers} layers, "
                    f"got {types!r}."
                )
            is_sliding = [kind == "sliding_attention" for kind in types]
        if not self.values.get("sliding_window"):
            return [None] * self.num_layers
        return [self.size("sliding_window") if sliding else None for sliding in is_sliding]

    def model(
        self,
        family: str,
        architecture: str,
        layers: list[LayerSpec],
        norm: NormSpec,
        *,
        block: BlockSpec = _PLAIN_BLOCK,
        embedding: EmbeddingSpec = _PLAIN_EMBEDDING,
        max_model_len: int | None = None,
        **head: Any,
    ) -> ModelSpec:
        """The spec. `architecture` stands in where the config names none; `head` are fields of HeadSpec besides is_tied."""
        values = self.values
        ropes = [layer.attention.rope for layer in layers if layer.attention.rope is not None]
        lengths = [derived_max_model_len(rope, self.max_position_embeddings) for rope in ropes] or [self.max_position_embeddings]
        return ModelSpec(
            family=family,
            model_type=values.get("model_type") or family,
            architectures=tuple(values.get("architectures") or (architecture,)),
            vocab_size=self.size("vocab_size"),
            hidden_size=self.hidden_size,
            embedding=embedding,
            layers=tuple(layers),
            norm=norm,
            block=block,
            head=HeadSpec(is_tied=self.flag("tie_word_embeddings"), **head),
            derived_max_model_len=max(lengths) if max_model_len is None else max_model_len,
            dtype=config_values.dtype(values),
            bos_token_ids=config_values.token_ids(values, "bos_token_id"),
            eos_token_ids=config_values.token_ids(values, "eos_token_id"),
        )
