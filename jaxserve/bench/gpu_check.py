"""What has to be shown on a GPU, in under ten minutes and without a network: right kernels, how near they come to the floor, a whole model.

    scripts/gpu_check [--prepared DIR] [--tiny]
    scripts/gpu_check --prepare DIR [--card H200]     in the environment of scripts/gates, before

A machine with JAX for CUDA but without jax-triton runs what it has, and Triton's kernels from what `--prepare` wrote elsewhere. `--tiny`
runs the same code on the CPU in half a minute. Prints a card for people, and one JSON line. Status 1 when something is wrong, or does not
run. Parts: `gpu_check_kernels`, `gpu_check_model`, `gpu_check_peers`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.errors import ERROR_PREFIX, ConfigError, JaxserveError

BATCHES = (1, 32, 128, 256)
INPUT_LEN, OUTPUT_LEN = 128, 128
TINY_BATCHES = (1, 3)
PEERS_TIMEOUT_S = 120
"""Another library may build kernels first, or wait for a network."""
PACKAGES = ("jax", "jaxlib", "jax-triton", "triton", "torch", "flashinfer-python")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check with command-line arguments; returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="only write Triton's kernels for a card that need not be here")
    parser.add_argument("--prepared", type=Path, metavar="DIR", help="what --prepare wrote")
    parser.add_argument("--card", default="H200", help="with --prepare: a name of pallas_kernels.deviceless.CARDS (H200)")
    parser.add_argument("--no-model", action="store_true", help="kernels only")
    args = parser.parse_args(argv)
    if args.prepare is not None:
        return prepare(args.prepare, args.card, is_tiny=args.tiny)
    if args.prepared is not None:
        if not any(args.prepared.glob("*.stablehlo")):
            raise ConfigError(f"--prepared {args.prepared}: that directory has no kernels, as --prepare writes them.")
        sys.path.append(str(args.prepared / "packages"))
    started = time.perf_counter()
    report = _check(args, [] if args.tiny else _peers())
    report["seconds"] = round(time.perf_counter() - started, 1)
    print(f"\n{report['seconds']} s")
    print(json.dumps(report))
    return 0 if all(check["is_right"] for check in report["checks"]) and not report["problems"] else 1


def prepare(directory: Path, card: str, *, is_tiny: bool) -> int:
    """Writes the exported kernels, and the one package that reading them takes."""
    from jaxserve.bench.gpu_check_kernels import export_kernels
    from pallas_kernels import deviceless

    if (reason := deviceless.unavailable_reason()) is not None:
        raise ConfigError(f"--prepare {reason}")
    if card not in deviceless.CARDS:
        raise ConfigError(f"--card {card} is not known; there are {', '.join(deviceless.CARDS)}.")
    written = export_kernels(directory, card, is_tiny)
    found = importlib.util.find_spec("flatbuffers")
    if found is None or found.origin is None:
        raise ConfigError("--prepare needs the package flatbuffers: run it with the Python of .venv-cuda12, which scripts/gates makes")
    shutil.copytree(Path(found.origin).parent, directory / "packages" / "flatbuffers", dirs_exist_ok=True)
    print(f"{len(written)} programs for {deviceless.CARDS[card].name} in {directory}")
    return 0


def _check(args: argparse.Namespace, peers: list[tuple[str, str, float]]) -> dict[str, Any]:
    import jax

    from jaxserve.bench import gpu_check_kernels as kernels
    from jaxserve.runner.device import set_up_devices

    config = EngineConfig(model="", device="cpu" if args.tiny else "gpu")
    device = set_up_devices(config)[0]
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device.device_kind,
        "count": len(jax.devices()),
        "versions": {name: _version(name) for name in PACKAGES if _version(name)},
    }
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    print("\nkernels against the reference, errors as shares of the largest value")
    checks = []
    for check in kernels.check_kernels(args.tiny, args.prepared):
        checks.append(check)
        found = check.problem or f"{math.nan if check.error is None else check.error:.1e} of {check.allowed:.1e}"
        print(f"  {'right' if check.is_right else 'WRONG':<6} {check.route:<18} {check.name:<24} {found}", flush=True)
    print("\nattention, a layer")
    speeds = []
    for speed in kernels.time_kernels(args.tiny, args.prepared):
        speeds.append(speed)
        found = speed.problem or f"{speed.microseconds:10.1f} us, {speed.share_of_floor:.0%} of the floor"
        print(f"  {speed.route:<18} {speed.name:<24} {found}", flush=True)
    for route, name, microseconds in peers:
        print(f"  {route:<18} {name:<24} {microseconds:10.1f} us")
    levels, problems = ({}, {}) if args.no_model else _levels(config, args.tiny)
    problems |= {f"{speed.route}, {speed.name}": speed.problem for speed in speeds if speed.problem is not None}
    return {
        "benchmark": "gpu_check", "is_tiny": args.tiny, **facts,
        "checks": [asdict(check) | {"is_right": check.is_right} for check in checks],
        "speeds": [asdict(speed) for speed in speeds], "peers": peers, "model": levels, "problems": problems,
    }  # fmt: skip


def _levels(config: EngineConfig, is_tiny: bool) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Decoding by each backend that serves the model here, and what kept one from it."""
    import jax

    from jaxserve.bench.gpu_check_model import LLAMA_8B, TINY, SyntheticCheckpoint, run_level
    from jaxserve.engine.build import build_engine
    from jaxserve.models.registry import resolve_spec
    from jaxserve.runner.backend import layer_needs
    from pallas_kernels import dispatch

    source = TINY if is_tiny else LLAMA_8B
    checkpoint = SyntheticCheckpoint(source)
    needs = layer_needs(resolve_spec(dict(source)), config.page_size, "bfloat16")
    usable = [name for name, lack in dispatch.available(dispatch.this_device(), *needs).items() if lack is None and name != "reference"]
    backends = ["xla"] if is_tiny else [name for name in usable if name != "xla"] or ["xla"]
    batches, input_len, output_len = (TINY_BATCHES, 8, 8) if is_tiny else (BATCHES, INPUT_LEN, OUTPUT_LEN)
    sizes: dict[str, Any] = {
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": 32 if is_tiny else 2048,
        "max_model_len": 64 if is_tiny else 2048,
    }
    levels: dict[str, list[dict[str, Any]]] = {}
    problems: dict[str, str] = {}
    for backend in backends:
        print(f"\n{'a tiny model' if is_tiny else 'Llama-3.1-8B'} with made-up weights, {backend}, {input_len} in / {output_len} out")
        wanted = replace(config, dtype="bfloat16", attention_backend=backend, enable_prefix_caching=False, **sizes)
        try:
            with closing(build_engine(wanted, checkpoint=checkpoint)) as engine:
                for batch in batches:
                    level = run_level(engine, batch, input_len=input_len, output_len=output_len)
                    levels.setdefault(backend, []).append(asdict(level))
                    gap = "no device in the trace" if level.gap_ms is None else f"device idle {level.gap_ms:.2f} ms a step"
                    times = f"step {level.step_ms:.2f} ms, TTFT {level.ttft_ms:.1f} ms"
                    print(f"  {batch:>4} requests: {level.tokens_per_s:9.1f} tokens/s, {times}, {gap}", flush=True)
        except Exception as problem:  # what was found so far is worth a report, and so is the next backend
            traceback.print_exc()
            problems[f"model, {backend}"] = str(problem)
        jax.clear_caches()
    return levels, problems


def _peers() -> list[tuple[str, str, float]]:
    command = [sys.executable, "-m", "jaxserve.bench.gpu_check_peers"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=PEERS_TIMEOUT_S)
        results: list[tuple[str, str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError, subprocess.TimeoutExpired):
        return []
    return results


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JaxserveError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        sys.exit(2)
