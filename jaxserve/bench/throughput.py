"""Offline throughput: random prompts of one length, a fixed number of output tokens, all submitted at once.

Drives the engine itself, without text: `jaxserve bench throughput MODEL`. Each load level runs once to warm caches of the
machine and is then measured `--repeats` times; the median is reported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np

from jaxserve.bench.report import print_report, processor_name
from jaxserve.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.build import build_engine
from jaxserve.engine.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.settings import Parser
from jaxserve.startup_report import stage_line


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark with command-line arguments."""
    parser = Parser(
        prog="jaxserve bench throughput",
        usage="jaxserve bench throughput MODEL [flags]",
        description="Offline throughput of one model.",
    )
    parser.add_argument("model", metavar="MODEL", help="A converted checkpoint, a Hugging Face directory, a GGUF file or a hub id.")
    options: list[tuple[str, int, str]] = [
        ("--input-len", 128, "Prompt tokens of each request"),
        ("--output-len", 128, "Output tokens of each request"),
        ("--repeats", 3, "Measured runs of each level"),
        ("--seed", 0, "Seed of the random prompts"),
    ]
    for flag, default, text in options:
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default {default}).")
    parser.add_argument(
        "--num-prompts", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="Requests submitted at once (default 1 8 32)."
    )
    parser.add_argument("--dtype", default="auto", metavar="TEXT", help="As of `jaxserve serve` (default auto).")
    parser.add_argument("--device", default="auto", metavar="TEXT", help="As of `jaxserve serve` (default auto).")
    args = parser.parse_args(argv)
    for name, value in [("input-len", args.input_len), ("output-len", args.output_len), ("repeats", args.repeats)]:
        if value < 1:
            raise ConfigError(f"--{name} is {value}; it must be at least 1.")
    if min(args.num_prompts) < 1:
        raise ConfigError(f"--num-prompts holds {min(args.num_prompts)}; every load level must be at least 1.")
    # Prefix hits between repeats would measure the cache instead of the model.
    config = EngineConfig(model=args.model, dtype=args.dtype, device=args.device, enable_prefix_caching=False)
    engine = build_engine(config, lambda *stage: print(stage_line(*stage), file=sys.stderr, flush=True))
    try:
        rows = [_level(engine, count, args) for count in args.num_prompts]
    finally:
        engine.close()
    facts = {
        "model": os.path.basename(os.path.normpath(args.model)),
        "dtype": engine.info.dtype,
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "lengths": f"{args.input_len} in / {args.output_len} out",
    }
    columns = ("requests", "requests/s", "output tokens/s", "total tokens/s", "mean TPOT ms")
    print_report("throughput", facts, columns, rows)
    return 0


def _level(engine: Engine, count: int, args: argparse.Namespace) -> tuple[int, float, float, float, float]:
    rng = np.random.default_rng(args.seed)
    measured = [_run(engine, count, args, rng, repeat) for repeat in range(args.repeats + 1)][1:]
    elapsed, tpot = statistics.median(m[0] for m in measured), statistics.median(m[1] for m in measured)
    output = count * args.output_len
    return count, count / elapsed, output / elapsed, (output + count * args.input_len) / elapsed, tpot * 1e3


def _run(engine: Engine, count: int, args: argparse.Namespace, rng: np.random.Generator, repeat: int) -> tuple[float, float]:
    """Seconds for the whole level, and the mean over requests of seconds for each output token after the first."""
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True)
    start = time.perf_counter()
    for i in range(count):
        prompt = tuple(rng.integers(0, engine.info.vocab_size, args.input_len).tolist())
        engine.add(Request(request_id=f"{repeat}-{count}-{i}", prompt_token_ids=prompt, params=params, arrival_time_s=start))
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while engine.has_work:
        for event in engine.step():
            now = time.perf_counter()
            first.setdefault(event.request_id, now)
            last[event.request_id] = now
    gaps = max(1, args.output_len - 1)
    return time.perf_counter() - start, statistics.fmean((last[r] - first[r]) / gaps for r in first)


if __name__ == "__main__":
    raise SystemExit(main())
