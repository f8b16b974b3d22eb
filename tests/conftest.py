"""Fixtures shared by the tests. The environment they run in is set in the `conftest.py` one folder up."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Tiny checkpoints with the logits and greedy tokens of an independent implementation."""
    return DATA / "golden"


@pytest.fixture(scope="session")
def golden_real_dir() -> Path:
    """Expected tokens of the demo model."""
    return DATA / "golden_real"
