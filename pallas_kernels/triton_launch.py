"""Launches a Triton kernel: on the GPU through jax-triton, or under Triton's interpreter where the process runs that.

Callers name each array and whether the kernel reads it or writes it. Does not choose tiles. Next: `triton_on_numpy`, the interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

PTX_VERSION = 88
"""What the assembler of CUDA 12.9 reads, which jax[cuda12] brings. Left alone, Triton writes newer text for capability 10.0 and 12.0."""


def launch(
    kernel: Any,
    *,
    grid: tuple[int, ...],
    reads: Mapping[str, jax.Array],
    writes: Mapping[str, jax.ShapeDtypeStruct | jax.Array],
    num_warps: int,
    num_stages: int,
    constants: Mapping[str, Any],
) -> tuple[jax.Array, ...]:
    """Runs `kernel` on every point of `grid`; returns the written arrays in the order of `writes`.

    Args:
        kernel: A function decorated with `triton.jit`.
        grid: Up to three sizes.
        reads: By parameter name.
        writes: By parameter name: a ShapeDtypeStruct for a new array, whose contents are undefined where the kernel does not store, or
            an array that is updated in place (XLA copies it first if something else reads it later).
        num_warps: Warps that run one point of the grid.
        num_stages: Iterations of a loop whose loads are in flight at once.
        constants: The kernel's constexpr parameters; each set of values is compiled on its own.
    """
    import triton

    if triton.knobs.runtime.interpret:
        from pallas_kernels import triton_on_numpy

        return triton_on_numpy.interpret(kernel, grid=grid, reads=reads, writes=writes, constants=constants)
    return _launch_on_gpu(kernel, grid, reads, writes, num_warps, num_stages, constants)


def next_power(n: int) -> int:
    """The smallest power of two that is at least n: sides of tiles must be powers of two."""
    return 1 << (n - 1).bit_length()


def _launch_on_gpu(
    kernel: Any,
    grid: tuple[int, ...],
    reads: Mapping[str, jax.Array],
    writes: Mapping[str, jax.ShapeDtypeStruct | jax.Array],
    num_warps: int,
    num_stages: int,
    constants: Mapping[str, Any],
) -> tuple[jax.Array, ...]:
    import jax_triton

    # A Ref becomes an output that aliases its input; jax-triton takes it in the kernel's own order of parameters, outputs too.
    refs = {name: jax.new_ref(array) for name, array in writes.items() if not isinstance(array, jax.ShapeDtypeStruct)}
    fresh = {name: shape for name, shape in writes.items() if isinstance(shape, jax.ShapeDtypeStruct)}
    order = [name for name in kernel.arg_names if name in fresh]
    outputs = jax_triton.triton_call(
        **{name: jnp.asarray(array) for name, array in reads.items()},
        **refs,
        kernel=kernel,
        out_type=[fresh[name] for name in order],
        grid=grid,
        name=kernel.__name__,
        num_warps=num_warps,
        num_stages=num_stages,
        backend_options={"ptx_version": PTX_VERSION},
        **constants,
    )
    written = dict(zip(order, outputs, strict=True)) | {name: jax.freeze(ref) for name, ref in refs.items()}
    return tuple(written[name] for name in writes)
