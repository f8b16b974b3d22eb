"""The implementations of paged attention that run here, against each other, for decode and prefill. `jaxserve bench kernels [--tune]`.

Each program calls attention once for each of its layers, and each layer has its own pages, as in a model. With `--tune` the sizes that
an implementation lets be tuned are tried one field after another, each program's output is held against the untuned one's, and what is
faster is written where `pallas_kernels.tuning` reads it, with the implementation that was the fastest. Next: `pallas_kernels/tuning.py`.
"""

from __future__ import annotations

import datetime
import importlib
import logging
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.report import print_report, processor_name
from jaxserve.errors import ConfigError
from jaxserve.settings import Parser
from pallas_kernels import dispatch, paged_attention, tuning
from pallas_kernels.paged_attention.arg_specs import AttentionSpec
from pallas_kernels.tuning import Launch

logger = logging.getLogger(__name__)

Timer = Callable[[Callable[[], jax.Array]], float]
"""Seconds of a call that ends when its result is there."""

OPERATION = "paged_attention"
MAX_BYTES = {"cpu": 1 << 30, "gpu": 8 << 30}
"""Of the pages of all layers of a program."""
WORTH_IT = 0.98
"""A size is taken when the time falls below this share: less is noise."""
TOLERANCE = 2e-2
"""Share of the largest output that 16 bits may lose; a size with which a kernel is wrong is further off. The mean of thousands of values
is near 0: in absolute terms it would hardly be."""


def main(argv: Sequence[str] | None = None, timer: Timer | None = None) -> int:
    """Runs the benchmark with command-line arguments. `timer` stands in for the clock in tests."""
    parser = Parser(prog="jaxserve bench kernels", description="The implementations of paged attention that run here, against each other.")
    parser.add_argument("--tune", action="store_true", help="try the sizes of the kernels and keep the fastest for this device")
    parser.add_argument("--implementation", action="append", choices=dispatch.IMPLEMENTATIONS, help="may be given more than once (all)")
    parser.add_argument("--shape", action="append", metavar="NAME", help="part of a shape's name; may be given more than once (all)")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="layers of a program, as far as memory goes (default 8)")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="runs of each program; the best counts (default 20)")
    args = parser.parse_args(argv)
    for flag, value in (("layers", args.layers), ("repeats", args.repeats)):
        if value < 1:
            raise ConfigError(f"--{flag} is {value}; it must be at least 1.")
    device = dispatch.this_device()
    known = shapes(device.platform)
    specs = [spec for spec in known if not args.shape or any(part in spec.name for part in args.shape)]
    if not specs:
        raise ConfigError(f"--shape {', '.join(args.shape)}: no shape is named so. There are: {', '.join(spec.name for spec in known)}.")
    names = list(dict.fromkeys(args.implementation or ())) or [
        name for name, lack in dispatch.available(device).items() if lack is None and name != "reference"
    ]  # the oracle is slow by design
    for name in args.implementation or ():
        lacks = [dispatch.lacks(name, device, spec.needs) for spec in specs]
        if None not in lacks:
            raise ConfigError(f"--implementation {name} serves none of these shapes here; it lacks: {lacks[0]}.")
    bench = _Bench(timer or best_of(args.repeats), args.layers, MAX_BYTES.get(device.platform, MAX_BYTES["gpu"]))
    if args.tune:
        _check_file(device.kind)
    seconds: dict[str, dict[str, float]] = {}
    tuned: dict[Launch, dict[str, int]] = {}
    for spec in specs:
        seconds[spec.name] = {}
        for name in names:
            if (lack := dispatch.lacks(name, device, spec.needs)) is not None:
                logger.info("%s does not serve %s; it lacks: %s", name, spec.name, lack)
                continue
            sizes, seconds[spec.name][name] = bench.tune(spec, name) if args.tune else ({}, bench.seconds(spec, name))
            tuned |= {launch: values for launch, values in sizes.items() if values or launch not in tuned}
    facts: dict[str, Any] = {
        "device": device.kind if device.platform != "cpu" else processor_name(),
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "best of": args.repeats,
    }
    if args.tune:
        fastest = None if args.implementation or args.shape else _fastest(seconds)  # a part of the picture decides nothing
        path = tuning.write(OPERATION, device.kind, tuned, fastest, facts)
        facts |= {"fastest": fastest, "sizes kept": sum(map(bool, tuned.values())), "written to": str(path)}
    rows = [
        (spec.name, spec.kv_bytes / 1e6, *(_microseconds(seconds[spec.name].get(name)) for name in names),
         _rate(spec, min(seconds[spec.name].values(), default=None)))
        for spec in specs
    ]  # fmt: skip
    print_report("kernels", facts, ("shape", "MB", *(f"{name} us" for name in names), "GB/s of the best"), rows)
    return 0


