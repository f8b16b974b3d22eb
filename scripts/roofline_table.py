#!/usr/bin/env python
"""Writes the roofline table of docs/performance.md: compiles the decode steps of five models for an H200 with none here. Minutes.

    JAX_PLATFORMS=cpu .venv-cuda12/bin/python scripts/roofline_table.py [MODEL ...]

Needs the environment of `scripts/gates`, which also finds a stale table (tests/deviceless/test_roofline.py).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxserve.bench import hlo, roofline
from jaxserve.bench.roofline import Floor
from jaxserve.bench.whole_step import WholeStep
from jaxserve.core.buckets import Bucket
from jaxserve.models.registry import resolve_spec
from jaxserve.runner.memory import MIN_PAGES
from pallas_kernels import deviceless

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
CONFIGS = ROOT / "tests" / "deviceless" / "configs"
MODELS = {"llama-3.1-8b": 1, "llama-3.1-70b": 8, "qwen3-30b-a3b": 1, "gemma-3-27b": 1, "deepseek-v2-lite": 1}
MARKED = re.compile(r"(<!-- roofline -->\n)(.*)(<!-- end of roofline -->)", re.DOTALL)
HEAD = (
    "| model | batch | context | needed GB | moved GB | moved / needed | TFLOP | floor ms | bound | tokens/s at the floor | fits |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | --- |\n"
)


def rows(name: str, step: WholeStep, floors: Iterable[Floor]) -> list[str]:
    """Lines of the table for one model."""
    cards = f"{name}, each of {step.num_devices}" if step.num_devices > 1 else name
    limit = deviceless.CARDS[step.card].memory_bytes
    lines = []
    for floor in floors:
        bound = "memory" if floor.memory_s >= floor.compute_s else "compute"
        fits = "yes" if floor.held_bytes <= limit else f"no: {floor.held_bytes / 1e9:,.0f} GB"
        cells = (
            cards, str(floor.batch), f"{floor.context:,}", f"{floor.needed_bytes / 1e9:.1f}", f"{floor.moved_bytes / 1e9:.1f}",
            f"{floor.ratio:.2f}", f"{floor.num_operations / 1e12:.2f}", f"{floor.floor_s * 1e3:.2f}", bound,
            f"{float(f'{floor.batch / floor.floor_s:.2g}'):,.0f}", fits,  # two digits: the number of pages moves the fourth
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(names: Sequence[str]) -> int:
    """Writes the rows of the named models anew, or of all; returns the exit status."""
    for name in names or MODELS:
        step = WholeStep(resolve_spec(json.loads((CONFIGS / f"{name}.json").read_text())), num_devices=MODELS[name])
        lines: list[str] = []
        for batch in roofline.BATCHES:
            count = roofline.decode_rows(step, batch)
            program = step.lower(Bucket(count, count, count, is_decode=True), MIN_PAGES).compile(roofline.COMPILER_OPTIONS)
            lines += rows(name, step, roofline.decode_floors(step, batch, hlo.parse(program.as_text())))
            print(lines[-1], flush=True)
        text = PAGE.read_text(encoding="utf-8")
        if (place := MARKED.search(text)) is None:
            print(f"{PAGE} has no place for the table: <!-- roofline --> ... <!-- end of roofline -->", file=sys.stderr)
            return 1
        # Each model's rows are written when they are there: the whole takes minutes.
        kept = [line for line in place[2].splitlines()[2:] if line and not line.startswith(f"| {name}")]
        order = list(MODELS)
        table = sorted([*kept, *lines], key=lambda line: order.index(line[2:].partition(" ")[0].rstrip(",")))
        PAGE.write_text(text[: place.end(1)] + HEAD + "\n".join(table) + "\n" + text[place.start(3) :], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
