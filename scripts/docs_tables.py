#!/usr/bin/env python
"""Writes the tables of docs/flags.md, metrics.md and errors.md from the code that they describe.

    python scripts/docs_tables.py            # rewrites what has changed
    python scripts/docs_tables.py --check    # only says what is stale; status 1

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; everything else in the pages is written by hand.
`tests/test_docs.py` runs the check.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from jaxserve import errors
from jaxserve.cli import COMMANDS
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.stats import EngineStats
from jaxserve.serve.engine_metrics import engine_families
from jaxserve.serve.request_metrics import RequestMetrics
from jaxserve.settings import GROUPS, OTHER_VARIABLES

DOCS = Path(__file__).parents[1] / "docs"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
EXAMPLE_INFO = EngineInfo(
    model_path="", model="M", model_type="", dtype="", max_model_len=8192, vocab_size=1, eos_token_ids=(), num_pages=2, page_size=16,
    max_num_seqs=1, max_num_batched_tokens=1,
)  # fmt: skip


def flags_table() -> str:
    """Every setting, a table for each group of the help."""
    parts = []
    specs = [spec for cls in (EngineConfig, ServerConfig) for spec in fields(cls) if spec.name != "model"]
    for group, title in GROUPS.items():
        rows = [
            (_flag(spec), f"`JAXSERVE_{spec.name.upper()}`", _default(spec), spec.metadata["help"])
            for spec in specs
            if spec.metadata["group"] == group
        ]
        parts.append(f"### {title}\n\n" + table(("flag", "variable", "default", "what it does"), rows))
    return "\n\n".join(parts)


def variables_table() -> str:
    """Variables that are no settings."""
    return table(("variable", "what it is"), [(f"`{name}`", text) for name, text in OTHER_VARIABLES.items()])


def commands_table() -> str:
    """The subcommands."""
    return table(("command", "what it does"), [(f"`jaxserve {name}`", text) for name, (text, _) in COMMANDS.items()])


def metrics_table() -> str:
    """Every family that a scrape may show."""
    families = [
        *engine_families("PREFIX", "M", EXAMPLE_INFO, EngineStats(), is_up=True),
        *RequestMetrics("PREFIX", "M", EXAMPLE_INFO.max_model_len).collect(),
    ]
    rows = []
    for family in families:
        name = family.name.removeprefix("PREFIX:") + ("_total" if family.type == "counter" else "")
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"model_name", "engine", "le"})
        more = f" Labels: {', '.join(f'`{label}`' for label in labels)}." if labels else ""
        rows.append((f"`{name}`", family.type, family.documentation + more))
    return table(("name", "type", "what it says"), rows)


def errors_table() -> str:
    """What a client is told for each exception."""
    rows = [
        (
            _first_sentence(cls.__doc__),
            str(response.http_status),
            f"`{response.openai_type}`",
            f"`{response.grpc_status}`",
            f"`{cls.__name__}`",
        )
        for cls, response in errors.RESPONSES.items()
    ]
    other = errors.INTERNAL
    rows.append(("Anything else: a bug.", str(other.http_status), f"`{other.openai_type}`", f"`{other.grpc_status}`", ""))
    return table(("when", "HTTP", "`error.type`", "gRPC", "exception"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "commands": commands_table,
    "flags": flags_table,
    "variables": variables_table,
    "metrics": metrics_table,
    "errors": errors_table,
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def fill(text: str) -> str:
    """The page with its tables as they should be."""
    return MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


def stale_pages() -> dict[Path, str]:
    """Pages that differ from what they should be, with what they should be."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    return {path: filled for path, text in pages.items() if (filled := fill(text)) != text}


def _flag(spec: Field[Any]) -> str:
    names = [f"`--{name.replace('_', '-')}`" for name in (spec.name, *spec.metadata["aliases"])]
    return ", ".join(names) + (f" {{{', '.join(spec.metadata['choices'])}}}" if spec.metadata["choices"] else "")


def _default(spec: Field[Any]) -> str:
    if isinstance(spec.default, bool):
        return "on" if spec.default else "off"
    if spec.default is None or spec.default == ():
        return ""
    return str(spec.default)


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").split()).partition(". ")[0].partition("; ")[0].rstrip(".") + "."


def main() -> int:
    """Writes or checks; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the generated tables of docs/.")
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 when a page is stale")
    options = parser.parse_args()
    pages = stale_pages()
    for path, text in pages.items():
        print(f"{path.relative_to(DOCS.parent)} {'is stale' if options.check else 'written'}")
        if not options.check:
            path.write_text(text, encoding="utf-8")
    return 1 if options.check and pages else 0


if __name__ == "__main__":
    sys.exit(main())
