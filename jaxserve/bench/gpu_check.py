"""What has to be shown on a GPU, in under ten minutes and without a network: right kernels, how near they come to the floor, a whole model.

    scripts/gpu_check [--prepared DIR] [--tiny]
    scripts/gpu_check --prepare DIR [--card H200]     in the environment of scripts/gates, before

A machine with JAX for CUDA but without jax-triton runs what it has, and Triton's kernels from what `--prepare` wrote elsewhere. `--tiny`
runs the same code on the CPU in half a minute. Prints a card for people, and one JSON line. Status 1 when a kernel is wrong. Parts:
`gpu_check_kernels`, `gpu_check_model`, `gpu_check_peers`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError

BATCHES = (1, 32, 128, 256)
INPUT_LEN, OUTPUT_LEN = 128, 128
TINY_BATCHES = (1, 3)
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
    started = time.perf_counter()
    peers = [] if args.tiny else _peers()
    if args.prepared is not None:
        sys.path.append(str(args.prepared / "packages"))
    report = _check(args, peers)
    report["seconds"] = round(time.perf_counter() - started, 1)
    print(f"\n{report['seconds']} s")
    print(json.dumps(report))
    return 0 if all(check["is_right"] for check in report["checks"]) else 1


def prepare(directory: Path, card: str, *, is_tiny: bool) -> int:
    """Writes the exported kernels, and the one package that reading them takes."""
    from jaxserve.bench.gpu_check_kernels import export_kernels
    from pallas_kernels import deviceless

    if (reason := deviceless.unavailable_reason()) is not None:
        raise ConfigError(f"--prepare {reason}")
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
        print(
            f"  {'right' if check.is_right else 'WRONG':<6} {check.route:<18} {check.name:<24} {check.error:.1e} of {check.allowed:.1e}",
            flush=True,
        )
    print("\nattention, a layer")
    speeds = []
    for speed in kernels.time_kernels(args.tiny, args.prepared):
        speeds.append(speed)
        print(f"  {speed.route:<18} {speed.name:<24} {speed.microseconds:10.1f} us, {speed.share_of_floor:.0%} of the floor", flush=True)
    for route, name, microseconds in peers:
        print(f"  {route:<18} {name:<24} {microseconds:10.1f} us")
    levels = {} if args.no_model else _levels(config, args.tiny)
    return {
        "benchmark": "gpu_check", "is_tiny": args.tiny, **facts,
        "checks": [asdict(check) | {"is_right": check.is_right} for check in checks],
        "speeds": [asdict(speed) for speed in speeds], "peers": peers, "model": levels,
    }  # fmt: skip


def _levels(config: EngineConfig, is_tiny: bool) -> dict[str, list[dict[str, Any]]]:
    """Decoding by each backend that serves the model here."""
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
    for backend in backends:
        print(f"\n{'a tiny model' if is_tiny else 'Llama-3.1-8B'} with made-up weights, {backend}, {input_len} in / {output_len} out")
        wanted = replace(config, dtype="bfloat16", attention_backend=backend, enable_prefix_caching=False, **sizes)
        engine = build_engine(wanted, checkpoint=checkpoint)
        try:
            for batch in batches:
                level = run_level(engine, batch, input_len=input_len, output_len=output_len)
                levels.setdefault(backend, []).append(asdict(level))
                gap = "no device in the trace" if level.gap_ms is None else f"device idle {level.gap_ms:.2f} ms a step"
                times = f"step {level.step_ms:.2f} ms, TTFT {level.ttft_ms:.1f} ms"
                print(f"  {batch:>4} requests: {level.tokens_per_s:9.1f} tokens/s, {times}, {gap}", flush=True)
        finally:
            engine.close()
        jax.clear_caches()
    return levels


def _peers() -> list[tuple[str, str, float]]:
    done = subprocess.run([sys.executable, "-m", "jaxserve.bench.gpu_check_peers"], stdout=subprocess.PIPE, text=True, check=False)
    try:
        results: list[tuple[str, str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return []
    return results


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
