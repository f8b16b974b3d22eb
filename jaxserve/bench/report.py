"""How a benchmark prints: a card for people on standard output, then one JSON document as the last line."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any


def print_report(title: str, facts: Mapping[str, Any], columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints `facts` line by line, `rows` as a Markdown table under `columns`, and everything as JSON."""
    print(f"\n{title}")
    for name, value in facts.items():
        print(f"  {name:<18} {value}")
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]
    print()
    print(_line(columns, widths))
    print("|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    for row in cells:
        print(_line(row, widths))
    print()
    print(json.dumps({"benchmark": title, **facts, "results": [dict(zip(columns, row, strict=True)) for row in rows]}))


def processor_name() -> str:
    """The processor's model name where the system tells it."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cell(value: Any) -> str:
    if value is None:  # not measured
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
