"""Conversions that several tests look at, made once; and a helper that writes small checkpoints to break."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve.convert import convert

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`converted(folder)`: the converted golden checkpoint."""
    root = tmp_path_factory.mktemp("converted")

    def get(name: str) -> Path:
        target = root / name
        if not target.exists():
            gguf = list((GOLDEN / name).glob("*.gguf"))
            convert(gguf[0] if gguf else GOLDEN / name, target)
        return target

    return get


@pytest.fixture
def broken(tmp_path: Path) -> Callable[[str], Path]:
    """`broken(folder)`: a writable copy of a golden checkpoint."""

    def get(name: str) -> Path:
        target = tmp_path / "source"
        shutil.copytree(GOLDEN / name, target, copy_function=shutil.copyfile)
        return target

    return get
