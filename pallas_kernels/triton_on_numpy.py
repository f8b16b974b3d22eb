"""Runs Triton kernels on the CPU, with Triton's interpreter on NumPy arrays; counts what they load and store, and checks where.

Triton decides when it is imported whether it interprets or compiles. So `run` calls a function in a process of its own that interprets:
the same launches (`triton_launch`) with the same kernels, and its callers stay free to compile them. float32 and float16 are right there;
`tl.dot` of bfloat16 is not (triton 3.8.0). Knows no kernel.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Traffic(NamedTuple):
    """Bytes that kernels moved between memory and registers. An address counts once for each load or store of a whole tile."""

    load_bytes: int = 0
    store_bytes: int = 0


_traffic = Traffic()
_readable: dict[str, tuple[int, int]] = {}
_writable: dict[str, tuple[int, int]] = {}
"""Addresses [first, end) of the running kernel's arrays."""


def run(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Traffic]:
    """Calls `function(*args, **options)` in the interpreting process; returns its result, with NumPy arrays, and its kernels' traffic.

    `function` is found by its name in its module there; arguments and results are pickled, so arrays should be NumPy's.
    """
    result, traffic = _worker().submit(_run_here, function, args, options).result()
    return result, traffic


@functools.cache
def _worker() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_start_interpreting)
    atexit.register(pool.shutdown)
    return pool


def _start_interpreting() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"


def _run_here(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Traffic]:
    global _traffic
    _watch_memory()
    _traffic = Traffic()
    with np.errstate(all="ignore"):  # kernels meet infinities and NaN on purpose
        result = jax.tree.map(np.asarray, function(*args, **options))
    return result, _traffic


def interpret(
    kernel: Any,
    *,
    grid: tuple[int, ...],
    reads: Mapping[str, jax.Array],
    writes: Mapping[str, jax.ShapeDtypeStruct | jax.Array | np.ndarray],
    constants: Mapping[str, Any],
) -> tuple[Any, ...]:
    """What `triton_launch.launch` does, in a process that interprets. New arrays start as NaN, or the largest integer.

    NumPy arrays are not copied: those in `writes` are changed, and returned.

    Raises:
        triton's InterpreterError: what a kernel raised; an IndexError where it loads or stores outside its arrays.
    """
    inputs = {name: _HostArray(np.ascontiguousarray(array)) for name, array in reads.items()}
    outputs = {name: _HostArray(_start_of(array)) for name, array in writes.items()}
    _readable.clear()
    _readable.update({name: host.span() for name, host in (inputs | outputs).items()})
    _writable.clear()
    _writable.update({name: host.span() for name, host in outputs.items()})
    kernel[grid](**inputs, **outputs, **constants)
    return tuple(
        outputs[name].array if isinstance(array, np.ndarray) else jnp.asarray(outputs[name].array) for name, array in writes.items()
    )


def _start_of(array: jax.ShapeDtypeStruct | jax.Array | np.ndarray) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    if not isinstance(array, jax.ShapeDtypeStruct):
        return np.array(array)
    dtype = np.dtype(array.dtype)
    return np.full(array.shape, np.nan if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).max, dtype)


class _HostArray:
    """The part of a torch tensor's interface that the interpreter asks for, over a NumPy array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def dtype(self) -> str:
        return np.dtype(self.array.dtype).name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def span(self) -> tuple[int, int]:
        """Its addresses [first, end)."""
        return self.array.ctypes.data, self.array.ctypes.data + self.array.nbytes

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _HostArray:
        return self

    def cpu(self) -> _HostArray:
        return self

    def new_empty(self, size: int, device: str | None = None) -> _HostArray:
        return _HostArray(np.empty(size, self.array.dtype))

    def set_(self, storage: _HostArray, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def copy_(self, other: _HostArray) -> None:
        """Device and host are one here."""


@functools.cache
def _watch_memory() -> None:
    """Makes the interpreter's loads and stores count and check themselves. Unmasked ones end in the masked ones too."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        global _traffic
        _traffic = _traffic._replace(load_bytes=_traffic.load_bytes + _touched_bytes(pointers, mask, _readable))
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        global _traffic
        _traffic = _traffic._replace(store_bytes=_traffic.store_bytes + _touched_bytes(pointers, mask, _writable))
        return store(self, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = watched_load, watched_store


def _touched_bytes(pointers: Any, mask: Any, spans: Mapping[str, tuple[int, int]]) -> int:
    """Bytes at the distinct addresses where the mask is set. Raises IndexError for an address outside of all spans."""
    addresses, is_set = np.broadcast_arrays(pointers.data, mask.data)
    touched = np.unique(addresses[is_set])
    item_bytes: int = pointers.get_element_ty().primitive_bitwidth // 8
    is_inside = np.zeros(touched.shape, bool)
    for first, end in spans.values():
        is_inside |= (touched >= first) & (touched + item_bytes <= end)
    if not is_inside.all():
        nearest = {name: int(touched[~is_inside][0]) - first for name, (first, _) in spans.items()}
        raise IndexError(f"a kernel touches memory outside of its arrays, at these bytes from where they start: {nearest}")
    return len(touched) * item_bytes
