"""Runs Mosaic GPU kernels on the CPU for tests: JAX's GPU interpreter, and what that does not do of itself.

JAX's interpreter (0.11.2) prints a race and goes on, keeps the races of the last kernel only, does not look for races between wgmma and
those who write its operands, and knows no wgmma whose left operand lies in registers. Here a race is an error, whichever kernel and
whichever operand it was in, and the bytes that kernels move to and from device memory are counted where they move. Layouts are
not checked: compile the kernel too (`deviceless`). Next: `paged_attention/test_mosaic_gpu.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax.experimental.pallas import mosaic_gpu as plgpu


class Race(AssertionError):
    """Two accesses to the same memory, one of them a write, that no barrier orders. What they are was printed."""


@dataclass(slots=True)
class Report:
    """What the kernels of one `interpreted` block did.

    Attributes:
        read_bytes, written_bytes: Moved from and to device memory by copies, loads and stores.
        races: What the interpreter found, for each kernel that ran.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    races: list[Any] = field(default_factory=list)


_report = Report()
"""Of the block that is running: compiled programs outlive it, and keep the functions below that they were traced with."""


@contextlib.contextmanager
def hardly_optimized() -> Iterator[None]:
    """XLA compiles in a hurry, in every thread: what an interpreter compiles runs once, and optimizing it took a quarter of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@contextlib.contextmanager
def interpreted() -> Iterator[Report]:
    """Kernels that are traced inside are interpreted. Results must be waited for inside, too.

    Raises:
        Race: at the end, if any kernel had one.
    """
    global _report
    _report = report = Report()
    copy_in, copy_out, get, swap = callbacks.copy_gmem_to_smem, callbacks.copy_smem_to_gmem, callbacks._get, callbacks._swap
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    with contextlib.ExitStack() as stack:
        for name, function in (
            ("GPURaceDetectionState", _race_state(callbacks.GPURaceDetectionState)),
            ("wgmma", _wgmma),
            ("copy_gmem_to_smem", _counting(copy_in, "src_", "read_bytes")),
            ("copy_smem_to_gmem", _counting(copy_out, "dst_", "written_bytes")),
            ("_get", _counting(get, "", "read_bytes")),
            ("_swap", _counting(swap, "", "written_bytes")),
        ):
            stack.enter_context(mock.patch.object(callbacks, name, function))
        stack.enter_context(plgpu.force_gpu_interpret_mode(parameters))
        stack.enter_context(hardly_optimized())
        try:
            yield report
        except BaseException:
            callbacks.reset_gpu_interpret_mode_state()
            raise
    if any(state.races_found for state in report.races):
        raise Race("a kernel has a race, printed above")


def _race_state(make: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps the findings of every kernel; the interpreter drops them when the next one starts."""

    def made(**options: Any) -> Any:
        state = make(**options)
        _report.races.append(state)
        return state

    return made


def _counting(function: Callable[..., Any], prefix: str, counter: str) -> Callable[..., Any]:
    """Adds up the bytes of the window of device memory that a callback of the interpreter moves."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        if args:  # _get and _swap: token, place, thread, buffer, transforms
            thread, key_array, transforms = args[2], args[3], args[4]
        else:
            thread = kwargs["thread"]
            key_array, transforms = kwargs[f"{prefix}allocation_key_as_array"], kwargs[f"{prefix}transforms"]
        key = callbacks.HostAllocationKey.from_array(key_array)
        if thread is not None and key.memory_space_id == memory.get_memory_space_idx(plgpu.GMEM):
            shared = callbacks._get_shared_memory()
            window = shared.access(key, jax.tree.map(int, callbacks._remove_noop_transforms(transforms)))
            inside = shared.get_buffer_content(key, window, thread, increment_clock=False)[0]  # a copy may reach past the array
            if inside is not None:
                setattr(_report, counter, getattr(_report, counter) + inside.nbytes)
        return function(*args, **kwargs)

    return counted


def _wgmma(
    *,
    token: Any,
    thread: Any,
    acc_allocation_key_as_array: Any,
    acc_transforms: tuple[Any, ...],
    a_allocation_key_as_array: Any,
    a_transforms: tuple[Any, ...],
    b_allocation_key_as_array: Any,
    b_transforms: tuple[Any, ...],
    source_info: Any = None,
    **place: Any,
) -> Any:
    """wgmma whose operands in shared memory take part in the race detection, and whose left operand may lie in registers."""
    shared = callbacks._get_shared_memory()
    clock = _clock_of_read(shared, thread)

    def operand(key_array: Any, transforms: tuple[Any, ...]) -> Any:
        if np.ndim(key_array) == 2:  # a matrix, not the name of a buffer
            return np.asarray(key_array)
        key = callbacks.HostAllocationKey.from_array(key_array)
        window = shared.access(key, jax.tree.map(int, callbacks._remove_noop_transforms(transforms)))
        callbacks.get_races().check_read(thread, clock.copy(), key, window, source_info=source_info)
        return shared.get_buffer_content(key, window, thread)[0]

    a, b = operand(a_allocation_key_as_array, a_transforms), operand(b_allocation_key_as_array, b_transforms)
    key = callbacks.HostAllocationKey.from_array(acc_allocation_key_as_array)
    window = shared.access(key, jax.tree.map(int, callbacks._remove_noop_transforms(acc_transforms)))
    acc = shared.get_buffer_content(key, window, thread)[0]
    with np.errstate(invalid="ignore"):  # NaN in places that no query sees
        product = a.astype(np.float32) @ b.astype(np.float32)
    shared.store_buffer_content(key, window, acc + product, thread)
    return token


def _clock_of_read(shared: Any, thread: Any) -> Any:
    """The vector clock of a read by the async proxy: later than all that the proxy knows, and beside a store that was not committed."""
    proxy = shared.get_next_tma_thread_id()
    with shared.lock:
        clock = shared.clocks[thread]
        clock.inc(proxy)  # whoever synchronizes with this thread later is later than the read
        return clock.async_smem_clock.copy()
