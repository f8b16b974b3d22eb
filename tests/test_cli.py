"""The command itself: help, versions, and every wrong use as one line on stderr with status 2."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxserve import SamplingParams, __version__
from jaxserve.cli import COMMANDS, main
from jaxserve.config import EngineConfig

HEAVY = ("jax", "flax", "orbax", "transformers", "tokenizers", "numpy", "grpc", "starlette")


def loaded_by(code: str) -> set[str]:
    """Names among HEAVY that the code leaves in sys.modules of a new process."""
    script = f"import sys\n{code}\nprint(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["generate", "--help"], ["bench"], ["bench", "nothing"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    assert loaded_by(f"from jaxserve.cli import main\ntry:\n    main({arguments})\nexcept SystemExit:\n    pass") == set()


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
        (["serve", "m", "--api-kye=s3cret"], "unknown argument '--api-kye'. Did you mean --api-key?"),
        (["serve", "m", "--max-model-len=x"], "--max-model-len: max_model_len is 'x'; it must be a whole number, such as 4096 or 32k."),
        (["serve", "m", "--dtype", "int4"], "dtype is 'int4'; it must be one of auto, bfloat16, float16, float32."),
        (["serve", "m", "--config", "/no/such.yaml"], "cannot read the configuration file"),
        (["serve", "m", "--http-only", "--grpc-only"], "http_only and grpc_only are both set"),
        (["generate"], "the following arguments are required: MODEL"),
        (["generate", "m", "--temperature", "hot"], "invalid float value: 'hot'"),
        (["generate", "m", "hello", "--temperature", "-1"], "temperature is -1.0; it must be between 0.0 and 2.0."),
        (["bench", "througput"], "Did you mean throughput?"),
        (["convert", "m"], "the following arguments are required: DST"),
        (["convert", "m", "n", "--dtpye", "float16"], "unknown argument '--dtpye'. Did you mean --dtype?"),
        (["convert", "m", "n", "--dtype", "int4"], "argument --dtype: invalid choice: 'int4'"),
        (["bench", "throughput", "m", "--repeats", "0"], "--repeats is 0; it must be at least 1."),
        (["bench", "throughput", "m", "--num-prompts", "0"], "--num-prompts holds 0; every load level must be at least 1."),
        (["bench", "throughput", "m", "--fast"], "unrecognized arguments: --fast"),
        (["bench", "throughput"], "the following arguments are required: MODEL"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxserve: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_reader_that_has_enough_is_no_traceback() -> None:
    process = subprocess.Popen([sys.executable, "-m", "jaxserve", "bench", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 1


def test_a_missing_checkpoint_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "none")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("jaxserve: error: ")
    assert captured.err.count("\n") == 1


class EchoLLM:
    """Answers every prompt with what it was given."""

    error: str | None = None

    def __init__(self, config: EngineConfig) -> None:
        self.text = f"{config.model} {config.dtype}"

    @classmethod
    def from_config(cls, config: EngineConfig, stage: Callable[[str, float, str], None]) -> EchoLLM:
        stage("weights", 1.5, config.dtype)
        return cls(config)

    def __enter__(self) -> EchoLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(top_k=7)

    def generate(self, prompts: list[str], params: SamplingParams) -> list[SimpleNamespace]:
        assert (params.top_k, params.temperature) == (7, 0.5)
        outputs = [[SimpleNamespace(text=f"{self.text} {prompt}") for _ in range(params.n)] for prompt in prompts]
        return [SimpleNamespace(outputs=each, error=self.error) for each in outputs]

    def chat(self, messages: list[list[dict[str, str]]], params: SamplingParams) -> list[SimpleNamespace]:
        return self.generate([f"{message['role']}: {message['content']}" for conversation in messages for message in conversation], params)


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        (["a", "b", "-n", "2"], "", "m float32 a\nm float32 a\nm float32 b\nm float32 b\n"),
        ([], "two\nlines\n", "m float32 two\nlines\n"),
        (["hello", "--chat"], "", "m float32 user: hello\n"),
        (["--chat", "hello"], "", "m float32 user: hello\n"),
        (["a", "--seed", "3", "b", "--no-enable-prefix-caching", "c"], "", "m float32 a\nm float32 b\nm float32 c\n"),
    ],
)
def test_generate_prints_only_text(
    arguments: list[str], stdin: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jaxserve.llm.LLM", EchoLLM)
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert main(["generate", "m", *arguments, "--temperature", "0.5", "--dtype", "float32"]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected
    assert captured.err.split() == ["weights", "1.50", "s", "float32"], "stages of start-up go to stderr"


@pytest.mark.parametrize("stdin", ["", "\n"])
def test_generate_wants_a_prompt_before_it_starts(stdin: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("jaxserve.llm.LLM", EchoLLM)
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert main(["generate", "m"]) == 2
    assert capsys.readouterr().err == "jaxserve: error: standard input is empty: give a prompt there or as an argument.\n"


def test_generate_tells_of_a_failed_prompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("jaxserve.llm.LLM", EchoLLM)
    monkeypatch.setattr(EchoLLM, "error", "the step failed")
    assert main(["generate", "m", "a", "--temperature", "0.5"]) == 1
    assert capsys.readouterr().err.endswith("jaxserve: error: the step failed\n")
