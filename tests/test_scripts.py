"""The scripts find a Python that works, and the lock is what pyproject.toml asks for."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.statistics import collector, describe_statistics
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PINNED = re.compile(r"^([a-z0-9._-]+)==([^\s;]+)(?: ; [^\\]+)? \\$")


def find_python(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs find_python of scripts/_python.sh where only `folder` and the system's tools are on PATH."""
    (folder / "bash").symlink_to("/bin/bash")
    return subprocess.run(
        ["bash", "-c", ". scripts/_python.sh; find_python"],
        cwd=ROOT,
        env={"PATH": str(folder), "HOME": str(folder), "PYENV_ROOT": str(folder / "pyenv"), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


REAL = f'exec "{os.path.realpath(sys.executable)}" "$@"'
FAILING_SHIM = "echo 'command not found in this version' >&2; exit 127"


def test_a_shim_that_fails_is_skipped(tmp_path: Path) -> None:
    script(tmp_path / "python3.12", FAILING_SHIM)
    script(tmp_path / "python3", REAL)
    assert find_python(tmp_path).stdout.strip() == os.path.realpath(sys.executable)


def test_a_python_under_pyenv_is_found(tmp_path: Path) -> None:
    script(tmp_path / "python3.12", FAILING_SHIM)
    script(tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python3", REAL)
    assert find_python(tmp_path).stdout.strip() == os.path.realpath(sys.executable)


def test_the_given_python_comes_first(tmp_path: Path) -> None:
    script(tmp_path / "python3.12", "exit 1")
    assert find_python(tmp_path, PYTHON=str(script(tmp_path / "mine", REAL))).returncode == 0


@pytest.mark.skipif(any(Path("/usr/local/bin").glob("python3.1[2-9]")), reason="this machine has a Python where the scripts look")
def test_what_is_missing_is_said(tmp_path: Path) -> None:
    script(tmp_path / "python3", FAILING_SHIM)
    result = find_python(tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert "error: no Python 3.12 or newer" in result.stderr
    assert "python3-venv" in result.stderr


@pytest.mark.parametrize("part", ["core", "cuda12", "gates", "dev"])
def test_the_lock_satisfies_pyproject(part: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"].get(part, [])]
    lines = (ROOT / "requirements" / f"{part}.txt").read_text().splitlines()
    pinned = {match[1]: match[2] for line in lines if (match := PINNED.match(line))}
    for requirement in map(Requirement, wanted):
        if requirement.name == project["name"]:  # an extra that another one brings
            continue
        version = pinned.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} is not in requirements/{part}.txt: run scripts/lock"
        assert requirement.specifier.contains(version), f"{requirement} against {version}: run scripts/lock"


def test_the_lock_pins_hashes_and_names_no_index() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        text = path.read_text()
        assert "://" not in text
        assert all(PINNED.match(line) or line.startswith("    --hash=sha256:") for line in text.splitlines()), path


def test_the_gates_count_what_is_drawn() -> None:
    """As Hypothesis words it for pytest."""
    statistics: list[Any] = []

    @settings(max_examples=7, database=None)
    @given(st.integers())
    def drawn(_: int) -> None: ...

    def note(stats: dict[str, Any]) -> None:
        statistics.append(describe_statistics(stats | {"nodeid": "drawn"}))

    with collector.with_value(note):
        drawn()
    report = runpy.run_path(str(ROOT / "scripts" / "gates_report.py"))["GatesReport"]()
    report.pytest_runtest_teardown(SimpleNamespace(hypothesis_statistics=statistics[0]))
    assert report.counts["shapes"] == 7


DEMO = "{root}/checkpoints/smollm2-135m-instruct"
DEMO_NAME = "--served-model-name smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("given", "file", "environ", "expected"),
    [
        ("", "", {}, f"{DEMO} {DEMO_NAME}"),
        ("--port 8001", "", {}, f"{DEMO} {DEMO_NAME} --port 8001"),
        ("m --port 8001", "", {}, "m --port 8001"),
        ("--port 8001 m", "", {}, "--port 8001 m"),
        ("--served-model-name mine", "", {}, f"{DEMO} --served-model-name mine"),
        ("", "", {"JAXSERVE_MODEL": "m"}, ""),
        ("", "", {"JAXSERVE_SERVED_MODEL_NAME": "mine"}, DEMO),
        ("--config file.yaml", "model: m", {}, "--config file.yaml"),
        ("--config file.yaml", "served-model-name: mine", {}, f"{DEMO} --config file.yaml"),
        ("--config=file.yaml", "port: 8001", {}, f"{DEMO} {DEMO_NAME} --config=file.yaml"),
        ("--config none.yaml", "", {}, "--config none.yaml"),
        ("--prot 8001", "", {}, "--prot 8001"),
        ("--help", "", {}, "--help"),
    ],
)
def test_serve_takes_the_demo_model_where_none_is_named(
    tmp_path: Path, given: str, file: str, environ: dict[str, str], expected: str
) -> None:
    """With an environment of stubs: a jaxserve that says what it is told, and finds the demo model converted."""
    for name in ("serve", "unnamed_settings.py"):
        script(tmp_path / "scripts" / name, "").write_bytes((ROOT / "scripts" / name).read_bytes())
    script(tmp_path / "scripts" / "_python.sh", "VENV=.venv; has_nvidia_driver() { false; }; ensure_environment() { :; }")
    script(tmp_path / ".venv" / "bin" / "python", f'exec "{sys.executable}" "$@"')
    script(tmp_path / ".venv" / "bin" / "jaxserve", 'echo "$@"')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file.yaml").write_text(file)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAXSERVE_")} | environ
    command = [str(tmp_path / "scripts" / "serve"), *given.split()]
    result = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["serve", *expected.format(root=tmp_path).split()], result.stderr
