from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxserve


def test_names_load_on_first_use() -> None:
    names = [name for name in jaxserve.__all__ if not name.startswith("_")]
    assert names == [
        "LLM", "AsyncLLM", "CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "EngineConfig", "PoolingParams",
        "RequestOutput", "SamplingParams",
    ]  # fmt: skip
    assert [getattr(jaxserve, name).__name__ for name in names] == names
    assert set(jaxserve.__all__) <= set(dir(jaxserve))
    with pytest.raises(AttributeError, match="Nothing"):
        _ = jaxserve.Nothing


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import jaxserve", {"jax", "transformers", "tokenizers", "numpy", "jaxserve.core"}),
        ("from jaxserve import LLM, RequestOutput, SamplingParams", {"jax", "transformers", "numpy"}),
    ],
)
def test_imports_stay_light(statement: str, absent: set[str]) -> None:
    code = f"import sys; {statement}; print(sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_version_is_the_packages() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert jaxserve.__version__ == pyproject["project"]["version"]
