"""Times the implementations of `paged_attention` on this machine: a card for people, then one JSON line.

    python -m pallas_kernels.paged_attention.bench_paged_attention [--layers 30] [--repeats 20] [--implementation NAME ...]

A program calls attention once for each layer, and each layer has its own pages: on shared pages XLA would gather once for all
layers, and the pages would stay in the CPU's caches, as they never do in a model. The best of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, paged_attention
from pallas_kernels.paged_attention.arg_specs import BENCH_SPECS, AttentionSpec, make_args


def ms_a_layer(spec: AttentionSpec, implementation: str, *, num_layers: int, num_repeats: int) -> float:
    """Milliseconds of one layer's attention in a step of this shape."""
    q, pages, *places = (jnp.asarray(array) for array in make_args(spec))
    # A layer differs from the next in its values only, which time does not depend on.
    layers = [pages + layer for layer in range(num_layers)]

    @jax.jit
    def step(q: jax.Array, layers: list[jax.Array]) -> jax.Array:
        for pages in layers:  # one layer's output is the next one's query, so that layers cannot run side by side
            q = paged_attention(q, pages, *places, is_decode=spec.is_decode, scale=spec.head_dim**-0.5, implementation=implementation)
        return q

    step(q, layers).block_until_ready()
    seconds = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        step(q, layers).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return min(seconds) / num_layers * 1e3


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the bench and prints its card and its JSON line."""
    usable = [name for name, reason in dispatch.available().items() if reason is None]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30, help="layers in a program (30)")
    parser.add_argument("--repeats", type=int, default=20, help="runs of each program; the best counts (20)")
    parser.add_argument("--implementation", action="append", choices=usable, help="may be given more than once (all)")
    args = parser.parse_args(argv)
    names = args.implementation or usable

    platform = jax.default_backend()
    chosen, why = dispatch.choose(dispatch.this_device())
    print(f"paged attention on {platform}, {args.layers} layers, ms a layer; a run here would use {chosen} ({why})")
    print(f"{'shape':<18}{'MB':>8}" + "".join(f"{name:>14}" for name in names))
    results = []
    for spec in BENCH_SPECS:
        ms = {name: ms_a_layer(spec, name, num_layers=args.layers, num_repeats=args.repeats) for name in names}
        print(f"{spec.name:<18}{spec.kv_bytes / 1e6:>8.1f}" + "".join(f"{ms[name]:>14.3f}" for name in names))
        ratio = {name: ms[name] / min(ms.values()) for name in names}
        results.append({"shape": spec.name, "kv_bytes": spec.kv_bytes, "ms_a_layer": ms, "ratio_to_best": ratio})
    print(json.dumps({"bench": "paged_attention", "platform": platform, "layers": args.layers, "results": results}))


if __name__ == "__main__":
    main()
