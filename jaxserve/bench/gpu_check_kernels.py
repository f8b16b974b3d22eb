"""The kernel part of `bench.gpu_check`: attention against the reference, and its time against the floor, by every route that runs here.

A route is an implementation of `pallas_kernels.dispatch`, or Triton's kernels exported elsewhere (`export_kernels`), which a machine
without jax-triton can run. Knows no model.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxserve.bench.roofline import BYTES_PER_S, OPERATIONS_PER_S
from pallas_kernels import deviceless, dispatch, paged_attention
from pallas_kernels.paged_attention.arg_specs import DTYPES, TEST_SPECS, AttentionArgs, AttentionSpec, make_args, make_scales, make_sinks

EXPORTED = "triton, exported"
NUM_LAYERS = 8
"""Each with its own pages, so that none lie in a cache from the call before."""
NUM_QUEUED = 10
"""Calls that are timed together: all but the first are dispatched while the device runs, so that it never waits for the host. One alone
would show the host's share, some tens of microseconds, as the kernels'."""
UNCHECKED = (export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi"),)

Attend = Callable[..., jax.Array]


@dataclass(frozen=True, slots=True)
class Check:
    """One route on one shape: the largest error and what is allowed, as shares of the largest value.

    Attributes: error: None where it is no number (NaN, infinite), or where there is no output. problem: What kept it from running.
    """

    route: str
    name: str
    error: float | None
    allowed: float
    problem: str | None = None

    @property
    def is_right(self) -> bool:
        """False for NaN too."""
        return self.error is not None and self.error <= self.allowed


@dataclass(frozen=True, slots=True)
class Speed:
    """One route on one shape: microseconds a layer, and the floor's share of them; or what kept it from running."""

    route: str
    name: str
    microseconds: float | None
    share_of_floor: float | None
    problem: str | None = None


