"""The pages of docs/: generated tables are not stale, every file, function, setting and page that is named exists."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.settings import OTHER_VARIABLES

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"])
NAMED_FILE = re.compile(r"`((?:[\w-]+/)*\w+\.(?:py|proto))(?:: (\w+))?`")
NAMED_FLAG = re.compile(r"`(--[a-z][a-z0-9-]+)")
NAMED_VARIABLE = re.compile(r"\bJAXSERVE_[A-Z_]+\b")
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
SPECS = {spec.name: spec for cls in (EngineConfig, ServerConfig) for spec in fields(cls)}


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "scripts" / "docs_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names_in(path: Path) -> set[str]:
    """Functions, classes, methods and constants of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    assigned = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    assigned += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return names | {target.id for target in assigned if isinstance(target, ast.Name)}


def test_generated_tables_are_not_stale(tables: ModuleType) -> None:
    stale = [path.name for path in tables.stale_pages()]
    assert not stale, "run `python scripts/docs_tables.py`"


def test_a_stale_table_is_noticed(tables: ModuleType) -> None:
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert tables.fill(page) == page
    assert tables.fill(page.replace("| 8000 |", "| 9000 |")) == page


def test_every_metric_error_and_setting_is_in_its_table(tables: ModuleType) -> None:
    flags, metrics = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("flags.md", "metrics.md"))
    assert all(f"`JAXSERVE_{name.upper()}`" in flags for name in SPECS if name != "model")
    assert len(re.findall(r"^\| `\w+` \| (?:gauge|counter|histogram) \|", metrics, re.MULTILINE)) >= 25
    for name in re.findall(r"jaxserve:(\w+?)(?:_bucket)?\b", metrics):
        assert f"| `{name}` |" in metrics, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name, attribute in NAMED_FILE.findall(text):
        places = [folder / name for folder in (ROOT, ROOT / "jaxserve", page.parent)]
        path = next((place for place in places if place.is_file()), None)
        assert path is not None, f"{name} does not exist"
        assert not attribute or attribute in names_in(path), f"{name} has no {attribute}"
    for target in LINK.findall(text):
        assert "://" in target or (page.parent / target).exists(), target
    known = {f"JAXSERVE_{name.upper()}" for name in SPECS} | set(OTHER_VARIABLES) | {"JAXSERVE_NAME"}
    assert set(NAMED_VARIABLE.findall(text)) <= known


@pytest.mark.parametrize("group", ["scheduler", "cache", "execution"])
def test_tuning_names_every_setting_of_the_engine(group: str) -> None:
    text = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    for name, spec in SPECS.items():
        if spec.metadata.get("group") == group:
            assert re.search(rf"^\| `{name}` \| .*`[\w/]+\.py: \w+`", text, re.MULTILINE), name


def test_an_error_of_the_page_is_what_the_code_says() -> None:
    from jaxserve.core.sampling_params import SamplingParams

    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    with pytest.raises(Exception, match="max_tokens is 0") as caught:
        SamplingParams(max_tokens=0)
    assert not isinstance(caught.value, ConfigError)
    assert str(caught.value) in page


def test_examples_can_be_read() -> None:
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    kubernetes = yaml.safe_load(next(body for kind, body in blocks if kind == "yaml"))
    probes = {name: probe["httpGet"]["path"] for name, probe in kubernetes["containers"][0].items() if name.endswith("Probe")}
    assert probes == {"startupProbe": "/health", "readinessProbe": "/ready", "livenessProbe": "/live"}
    assert kubernetes["terminationGracePeriodSeconds"] > SPECS["shutdown_timeout"].default + 15
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(next(body for kind, body in blocks if kind == "ini"))
    assert unit["Service"]["KillMode"] == "mixed"
    for page in PAGES:
        for body in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            compile(body, page.name, "exec")
    for body in [body for page in PAGES for body in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)]:
        assert isinstance(yaml.safe_load(body), dict)


def test_flags_that_are_named_exist() -> None:
    from jaxserve.cli import SAMPLING_FLAGS

    names = {*SPECS, *SAMPLING_FLAGS, *(alias for spec in SPECS.values() for alias in spec.metadata.get("aliases", ()))}
    known = {f"--{name.replace('_', '-')}" for name in names} | {"--no-async-scheduling", "--config", "--help", "--url", "--no-"}
    for page in PAGES:
        for flag in NAMED_FLAG.findall(page.read_text(encoding="utf-8")):
            assert flag in known or flag.removesuffix("-") in ("--no",), f"{page.name}: {flag}"
