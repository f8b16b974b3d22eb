"""How a model is cut into equal shards, one for each device of a mesh: what a device computes, and what it holds of each logical tensor.

A device runs the same modules on a smaller spec: its share of the heads, of the width inside the MLPs, of the experts (with expert
parallelism) and of the vocabulary. What attention and MLP give are then partial sums; `decoder.py` adds them up over the devices, twice
a layer. Router, norms, latent vectors and learned positions are whole on every device; a kv head is on several where there are fewer
of them than devices.

Knows no JAX and no files. Which slices `loader.py` reads follows from comparing the shapes of the whole model with those of a shard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxserve.errors import ConfigError
from jaxserve.models.spec import AttentionSpec, LatentAttentionSpec, LayerSpec, ModelSpec, MoESpec, RecurrentSpec
from jaxserve.models.tensors import tensor_shapes

AXIS = "tp"
"""The mesh axis that models are cut along."""
MAX_SUGGESTED = 256
MIN_DEALT_BYTES = 1 << 20
"""Of a step's activations, from which on its tokens are dealt out: below that a sum is mostly latency, which two halves have twice.
An estimate: not timed on cards."""


@dataclass(frozen=True, slots=True)
class Shards:
    """How many devices share a model, and whether they deal out its experts whole (else each expert is cut like an MLP)."""

    count: int = 1
    has_expert_parallel: bool = False


UNCUT = Shards()


class Part(NamedTuple):
    """What one device holds of a logical tensor.

    Attributes:
        axis: The axis that is cut; None: every device holds the whole tensor.
        size: Of a part along that axis.
        num_parts: Parts; neighbouring devices hold the same one where there are more devices.
        is_first_only: Only the first device has the values, the others zeros: a bias that is added to a sum over the devices.
    """

    axis: int | None = None
    size: int = 0
    num_parts: int = 1
    is_first_only: bool = False


def shard_spec(spec: ModelSpec, shards: Shards) -> ModelSpec:
    """What one device computes. Vocabulary and number of experts stay those of the whole model.

    Raises:
        ConfigError: The model cannot be cut so; the message has the reason and the nearest sizes that work.
    """
    if shards.has_expert_parallel and shards.count == 1:
        raise ConfigError(
            "enable_expert_parallel is set, but tensor_parallel_size is 1: experts are dealt out to several devices. Give a larger "
            "--tensor-parallel-size, or leave out --enable-expert-parallel."
        )
    if shards.has_expert_parallel and not any(isinstance(layer.mlp, MoESpec) for layer in spec.layers):
        raise ConfigError("enable_expert_parallel is set, but the model has no experts; leave out --enable-expert-parallel.")
    if (reason := _obstacle(spec, shards)) is not None:
        raise ConfigError(_refusal(spec, shards, reason))
    return replace(spec, layers=tuple(_shard_layer(layer, shards) for layer in spec.layers))


def deals_out_tokens(num_tokens: int, token_bytes: int, shards: Shards) -> bool:
    """Whether each device keeps the residual stream of a share of the tokens only; `token_bytes` is the size of a token's activations."""
    return shards.count > 1 and num_tokens % shards.count == 0 and num_tokens * token_bytes >= MIN_DEALT_BYTES


