"""Fixtures shared by the tests. The environment they run in is set in the `conftest.py` one folder up."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Tiny checkpoints with the logits and greedy tokens of an independent implementation."""
    return DATA / "golden"


@pytest.fixture(scope="session")
def golden_real_dir() -> Path:
    """Expected tokens of the demo model."""
    return DATA / "golden_real"


def fetch(model: str) -> Path:
    """A real model's GGUF file, fetched to where `scripts/serve` keeps the demo model's."""
    download = ROOT / "checkpoints" / ".download"
    download.mkdir(parents=True, exist_ok=True)
    command = [ROOT / "scripts" / "fetch_demo_model", download, model]
    with FileLock(download / f"{model}.lock"):  # tests run in several processes
        fetched = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(fetched.stdout.strip())


def converted(gguf: Path, name: str) -> Path:
    """The folder of checkpoints/ that holds the model converted."""
    from jaxserve.convert import convert

    directory = ROOT / "checkpoints" / name
    with FileLock(f"{gguf}.lock"):
        if not (directory / "manifest.json").exists():
            convert(gguf, directory)
    return directory


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF file."""
    return fetch("smollm2")


@pytest.fixture(scope="session")
def demo_model(demo_gguf: Path) -> Path:
    """SmolLM2-135M-Instruct, converted to where `scripts/serve` keeps it."""
    return converted(demo_gguf, "smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3_model() -> Path:
    """Gemma 3 270M, converted."""
    return converted(fetch("gemma3"), "gemma-3-270m")
