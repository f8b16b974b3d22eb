"""The command itself: help, versions, and every wrong use as one line on stderr with status 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve import __version__
from jaxserve.cli import COMMANDS, main

HEAVY = ("jax", "flax", "orbax", "transformers", "tokenizers", "numpy", "grpc", "starlette")


def loaded_by(code: str) -> set[str]:
    """Names among HEAVY that the code leaves in sys.modules of a new process."""
    script = f"import sys\n{code}\nprint(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["generate", "--help"], ["bench"], ["bench", "nothing"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    assert loaded_by(f"from jaxserve.cli import main\ntry:\n    main({arguments})\nexcept SystemExit:\n    pass") == set()


def test_import_jaxserve_is_lazy() -> None:
    assert loaded_by("import jaxserve; assert 'LLM' in dir(jaxserve); jaxserve.SamplingParams()") == set()


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxserve {__version__}\n"
    assert main([]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["srve"], "unknown command 'srve'. Did you mean serve?"),
        (["serve"], "no model given"),
        (["serve", "m", "--max-modle-len", "3"], "unknown argument '--max-modle-len'. Did you mean --max-model-len?"),
        (["serve", "m", "--max-model-len=x"], "--max-model-len: max_model_len is 'x'; it must be a whole number, such as 4096 or 32k."),
        (["serve", "m", "--dtype", "int4"], "dtype is 'int4'; it must be one of auto, bfloat16, float16, float32."),
        (["serve", "m", "--config", "/no/such.yaml"], "cannot read the configuration file"),
        (["serve", "m", "--http-only", "--grpc-only"], "http_only and grpc_only are both set"),
        (["generate"], "the following arguments are required: MODEL"),
        (["generate", "m", "--temperature", "hot"], "invalid float value: 'hot'"),
        (["generate", "m", "hello", "--temperature", "-1"], "temperature is -1.0; it must be between 0.0 and 2.0."),
        (["bench", "througput"], "Did you mean throughput?"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxserve: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_missing_checkpoint_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "none")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("jaxserve: error: ")
    assert captured.err.count("\n") == 1
