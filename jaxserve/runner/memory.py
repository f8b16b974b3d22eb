"""How many KV pages there are: what memory allows, what was used last, and how long a sequence may then be.

Sizes only: allocates nothing, knows no programs. The steps are `kv_budget` (bytes), `choose_num_pages` (pages), then
`resolve_max_model_len`; `MemoryPlan` prints the result. `engine.build` calls them; `runner.runner` makes the arrays.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import psutil
from jax.typing import DTypeLike

from jaxserve.cgroup import free_memory
from jaxserve.config import EngineConfig, GroupLimits
from jaxserve.core.page_counts import longest_fit
from jaxserve.errors import ConfigError
from jaxserve.models.spec import ModelSpec
from jaxserve.runner.backend import page_dtype
from pallas_kernels.quantized_kv import is_quantized

logger = logging.getLogger(__name__)

GIB = 1 << 30
CPU_DEFAULT_BYTES = GIB
GPU_RESERVE_BYTES = GIB
"""Command buffers and NCCL take memory outside of JAX's pool."""
SCALE_BYTES = 4
"""A float32 for each vector of 8-bit pages."""
MIN_PAGES = 2
"""The null page and one that holds tokens."""
ROUNDING = 32
NUM_PAGES_FILE = "num_pages.json"


class Budget(NamedTuple):
    """Bytes for KV pages, where the figure comes from, and what pages may take at the very most (None: not known)."""

    size_bytes: int
    reason: str
    free_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What the memory of one device holds, in bytes. `state_bytes` is slot and penalty state; `page_bytes` one page in all layers.

    `temporaries_bytes` is 0 where nothing was set aside for them, as on CPU, `recurrent_bytes` where no layer has a state by slot; then
    the table is silent about them.
    """

    weights_bytes: int
    state_bytes: int
    temporaries_bytes: int
    page_bytes: int
    num_pages: int
    page_size: int
    reason: str
    recurrent_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        """All page arrays together."""
        return self.num_pages * self.page_bytes

    def table(self) -> str:
        """One line for each part and the sum."""
        total = self.weights_bytes + self.state_bytes + self.recurrent_bytes + self.temporaries_bytes + self.kv_bytes
        usable = (self.num_pages - 1) * self.page_size
        pages = f"{self.num_pages:,} pages of {self.page_size} = {usable:,} tokens and the null page; {self.reason}"
        rows = [
            ("weights", self.weights_bytes, ""),
            ("sampling and slot state", self.state_bytes, ""),
            *([("recurrent state", self.recurrent_bytes, "for every slot")] if self.recurrent_bytes else []),
            *([("temporaries", self.temporaries_bytes, "largest step")] if self.temporaries_bytes else []),
            ("KV pages", self.kv_bytes, pages),
            ("total", total, ""),
        ]
        return "\n".join(f"  {name:<26}{size / 2**20:>12,.1f} MiB  {note}".rstrip() for name, size, note in rows)


def page_bytes(spec: ModelSpec, page_size: int, dtype: DTypeLike) -> int:
    """Bytes of one page in every page array: keys and values of `page_size` tokens, for one layer of each array; in 8 bits with scales."""
    *vectors, head_dim = spec.page_shape
    vector_bytes = head_dim * jnp.dtype(dtype).itemsize + (SCALE_BYTES if is_quantized(dtype) else 0)
    return spec.num_page_arrays * math.prod(vectors) * page_size * vector_bytes


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays, or shapes of arrays, in a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def kv_budget(
    config: EngineConfig, device: jax.Device, *, state_bytes: int = 0, temporaries_bytes: int = 0, max_host_bytes: int | None = None
) -> Budget:
    """Memory for KV pages on one device. To be asked once the weights are loaded, so that they count as taken.

    The configured size where there is one; on CPU 1 GiB, bounded by a quarter of what is free; on GPU all of jaxserve's share that
    weights, state and temporaries leave, but 1 GiB.

    Args:
        config, device: What was asked for, and where.
        state_bytes, temporaries_bytes: What slots and the largest step take beside the pages.
        max_host_bytes: Memory of the machine that this process may take in all, on CPU; None is no limit. Devices of the CPU share it.

    Raises:
        ConfigError: The configured size is more than there is, or state and temporaries leave nothing.
    """
    if device.platform == "cpu":
        count = config.tensor_parallel_size
        free = free_host_bytes(max_host_bytes) // count - state_bytes - temporaries_bytes
        reason = "the default of 1 GiB" if free * count >= 4 * GIB else "a quarter of the free memory"
        default = Budget(min(CPU_DEFAULT_BYTES // count, free // 4), reason, free)
    else:
        stats = device.memory_stats()
        if not stats:
            raise ConfigError("the device does not tell how much of its memory is free. If XLA_PYTHON_CLIENT_ALLOCATOR is set, unset it.")
        free = stats["bytes_limit"] - stats["bytes_in_use"] - state_bytes - temporaries_bytes
        default = Budget(free - GPU_RESERVE_BYTES, f"what gpu_memory_utilization {config.gpu_memory_utilization} leaves", free)
    if free <= 0:
        ways_out = "Lower --max-num-seqs, --max-penalty-slots, --max-num-batched-tokens or --max-model-len."
        if max_host_bytes is not None and device.platform == "cpu":
            ways_out = (
                f"An engine's part of this machine's memory is {_gib(max_host_bytes)}; give a smaller --data-parallel-size. {ways_out}"
            )
        raise ConfigError(
            f"the state of sequences takes {_gib(state_bytes)}, temporaries {_gib(temporaries_bytes)}: {_gib(-free)} more than is free "
            f"beside the model. {ways_out}"
        )
    if config.kv_cache_memory_bytes is None:
        return default
    if config.kv_cache_memory_bytes > free:
        raise ConfigError(
            f"kv_cache_memory_bytes is {_gib(config.kv_cache_memory_bytes)}, but {_gib(free)} are free beside the model. "
            "Give a smaller --kv-cache-memory-bytes."
        )
    return Budget(config.kv_cache_memory_bytes, "kv_cache_memory_bytes", free)


def fullest(devices: Sequence[jax.Device]) -> jax.Device:
    """The device with the least memory left; all have pages of equal number."""

    def free(device: jax.Device) -> int:
        stats = device.memory_stats() if device.platform != "cpu" else None
        return stats["bytes_limit"] - stats["bytes_in_use"] if stats else 0

    return min(devices, key=free)


def free_host_bytes(max_host_bytes: int | None = None) -> int:
    """Memory this process may still take, at most `max_host_bytes` in all, where they are given; files mapped into it do not count."""
    available = free_memory()
    if max_host_bytes is None:
        return available
    taken = psutil.Process().memory_info()
    return min(available, max_host_bytes - (taken.rss - getattr(taken, "shared", 0)))


def choose_num_pages(config: EngineConfig, budget: Budget, bytes_per_page: int, *, key: str, cache_directory: Path | None) -> int:
    """Length of the page arrays, the null page included.

    The number is part of every program's shape, so another one means compiling everything anew. Hence it is rounded down to 1/32
    of its power of two, and the number used last under the same key is used again while it fits and wastes under a quarter.

    Args:
        budget: From `kv_budget`.
        bytes_per_page: From `page_bytes`.
        key: From `num_pages_key`.
        cache_directory: The compile cache, beside whose programs the number is kept; None keeps nothing.

    Raises:
        ConfigError: Not even one page fits, or fewer than were asked for.
    """
    if config.num_pages is not None:
        needed = config.num_pages * bytes_per_page
        if budget.free_bytes is not None and needed > budget.free_bytes:
            raise ConfigError(
                f"num_pages is {config.num_pages:,}, which take {_gib(needed)}, but {_gib(budget.free_bytes)} are free beside the model. "
                f"Give --num-pages {budget.free_bytes // bytes_per_page:,} or fewer."
            )
        return config.num_pages
    fitting = budget.size_bytes // bytes_per_page
    if fitting < MIN_PAGES:
        raise ConfigError(
            f"the memory for KV pages is {_gib(max(0, budget.size_bytes))} ({budget.reason}); {MIN_PAGES} pages take "
            f"{_gib(MIN_PAGES * bytes_per_page)}. Raise --kv-cache-memory-bytes or --gpu-memory-utilization, or choose a smaller model."
        )
    if cache_directory is None:
        return round_num_pages(fitting)
    path = cache_directory / NUM_PAGES_FILE
    remembered = _read_remembered(path)
    last = remembered.get(key, 0)
    if fitting * 3 // 4 <= last <= fitting and last >= MIN_PAGES:
        return last
    num_pages = round_num_pages(fitting)
    _write_remembered(path, {**remembered, key: num_pages})
    return num_pages


def round_num_pages(num_pages: int) -> int:
    """Rounded down to a multiple of 1/32 of the power of two below it: loses at most 3 %."""
    step = max(1, (1 << (num_pages.bit_length() - 1)) // ROUNDING)
    return num_pages - num_pages % step


def num_pages_key(spec: ModelSpec, config: EngineConfig, dtype: DTypeLike, device: jax.Device) -> str:
    """Names a number of pages to remember: the same for starts that would compile the same programs but for it.

    `spec` is what one device computes.
    """
    parts: tuple[Any, ...] = (
        spec, str(jnp.dtype(dtype)), config.page_size, config.kv_cache_memory_bytes, config.gpu_memory_utilization, device.device_kind
    )  # fmt: skip
    if config.tensor_parallel_size > 1:
        parts = (*parts, config.tensor_parallel_size, config.enable_expert_parallel)
    if (pages := page_dtype(config.kv_cache_dtype, str(jnp.dtype(dtype)))) != str(jnp.dtype(dtype)):
        parts = (*parts, pages)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def group_limits(spec: ModelSpec) -> tuple[GroupLimits, ...]:
    """What the scheduler knows of the model's KV groups."""
    return tuple(GroupLimits(window=group.window, chunk=group.chunk) for group in spec.kv_groups)


