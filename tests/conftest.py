"""Fixtures shared by the tests. The environment they run in is set in the `conftest.py` one folder up."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

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
    command = [ROOT / "scripts" / "fetch_demo_model", ROOT / "checkpoints" / ".download", model]
    fetched = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(fetched.stdout.strip())


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF file."""
    return fetch("smollm2")


@pytest.fixture(scope="session")
def demo_model(demo_gguf: Path) -> Path:
    """SmolLM2-135M-Instruct, converted to where `scripts/serve` keeps it."""
    from jaxserve.convert import convert

    converted = ROOT / "checkpoints" / "smollm2-135m-instruct"
    if not (converted / "manifest.json").exists():
        convert(demo_gguf, converted)
    return converted


@pytest.fixture(scope="session")
def gemma3_model() -> Path:
    """Gemma 3 270M, converted."""
    from jaxserve.convert import convert

    converted = ROOT / "checkpoints" / "gemma-3-270m"
    if not (converted / "manifest.json").exists():
        convert(fetch("gemma3"), converted)
    return converted
