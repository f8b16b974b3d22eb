"""Times the implementations of `linear` on this machine: a card for people, then one JSON line.

    python -m pallas_kernels.linear.bench_linear [--layers 30] [--repeats 10] [--dtype bfloat16] [--implementation NAME ...]

A program holds the four products of every layer of SmolLM2-135M, each layer with its own weights, so that they come from memory
as they do in a model. The implementations take turns and the best repeat of each counts, so that other work on the machine
disturbs them alike.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, linear
from pallas_kernels.linear.arg_specs import BENCH_TOKENS, DTYPES, LAYER_SHAPES, LinearSpec, make_args


def make_step(implementation: str) -> Callable[..., jax.Array]:
    """A model's products alone: one layer's output is the next one's input."""

    @jax.jit
    def step(x: jax.Array, layers: list[list[jax.Array]]) -> jax.Array:
        for qkv, out, gate_up, down in layers:
            x = linear(linear(x, qkv, implementation=implementation)[:, : out.shape[1]], out, implementation=implementation)
            gate, up = jnp.split(linear(x, gate_up, implementation=implementation), 2, axis=1)
            x = linear(gate * up, down, implementation=implementation)
        return x

    return step


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the bench and prints its card and its JSON line."""
    usable = [name for name, reason in dispatch.available().items() if reason is None]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30, help="layers in a program (30)")
    parser.add_argument("--repeats", type=int, default=10, help="runs of each program; the best counts (10)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and activations (bfloat16)")
    parser.add_argument("--implementation", action="append", choices=usable, help="may be given more than once (all but reference)")
    args = parser.parse_args(argv)
    names = args.implementation or [name for name in usable if name != "reference"]

    specs = [LinearSpec(num_tokens=1, num_inputs=i, num_outputs=o, dtype=args.dtype) for o, i in LAYER_SHAPES]
    layer = [make_args(spec).weight for spec in specs]
    layers = [[jnp.array(weight, copy=True) for weight in layer] for _ in range(args.layers)]
    num_weights = sum(weight.size for weights in layers for weight in weights)
    num_bytes = sum(weight.nbytes for weights in layers for weight in weights)
    steps = {name: make_step(name) for name in names}
    platform = jax.default_backend()
    print(f"linear on {platform}, {args.layers} layers of {args.dtype}, {num_bytes / 1e6:.0f} MB; ms a step (GB/s, GFLOP/s)")
    print(f"{'tokens':>8}" + "".join(f"{name:>28}" for name in names))
    results = []
    for num_tokens in BENCH_TOKENS:
        x = jnp.ones((num_tokens, LAYER_SHAPES[0][1]), args.dtype)
        seconds = dict.fromkeys(names, float("inf"))
        for repeat in range(args.repeats + 1):
            for name, step in steps.items():
                start = time.perf_counter()
                step(x, layers).block_until_ready()
                if repeat > 0:  # the first run compiles
                    seconds[name] = min(seconds[name], time.perf_counter() - start)
        cells = (f"{s * 1e3:.2f} ({num_bytes / s / 1e9:.0f}, {2 * num_weights * num_tokens / s / 1e9:.0f})" for s in seconds.values())
        print(f"{num_tokens:>8}" + "".join(f"{cell:>28}" for cell in cells))
        results.append({"tokens": num_tokens, "ms": {name: s * 1e3 for name, s in seconds.items()}})
    print(json.dumps({"bench": "linear", "platform": platform, "dtype": args.dtype, "bytes": num_bytes, "results": results}))


if __name__ == "__main__":
    main()
