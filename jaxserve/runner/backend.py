"""Which implementation of the kernels serves a model: chosen by what its layers need, or forced and then checked.

The choice itself is `pallas_kernels.dispatch`; here a `ModelSpec` becomes the needs of its layers, and what a forced implementation lacks
an error. Knows no weights.
"""

from __future__ import annotations

import jax

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.spec import AttentionSpec, LatentAttentionSpec, ModelSpec, RecurrentSpec
from pallas_kernels import dispatch


def choose_backend(config: EngineConfig, spec: ModelSpec, dtype: str, device: jax.Device) -> tuple[str, str]:
    """The implementation for all of a model's layers, and one clause that says why.

    Args:
        dtype: Of activations.

    Raises:
        ConfigError: `attention_backend` names one that cannot serve this model on this device.
    """
    needs = layer_needs(spec, config.page_size, dtype, page_dtype(config.kv_cache_dtype, dtype))
    here = dispatch.this_device(device)
    wanted = config.attention_backend
    if wanted == "auto":
        return dispatch.choose(here, *needs)
    if (reason := dispatch.lacks(wanted, here, *needs)) is None:
        return wanted, "asked for with attention_backend"
    usable = [name for name, lack in dispatch.available(here, *needs).items() if lack is None]
    pages, ways_out = "", f"Leave it at auto, or take one of {', '.join(usable)}"
    if config.kv_cache_dtype != "auto":
        pages = f" with kv_cache_dtype {config.kv_cache_dtype}"
        if dispatch.lacks(wanted, here, *layer_needs(spec, config.page_size, dtype)) is None:
            ways_out += "; or leave kv_cache_dtype at auto"
    raise ConfigError(f"attention_backend is {wanted}, which cannot serve this model{pages} here; {wanted} lacks: {reason}. {ways_out}.")


def page_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """The dtype of the page arrays: fp8 lies in uint8 (`pallas_kernels.quantized_kv`), auto is the activations' dtype."""
    if kv_cache_dtype == "auto":
        return dtype
    return "uint8" if kv_cache_dtype in ("fp8", "fp8_e4m3") else kv_cache_dtype


def kv_cache_name(stored: str) -> str:
    """What people read of a dtype of page arrays."""
    return "fp8" if stored == "uint8" else stored


def layer_needs(spec: ModelSpec, page_size: int, dtype: str, stored: str | None = None) -> tuple[dispatch.Needs, ...]:
    """What the layers that have pages ask of `paged_attention`, each kind once; `stored` is the dtype of the pages, by default `dtype`."""
    kinds = dict.fromkeys(layer.attention for layer in spec.layers)
    return tuple(_needs(kind, page_size, dtype, stored or dtype) for kind in kinds if not isinstance(kind, RecurrentSpec))


def _needs(attention: AttentionSpec | LatentAttentionSpec, page_size: int, dtype: str, stored: str) -> dispatch.Needs:
    if isinstance(attention, LatentAttentionSpec):
        return dispatch.Needs(
            head_dim=attention.head_dim, page_size=page_size, page_dtype=stored, q_dtype=dtype, num_parts=1, group=attention.num_heads
        )
    return dispatch.Needs(
        head_dim=attention.head_dim,
        page_size=page_size,
        page_dtype=stored,
        q_dtype=dtype,
        group=attention.num_query_groups,
        window=attention.window,
        chunk=attention.chunk,
        soft_cap=attention.soft_cap,
        has_sinks=attention.has_sinks,
    )