def resolve_max_model_len(config: EngineConfig, spec: ModelSpec, num_pages: int, *, max_chunk: int) -> tuple[int, str | None]:
    """The longest sequence, in tokens, and a message where it is not simply what was asked for or the model's own.

    Not given: the model's limit, lowered to what the pages hold. Given: must fit in the pages; above the model's limit it is
    accepted, with a message.

    Args:
        num_pages: From `choose_num_pages`.
        max_chunk: Most tokens that a step computes of one sequence; layers with a window must hold them all beside it.

    Raises:
        ConfigError: The given length does not fit in the pages.
    """
    wanted, derived = config.max_model_len, spec.derived_max_model_len
    # Each group of layers keeps pages of its own, for the whole length or as far as its layers see.
    capacity = longest_fit(
        group_limits(spec), num_pages - 1, max_chunk=max_chunk, page_size=config.page_size, max_length=max(wanted or 0, derived)
    )
    if wanted is None:
        if derived <= capacity:
            return derived, None
        return capacity, (
            f"max_model_len is lowered from the model's {derived:,} to {capacity:,} tokens, which the {num_pages:,} KV pages hold; "
            "raise --kv-cache-memory-bytes for more."
        )
    if wanted > capacity:
        raise ConfigError(
            f"max_model_len is {wanted:,}, but the {num_pages:,} KV pages hold {capacity:,} tokens. "
            f"Give --max-model-len {capacity} or less, or more memory with --kv-cache-memory-bytes or --gpu-memory-utilization."
        )
    if wanted > derived:
        return wanted, f"max_model_len is {wanted:,}, above the {derived:,} that the model is meant for; answers past that may be poor."
    return wanted, None