def _check_file(kind: str) -> None:
    """Raises ConfigError where nothing could be written: said before minutes of measuring, not after."""
    try:
        tuning.fastest(OPERATION, kind)  # what is there is read, to be added to
        directory = tuning.file_of(OPERATION, kind).parent
        directory.mkdir(exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tune cannot keep what it would find: {error}.") from None


def shapes(platform: str) -> tuple[AttentionSpec, ...]:
    """Steps to measure: SmolLM2-135M's heads on CPU, Llama-3.1-8B's elsewhere."""
    if platform == "cpu":
        return tuple(
            _shape(rows, tokens, keys, 9, 3, 64) for rows, tokens, keys in ((1, 1, 2048), (32, 1, 256), (32, 1, 2048), (1, 256, 512))
        )
    decode = [(rows, 1, keys) for rows in (1, 8, 32, 128) for keys in (1024, 8192)]
    return tuple(_shape(rows, tokens, keys, 32, 8, 128) for rows, tokens, keys in (*decode, (1, 2048, 2048), (4, 2048, 8192)))


def _shape(rows: int, tokens: int, keys: int, num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionSpec:
    kind = "decode" if tokens == 1 else "prefill"
    return AttentionSpec(
        name=f"{kind} {rows}x{tokens} of {keys}", rows=((tokens, keys),) * rows, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, page_size=16, max_pages=keys // 16, page_dtype="bfloat16", q_dtype="bfloat16", is_decode=tokens == 1,
    )  # fmt: skip


def best_of(num_repeats: int) -> Timer:
    """A timer that runs a program once to warm it, then takes the best of its runs."""

    def seconds(run: Callable[[], jax.Array]) -> float:
        run().block_until_ready()
        best = math.inf
        for _ in range(num_repeats):
            started = time.perf_counter()
            run().block_until_ready()
            best = min(best, time.perf_counter() - started)
        return best

    return seconds


class _Bench:
    """Compiles and times programs; keeps the arrays of the last shape."""

    def __init__(self, timer: Timer, num_layers: int, max_bytes: int) -> None:
        self._timer, self._num_layers, self._max_bytes = timer, num_layers, max_bytes
        self._arrays: tuple[AttentionSpec, tuple[jax.Array, ...], list[jax.Array]] | None = None

    def seconds(self, spec: AttentionSpec, name: str) -> float:
        """Of one layer, with the sizes that a model would get here."""
        run, num_layers = self._program(spec, name)
        return self._timer(run) / num_layers

    def tune(self, spec: AttentionSpec, name: str) -> tuple[dict[Launch, dict[str, int]], float]:
        """Of each launch the sizes that are faster than those computed (none: {}), and the seconds of one layer with them."""
        chosen: dict[Launch, dict[str, int]] = {}
        with tuning.trial(chosen) as trial:
            run, num_layers = self._program(spec, name)
            best, expected = self._timer(run), np.asarray(run(), np.float32)
        tunables = getattr(importlib.import_module(f"pallas_kernels.{OPERATION}.{name}"), "TUNABLES", {})
        for launch, computed in trial.asked.items():
            for field, values in tunables.get(launch.shape_class.split()[0], {}).items():
                for value in values:
                    sizes = chosen.get(launch, {}) | {field: value}
                    if value == chosen.get(launch, {}).get(field, getattr(computed, field)):
                        continue
                    seconds = self._try(spec, name, chosen | {launch: sizes}, expected)
                    if seconds < best * WORTH_IT:
                        best, chosen[launch] = seconds, sizes
        return {launch: chosen.get(launch, {}) for launch in trial.asked}, best / num_layers

    def _try(self, spec: AttentionSpec, name: str, sizes: Mapping[Launch, Mapping[str, int]], expected: np.ndarray) -> float:
        """Seconds of a program with these sizes; infinity where they do not compile or give something else."""
        with tuning.trial(sizes):
            try:
                run, _ = self._program(spec, name)
                if not np.allclose(np.asarray(run(), np.float32), expected, rtol=0, atol=TOLERANCE * np.abs(expected).max()):
                    logger.warning("%s gives something else with %s", name, dict(sizes))
                    return math.inf
                return self._timer(run)
            except Exception as error:  # whatever a compiler or a driver says: the sizes do not fit this device
                logger.info("%s does not take %s: %s", name, dict(sizes), str(error).splitlines()[:1])
                return math.inf

    def _program(self, spec: AttentionSpec, name: str) -> tuple[Callable[[], jax.Array], int]:
        """A compiled program and the number of its layers. What is traced here asks `tuning`, so each call traces anew."""
        if self._arrays is None or self._arrays[0] != spec:
            self._arrays = None  # room for the next
            self._arrays = spec, *_arrays(spec, max(1, min(self._num_layers, self._max_bytes // spec.kv_bytes)))
        _, (q, *places), layers = self._arrays

        def step(q: jax.Array, layers: list[jax.Array]) -> jax.Array:
            for pages in layers:  # one layer's output is the next one's query, so that layers cannot run side by side
                q = paged_attention(q, pages, *places, is_decode=spec.is_decode, scale=spec.head_dim**-0.5, implementation=name)
            return q

        compiled = jax.jit(step).lower(q, layers).compile()
        return lambda: compiled(q, layers), len(layers)


def _arrays(spec: AttentionSpec, num_layers: int) -> tuple[tuple[jax.Array, ...], list[jax.Array]]:
    """Query and places of a step whose rows are all alike, and the pages of its layers, in random physical order; made on the device."""
    num_rows, (num_tokens, length) = len(spec.rows), spec.rows[0]
    num_pages = 1 + num_rows * spec.max_pages
    key, *layer_keys = jax.random.split(jax.random.key(0), num_layers + 1)
    shape = (num_pages, spec.num_parts, spec.num_kv_heads, spec.page_size, spec.head_dim)
    layers = [jax.random.normal(layer_key, shape, spec.page_dtype) for layer_key in layer_keys]
    tables = 1 + np.random.default_rng(0).permutation(num_pages - 1).reshape(num_rows, spec.max_pages)
    places = (
        tables,
        np.arange(num_rows + 1) * num_tokens,
        np.full(num_rows, length),
        np.repeat(np.arange(num_rows), num_tokens),
        np.tile(np.arange(length - num_tokens, length), num_rows),
    )
    q = jax.random.normal(key, (spec.num_tokens, spec.num_heads, spec.head_dim), spec.q_dtype)
    return (q, *(jnp.asarray(array, jnp.int32) for array in places)), layers


def _fastest(seconds: Mapping[str, Mapping[str, float]]) -> str | None:
    """The implementation with the smallest product of times, of those that served every shape."""
    names = set.intersection(*(set(times) for times in seconds.values())) if seconds else set()
    return min(sorted(names), key=lambda name: math.prod(times[name] for times in seconds.values()), default=None)


def _microseconds(seconds: float | None) -> float | None:
    """None, which JSON has, in place of NaN, which it has not: the implementation does not serve the shape."""
    return None if seconds is None else seconds * 1e6


def _rate(spec: AttentionSpec, seconds: float | None) -> float | None:
    return None if seconds is None else spec.kv_bytes / seconds / 1e9


if __name__ == "__main__":
    raise SystemExit(main())
