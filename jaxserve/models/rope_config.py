"""From the RoPE keys of a `config.json` to a RopeSpec, in both spellings: `rope_parameters`, or `rope_theta` with `rope_scaling`.

Follows transformers' `modeling_rope_utils` (5.24) in precedence and defaults. Knows no JAX; the tables are built in `rope.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.config_values import number, positive_int
from jaxserve.models.spec import RopeSpec

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

DEFAULT_THETA = 10_000.0


def resolve_rope(
    config: Mapping[str, Any],
    *,
    head_dim: int,
    max_position_embeddings: int,
    default_theta: float = DEFAULT_THETA,
    default_partial: float = 1.0,
    is_interleaved: bool = False,
) -> RopeSpec:
    """The rotary embedding of a model with one table for all layers.

    Args:
        config: The text model's.
        head_dim: H, of which the config may say that a part is rotated.
        max_position_embeddings: As the config says it.
        default_theta, default_partial: Where the config is silent.
        is_interleaved: See `RopeSpec`.

    Raises:
        CheckpointError: Unknown type (never a default), or a parameter is missing or of the wrong kind.
    """
    params = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in KINDS:
        raise CheckpointError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(KINDS)}.")
    theta = number(params, "rope_theta", number(config, "rope_theta", default_theta))
    partial = number(params, "partial_rotary_factor", number(config, "partial_rotary_factor", default_partial))
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(
            f"config.json: RoPE rotates {rotary_dim} dimensions (head_dim {head_dim}, partial_rotary_factor {partial}); "
            f"it must be an even number from 2 to head_dim."
        )
    # A length beside the RoPE object wins over the one inside it (Phi-3 checkpoints).
    outer = config.get("original_max_position_embeddings")
    pretrained = outer if outer is not None else params.get("original_max_position_embeddings")
    lengths = {"original_max_position_embeddings": pretrained}
    pretrained_length = positive_int(lengths, "original_max_position_embeddings", max_position_embeddings)

    base: dict[str, Any] = {"kind": kind, "theta": theta, "rotary_dim": rotary_dim, "is_interleaved": is_interleaved}
    match kind:
        case "linear":
            return RopeSpec(**base, factor=number(params, "factor"))
        case "dynamic":
            if rotary_dim <= 2:
                raise CheckpointError(f"config.json: dynamic RoPE needs more than 2 rotated dimensions, got {rotary_dim}.")
            return RopeSpec(**base, factor=number(params, "factor"), original_length=max_position_embeddings)
        case "llama3":
            return _llama3(base, params, pretrained_length)
        case "yarn":
            return _yarn(base, params, pretrained_length, max_position_embeddings)
        case "longrope":
            return _longrope(base, params, pretrained_length, max_position_embeddings)
        case _:
            return RopeSpec(**base, freq_divisors=_floats(params, "freq_divisors", rotary_dim // 2, is_required=False))


def with_rope_of(config: Mapping[str, Any], layer_type: str, *, theta_key: str = "rope_theta") -> dict[str, Any]:
    """The config with the rotary parameters of one layer type alone, for models that have a table for each.

    New configs nest them by layer type. In old ones the scaling is that of full attention, and sliding layers have a plain table whose base
    is at `theta_key`.
    """
    plain = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters", "rope_theta")}
    nested = config.get("rope_parameters") or {}
    if layer_type in nested:
        return plain | {"rope_parameters": nested[layer_type] or {}}
    theta = config.get(theta_key if layer_type == "sliding_attention" else "rope_theta")
    scaling = config.get("rope_scaling") if layer_type == "full_attention" else None
    return plain | ({} if theta is None else {"rope_theta": theta}) | ({} if scaling is None else {"rope_scaling": scaling})


def derived_max_model_len(rope: RopeSpec, max_position_embeddings: int) -> int:
    """Longest sequence the position encoding is meant for: scaled where the config gives the length before scaling.

    llama3 and longrope configs already state the extended length; linear and dynamic scale `max_position_embeddings`; yarn
    scales the pretrained length.
    """
    if rope.kind in ("linear", "dynamic"):
        return int(max_position_embeddings * rope.factor)
    if rope.kind == "yarn":
        assert rope.pretrained_length is not None
        return int(rope.pretrained_length * rope.factor)
    return max_position_embeddings


def _llama3(base: dict[str, Any], params: Mapping[str, Any], pretrained_length: int) -> RopeSpec:
    low, high = number(params, "low_freq_factor"), number(params, "high_freq_factor")
    if low == high:
        raise CheckpointError(f"config.json: llama3 RoPE needs low_freq_factor below high_freq_factor, both are {low}.")
    return RopeSpec(
        **base,
        factor=number(params, "factor"),
        pretrained_length=pretrained_length,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(base: dict[str, Any], params: Mapping[str, Any], pretrained_length: int, max_position_embeddings: int) -> RopeSpec:
    factor = number(params, "factor", max_position_embeddings / pretrained_length)
    mscale, mscale_all_dim = params.get("mscale"), params.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    else:
        attention_factor = yarn_mscale(factor, 1.0)
    return RopeSpec(
        **base,
        factor=factor,
        attention_factor=number(params, "attention_factor", attention_factor),
        pretrained_length=pretrained_length,
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        is_truncated=bool(params.get("truncate", True)),
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much attention scores grow with the context's extension (transformers' yarn_get_mscale)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(base: dict[str, Any], params: Mapping[str, Any], pretrained_length: int, max_position_embeddings: int) -> RopeSpec:
    factor = number(params, "factor", max_position_embeddings / pretrained_length)
    attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(pretrained_length))
    num_freqs = base["rotary_dim"] // 2
    return RopeSpec(
        **base,
        factor=factor,
        attention_factor=number(params, "attention_factor", attention_factor),
        original_length=pretrained_length,
        short_factors=_floats(params, "short_factor", num_freqs),
        long_factors=_floats(params, "long_factor", num_freqs),
    )


def _floats(params: Mapping[str, Any], key: str, length: int, *, is_required: bool = True) -> tuple[float, ...]:
    values = params.get(key)
    if values is None and not is_required:
        return ()
    if not isinstance(values, list | tuple) or len(values) != length or not all(isinstance(v, int | float) and v > 0 for v in values):
        raise CheckpointError(f"config.json: RoPE {key} must be a list of {length} numbers above 0, got {values!r}.")
    return tuple(float(value) for value in values)