def timed_specs(is_tiny: bool) -> tuple[AttentionSpec, ...]:
    """Llama-3.1-8B's heads: decode of many rows, and prompts."""
    base = AttentionSpec(
        name="", rows=(), num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, max_pages=0, page_dtype="bfloat16", is_decode=True
    )
    shapes = (
        ((2, 1, 64), (1, 32, 32))
        if is_tiny
        else ((32, 1, 2048), (32, 1, 8192), (128, 1, 2048), (256, 1, 1024), (4, 2048, 2048), (1, 8192, 8192))
    )
    return tuple(
        replace(
            base, name=f"{'decode' if tokens == 1 else 'prefill'} {rows} x {length}", rows=((tokens, length),) * rows,
            max_pages=-(-length // base.page_size), is_decode=tokens == 1,
        )
        for rows, tokens, length in shapes
    )  # fmt: skip


def routes(spec: AttentionSpec, args: AttentionArgs, prepared: Path | None) -> Iterator[tuple[str, Attend]]:
    """What can compute this shape here, by name."""
    here, needs = dispatch.this_device(), replace(spec.needs, q_dtype=_query_dtype(spec))
    for name in dispatch.IMPLEMENTATIONS:
        if name != "reference" and dispatch.lacks(name, here, needs) is None:
            yield name, functools.partial(paged_attention, **_options(spec, args), implementation=name)
    if prepared is not None and (path := prepared / _file_name(spec)).exists():
        yield EXPORTED, functools.partial(_call_exported, path)


def check_kernels(is_tiny: bool, prepared: Path | None) -> Iterator[Check]:
    """Every route on every shape of the kernels' own tests, against the reference in float32."""
    for spec in TEST_SPECS[:2] if is_tiny else TEST_SPECS:
        args = _typed(spec, make_args(spec))
        options = _options(spec, args)
        with jax.default_matmul_precision("highest"):  # a GPU would multiply float32 in TF32
            reference = jax.jit(functools.partial(paged_attention, **options, implementation="reference"))
            expected = np.asarray(reference(*args._replace(q=args.q.astype(np.float32))), np.float32)
        half = args.q.dtype != np.float32
        values = args.pages[:, -1]
        scales = options["kv_scales"]
        largest = float(np.nanmax(np.abs(expected))) if scales is not None else float(np.nanmax(np.abs(values.astype(np.float32))))
        for name, attend in routes(spec, args, prepared):
            # wgmma multiplies 16 bits; of 8-bit pages it rounds queries and weights to as many.
            is_rounded = half or (name == "mosaic_gpu" and scales is not None)
            allowed = 5e-3 + (2.0**-8 if half else 0.0) if is_rounded else 1e-5
            try:
                out = np.asarray(jax.jit(attend)(*args), np.float32)
            except Exception as problem:  # whatever a compiler or a driver says: the other routes are to be checked all the same
                yield Check(name, spec.name, None, allowed, _first_line(problem))
                continue
            error = float(np.abs(out - expected).max()) / largest
            yield Check(name, spec.name, error if math.isfinite(error) else None, allowed)


def time_kernels(is_tiny: bool, prepared: Path | None) -> Iterator[Speed]:
    """Every route but `xla` on the shapes that matter; in tiny mode `xla` too, as there is nothing else."""
    for spec in timed_specs(is_tiny):
        args = _typed(spec, make_args(spec))
        for name, attend in routes(spec, args, prepared):
            if name != "xla" or is_tiny:
                try:
                    seconds = _seconds_a_layer(attend, args, num_repeats=2 if is_tiny else 20)
                except Exception as problem:
                    yield Speed(name, spec.name, None, None, _first_line(problem))
                    continue
                yield Speed(name, spec.name, seconds * 1e6, floor_s(spec) / seconds)


def floor_s(spec: AttentionSpec) -> float:
    """Seconds that one layer's attention takes at least on an H200."""
    item = np.dtype(DTYPES[spec.page_dtype]).itemsize
    queries = spec.num_tokens * spec.num_heads * spec.head_dim
    pairs = sum(count * length - count * (count - 1) // 2 for count, length in spec.rows)  # token t of a row sees those before it too
    return max((spec.kv_bytes + 2 * queries * item) / BYTES_PER_S, 4 * pairs * spec.num_heads * spec.head_dim / OPERATIONS_PER_S)


def export_kernels(directory: Path, card: str, is_tiny: bool) -> list[Path]:
    """Writes the Triton kernels for all shapes, for a card that need not be here. Needs the `gates` extra."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    with jax.sharding.use_abstract_mesh(deviceless.mesh(card).abstract_mesh):
        for spec in (*(TEST_SPECS[:1] if is_tiny else TEST_SPECS), *timed_specs(is_tiny)):
            args = _typed(spec, make_args(spec))
            attend = jax.jit(functools.partial(paged_attention, **_options(spec, args), implementation="triton"))
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
            exported = export.export(attend, platforms=["cuda"], disabled_checks=UNCHECKED)(*shapes)
            written.append(directory / _file_name(spec))
            written[-1].write_bytes(exported.serialize())
    return written


def _call_exported(path: Path, *args: jax.Array) -> jax.Array:
    import jaxlib.gpu_triton  # noqa: F401  registers the custom call's target

    result: jax.Array = export.deserialize(bytearray(path.read_bytes())).call(*args)
    return result


def _first_line(problem: Exception) -> str:
    return next(iter(str(problem).strip().splitlines()), "") or type(problem).__name__


def _seconds_a_layer(attend: Attend, args: AttentionArgs, *, num_repeats: int) -> float:
    q, pages, *places = (jnp.asarray(a) for a in args)
    layers = [pages + layer for layer in range(NUM_LAYERS)]

    @jax.jit
    def step(q: jax.Array, layers: list[jax.Array]) -> jax.Array:
        for layer in layers:  # one layer's output is the next one's query, so that layers cannot run side by side
            q = attend(q, layer, *places).astype(q.dtype)
        return q

    step(q, layers).block_until_ready()
    seconds = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        for _ in range(NUM_QUEUED):
            out = step(q, layers)
        out.block_until_ready()
        seconds.append((time.perf_counter() - start) / NUM_QUEUED)
    return min(seconds) / NUM_LAYERS


def _options(spec: AttentionSpec, args: AttentionArgs) -> dict[str, Any]:
    sinks, scales = make_sinks(spec), make_scales(spec, args)
    return {
        "is_decode": spec.is_decode, "scale": spec.head_dim**-0.5, "window": spec.window, "chunk": spec.chunk, "soft_cap": spec.soft_cap,
        "sinks": None if sinks is None else jnp.asarray(sinks), "kv_scales": None if scales is None else jnp.asarray(scales),
    }  # fmt: skip


def _query_dtype(spec: AttentionSpec) -> str:
    return spec.page_dtype if spec.page_dtype in ("bfloat16", "float16") else "float32"


def _typed(spec: AttentionSpec, args: AttentionArgs) -> AttentionArgs:
    """Queries in the dtype that a model would have them in."""
    return args._replace(q=args.q.astype(DTYPES[_query_dtype(spec)]))


def _file_name(spec: AttentionSpec) -> str:
    return spec.name.replace(" ", "-") + ".stablehlo"