def check_token_budget(config: EngineConfig, *, default: int, max_num_seqs: int, max_model_len: int, num_kv_tokens: int) -> None:
    """Raises ConfigError for a step's token budget that no step could fill: its programs would take memory and minutes for nothing.

    Args:
        default: What is used where none is given; always accepted.
        num_kv_tokens: Tokens that all KV pages hold.
    """
    wanted, fitting = config.max_num_batched_tokens or default, max_num_seqs * max_model_len
    limit = max(default, min(fitting, num_kv_tokens))
    if wanted > limit:
        reason = f"all KV pages hold {num_kv_tokens:,}"
        if fitting < num_kv_tokens:
            reason = f"{max_num_seqs:,} sequences of {max_model_len:,} are {fitting:,}"
        raise ConfigError(
            f"max_num_batched_tokens is {wanted:,}, more than a step can use: {reason}. Give --max-num-batched-tokens {limit} or less."
        )


def _read_remembered(path: Path) -> dict[str, int]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, int)}


def _write_remembered(path: Path, values: Mapping[str, int]) -> None:
    # Another engine may be reading: it sees the old file or the new one. Failing to remember costs only compile time.
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, suffix=".tmp", delete=False) as file:
            json.dump(values, file)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("cannot remember the number of KV pages: %s", error)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 100 else f"{size:,} bytes"
