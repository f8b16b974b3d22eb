"""A mixture of experts against its own width: a few experts for each token, and all of them. `jaxserve bench moe`.

The work of a token grows with the experts it chooses, so its cost must too; what is above proportion is sorting, padding, and weights that
few rows share.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.bench.report import print_report, processor_name
from jaxserve.errors import ConfigError
from jaxserve.models.moe import MoE
from jaxserve.models.spec import MoESpec
from jaxserve.settings import Parser
from pallas_kernels import dispatch


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark with command-line arguments."""
    parser = Parser(prog="jaxserve bench moe", description="A mixture of experts: few experts for each token against all of them.")
    options = [("--tokens", 256), ("--experts", 64), ("--hidden", 1024), ("--width", 512), ("--repeats", 15)]
    for flag, default in options:
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"(default {default})")
    parser.add_argument("--top-k", type=int, nargs="+", metavar="N", help="experts of a token (default 1, 8, 64, as far as there are)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args(argv)
    for name in ("tokens", "experts", "hidden", "width", "repeats"):
        if (value := getattr(args, name)) < 1:
            raise ConfigError(f"--{name} is {value}; it must be at least 1.")
    chosen = args.top_k or [top_k for top_k in (1, 8, 64) if top_k <= args.experts]
    if not 1 <= min(chosen) <= max(chosen) <= args.experts:
        raise ConfigError(f"--top-k is {' '.join(map(str, chosen))}; of {args.experts} experts a token can choose 1 to {args.experts}.")
    backend, _ = dispatch.choose(dispatch.this_device())
    runs = [_layer(top_k, args, backend) for top_k in chosen]
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(args.repeats):  # by turns: what disturbs one disturbs all
        for run, measured in zip(runs, times, strict=True):
            started = time.perf_counter()
            run()
            measured.append(time.perf_counter() - started)
    medians = [statistics.median(measured) * 1e3 for measured in times]
    facts = {
        "tokens": args.tokens,
        "experts": args.experts,
        "sizes": f"hidden {args.hidden}, width {args.width}, {args.dtype}",
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    rows = [(top_k, median, median / medians[-1]) for top_k, median in zip(chosen, medians, strict=True)]
    print_report("moe", facts, ("experts a token", "median ms", "of the last"), rows)
    return 0


def _layer(top_k: int, args: argparse.Namespace, backend: str) -> Callable[[], None]:
    """A compiled layer on random weights and inputs, run once already."""
    rng = np.random.default_rng(0)
    e, d, f = args.experts, args.hidden, args.width

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5, args.dtype)

    spec = MoESpec(num_experts=e, top_k=top_k, size=f, activation="silu")
    moe = MoE(spec, weight(e, d).astype(jnp.float32), weight(e, 2 * f, d), weight(e, d, f), backend=backend)
    graphdef, state = nnx.split(moe)
    x, num_tokens = weight(args.tokens, d), jnp.int32(args.tokens)
    step = jax.jit(lambda state, x, num_tokens: nnx.merge(graphdef, state)(x, num_tokens)).lower(state, x, num_tokens).compile()

    def run() -> None:
        jax.block_until_ready(step(state, x, num_tokens))

    run()
    return run


if __name__ == "__main__":
    raise SystemExit(main())
