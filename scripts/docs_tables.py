#!/usr/bin/env python
"""Writes the tables of docs/flags.md, metrics.md, errors.md and models.md from the code that they describe, and from its tests.

    python scripts/docs_tables.py            # rewrites what has changed
    python scripts/docs_tables.py --check    # only says what is stale; status 1

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; everything else in the pages is written by hand.
`tests/test_docs.py` runs the check.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from jaxserve import errors
from jaxserve.cli import COMMANDS
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.stats import EngineStats
from jaxserve.models.registry import FAMILIES, resolve_spec
from jaxserve.models.spec import ModelSpec, MoESpec
from jaxserve.serve.engine_metrics import EngineReport, engine_families
from jaxserve.serve.request_metrics import RequestMetrics
from jaxserve.settings import GROUPS, OTHER_VARIABLES

ROOT = Path(__file__).parents[1]
DOCS, TESTS = ROOT / "docs", ROOT / "tests"
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
        *engine_families("PREFIX", "M", [EngineReport(EXAMPLE_INFO, EngineStats(), is_up=True)]),
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


def models_table() -> str:
    """Every file of families, with the golden checkpoints that the tests of the model and of the engine hold it to."""
    specs = {path.parent.name: resolve_spec(json.loads(path.read_text())) for path in sorted((TESTS / "data/golden").glob("*/config.json"))}
    tolerance: dict[Any, float] = {}  # of every folder that a test of the engine names
    for path in (TESTS / "golden/test_golden.py", TESTS / "golden/test_recurrent.py"):
        named = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        tolerance |= dict.fromkeys(named, constants(path)["TOLERANCE"]["atol"])
    rounded = constants(TESTS / "models/test_bfloat16.py")
    rows = []
    for module in sorted({family.resolve.__module__ for family in FAMILIES}):
        families = {family.name: family for family in FAMILIES if family.resolve.__module__ == module}
        architectures = [name for family in families.values() for name in family.architectures]
        folders = [folder for folder, spec in specs.items() if spec.family in families]
        untested = sorted(families.keys() - {specs[folder].family for folder in folders}) + [f for f in folders if f not in tolerance]
        if untested:
            raise ValueError(f"{module}: no test covers {', '.join(untested)}, so docs/models.md cannot name it")
        tolerances = sorted({tolerance[folder] for folder in folders})
        limits = sorted({rounded["MOE_LIMIT" if _is_mixture(specs[folder]) else "DENSE_LIMIT"] for folder in folders})
        rows.append(
            (
                str(sys.modules[module].__doc__).partition("\n")[0],
                _code(architectures),
                _code(folders),
                ", ".join(map(str, tolerances)),
                ", ".join(f"{limit:.0%}" for limit in limits),
            )
        )
    return table(("models", "`architectures`", "golden checkpoints", "float32", "bfloat16"), rows)


def refusals_table() -> str:
    """Every value of a config that a family refuses."""
    rows = []
    for module in sorted({family.resolve.__module__ for family in FAMILIES}):
        tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text())
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "refuse"]:
            options = {option.arg: option.value for option in call.keywords}
            field, unless, reason = (ast.unparse(node) for node in (call.args[0], options["unless"], options["reason"]))
            values = f"other than `{_json(unless)}`"
            rows.append((_code([ast.literal_eval(field)]), values, module.rpartition(".")[2], ast.literal_eval(reason) + "."))
    return table(("field of `config.json`", "refused", "file of the family", "reason"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "commands": commands_table,
    "flags": flags_table,
    "variables": variables_table,
    "metrics": metrics_table,
    "errors": errors_table,
    "models": models_table,
    "refusals": refusals_table,
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


def constants(path: Path) -> dict[str, Any]:
    """What a file's plain assignments give, where they are literals."""
    result: dict[str, Any] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            with suppress(ValueError):
                result[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    return result


def _is_mixture(spec: ModelSpec) -> bool:
    return any(isinstance(layer.mlp, MoESpec) for layer in spec.layers)


def _json(expression: str) -> str:
    return {"True": "true", "False": "false"}.get(expression, expression.removeprefix("config."))


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


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