def num_vocab_rows(spec: ModelSpec, shards: Shards) -> int:
    """Rows of embedding and head on each device; those past the vocabulary, on the last devices, are zeros."""
    return -(-spec.vocab_size // shards.count)


def num_local_experts(spec: MoESpec, shards: Shards) -> int:
    """Experts of a layer that have weights on one device."""
    return spec.num_experts // shards.count if shards.has_expert_parallel else spec.num_experts


def tensor_parts(spec: ModelSpec, shards: Shards) -> dict[str, Part]:
    """What a device holds of each logical tensor of the whole model `spec`; of an expert that another device has, nothing is read."""
    shard = replace(shard_spec(spec, shards), vocab_size=num_vocab_rows(spec, shards))
    shapes = zip(tensor_shapes(spec), tensor_shapes(shard), strict=True)
    parts = {name: _part(whole, part, shards) for (name, whole), (_, part) in shapes}
    for name, part in parts.items():
        # A product whose input axis is cut gives a partial sum; its bias may be in one of them only.
        weight = parts.get(name.removesuffix("bias") + "weight")
        if name.endswith(".bias") and weight is not None and weight.axis == 1:
            parts[name] = part._replace(is_first_only=True)
    return parts


def _part(whole: tuple[int, ...], part: tuple[int, ...], shards: Shards) -> Part:
    cut = [axis for axis, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    if not cut:
        return Part()
    assert len(cut) == 1, (whole, part)
    num_parts = -(-whole[cut[0]] // part[cut[0]])
    return Part(cut[0], part[cut[0]], shards.count if shards.count % num_parts else num_parts)


def _shard_layer(layer: LayerSpec, shards: Shards) -> LayerSpec:
    attention, mlp, count = layer.attention, layer.mlp, shards.count
    match attention:
        case AttentionSpec():
            kv_heads = max(1, attention.num_kv_heads // count)
            attention = replace(attention, num_heads=attention.num_heads // count, num_kv_heads=kv_heads)
        case LatentAttentionSpec():
            attention = replace(attention, num_heads=attention.num_heads // count)
        case RecurrentSpec():
            key_heads, value_heads = attention.num_key_heads // count, attention.num_value_heads // count
            attention = replace(attention, num_key_heads=key_heads, num_value_heads=value_heads)
    if not isinstance(mlp, MoESpec):
        return LayerSpec(attention=attention, mlp=replace(mlp, size=mlp.size // count))
    shared_size = None if mlp.shared_size is None else mlp.shared_size // count
    size = mlp.size if shards.has_expert_parallel else mlp.size // count
    return LayerSpec(attention=attention, mlp=replace(mlp, size=size, shared_size=shared_size))


def _obstacle(spec: ModelSpec, shards: Shards) -> str | None:
    """Why the model cannot be cut so."""
    for layer in dict.fromkeys(spec.layers):
        for what, number in _divided(layer, shards).items():
            if number % shards.count:
                return f"the model has {number} {what}, which {shards.count} devices cannot share evenly"
        attention = layer.attention
        if isinstance(attention, AttentionSpec) and attention.num_kv_heads % shards.count and shards.count % attention.num_kv_heads:
            return f"the model has {attention.num_kv_heads} kv heads: {shards.count} devices cannot share or repeat them evenly"
    return None


def _divided(layer: LayerSpec, shards: Shards) -> dict[str, int]:
    """What the devices share, in words, and how many there are of it."""
    attention, mlp = layer.attention, layer.mlp
    divided: dict[str, int] = {}
    if isinstance(attention, RecurrentSpec):
        divided["recurrent key heads"] = attention.num_key_heads
    else:
        divided["attention heads"] = attention.num_heads
    if not isinstance(mlp, MoESpec):
        return divided | {"units inside an MLP": mlp.size}
    if mlp.shared_size is not None:
        divided["units inside the shared expert"] = mlp.shared_size
    return divided | ({"experts": mlp.num_experts} if shards.has_expert_parallel else {"units inside an expert": mlp.size})


def _refusal(spec: ModelSpec, shards: Shards, reason: str) -> str:
    def works(count: int) -> bool:
        return _obstacle(spec, replace(shards, count=count)) is None

    nearest = [next(filter(works, range(shards.count - 1, 0, -1))), *filter(works, range(shards.count + 1, MAX_SUGGESTED + 1))][:2]
    sizes = " or ".join(map(str, nearest))
    can_leave_out = shards.has_expert_parallel and _obstacle(spec, replace(shards, has_expert_parallel=False)) is None
    without = ", or leave out --enable-expert-parallel" if can_leave_out else ""
    return f"tensor_parallel_size is {shards.count}, but {reason}. Give --tensor-parallel-size {sizes}{without}."
