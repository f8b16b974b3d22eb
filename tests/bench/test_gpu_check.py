"""Parts of `scripts/gpu_check` that need no GPU compiler: what is counted, and what a failure leaves. `tests/deviceless` runs it whole."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.bench import gpu_check, gpu_check_model
from jaxserve.bench import gpu_check_kernels as kernels
from jaxserve.core.events import TokenEvent
from jaxserve.errors import ConfigError


class Engine:
    """Two requests, two tokens more for each once both have begun: a step of a prompt, another one, and two of both."""

    info = SimpleNamespace(vocab_size=8)

    def __init__(self, error: str | None = None) -> None:
        self._steps: list[list[str]] = []
        self._ids: list[str] = []
        self._error = error

    def add(self, request: Any) -> None:
        if not self._steps:
            self._steps, self._ids = [["b"], ["b", "a"], ["a", "b"], ["a", "b"]], []
        self._ids.append(request.request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._steps)

    def step(self) -> list[TokenEvent]:
        names = dict(zip("ab", self._ids, strict=True))
        return [TokenEvent(names[name], 0, [1], 3, 0, error=self._error) for name in self._steps.pop(0)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second after the one before."""
    seconds: Iterator[int] = iter(range(100))
    monkeypatch.setattr(gpu_check_model.time, "perf_counter", lambda: float(next(seconds)))


@pytest.mark.usefixtures("clock")
def test_tokens_count_from_the_step_after_the_last_first_token() -> None:
    engine: Any = Engine()
    run = gpu_check_model._run(engine, 2, input_len=3, output_len=3, label="")
    assert run.first_s == [1.0, 2.0]
    assert (run.num_steps, run.num_decode_steps, run.num_tokens) == (4, 2, 4)
    assert run.decode_s == 3.0, "two steps, and a look at the clock at the end"


@pytest.mark.usefixtures("clock")
def test_idle_time_is_shared_out_among_all_steps_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Engine()
    monkeypatch.setattr(gpu_check_model, "device_idle_s", lambda directory: 0.012)
    traced: list[Any] = []
    monkeypatch.setattr(jax.profiler, "trace", lambda directory, profiler_options: traced.append(profiler_options) or nullcontext())
    assert gpu_check_model.run_level(engine, 2, input_len=3, output_len=3).gap_ms == pytest.approx(3.0)
    assert traced[0].python_tracer_level == 0, "recording Python would make the host slow, and the device idle"


def test_a_request_that_ends_with_an_error_is_no_fast_one() -> None:
    engine: Any = Engine(error="the step failed")
    with pytest.raises(RuntimeError, match="the step failed"):
        gpu_check_model._run(engine, 2, input_len=3, output_len=3, label="")


def test_a_route_that_does_not_run_is_wrong_and_the_others_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = kernels.paged_attention

    def broken(*args: Any, implementation: str, **options: Any) -> jax.Array:
        if implementation == "cpu_native":
            raise RuntimeError("too much shared memory\nand so on")
        return attention(*args, implementation=implementation, **options) * (float("nan") if implementation == "xla" else 1.0)

    monkeypatch.setattr(kernels, "paged_attention", broken)
    monkeypatch.setattr(kernels, "TEST_SPECS", kernels.TEST_SPECS[:1])
    monkeypatch.setattr(kernels, "timed_specs", lambda is_tiny: kernels.TEST_SPECS)
    monkeypatch.setattr(kernels.dispatch, "lacks", lambda name, *_: None if name in ("cpu_native", "xla") else "a GPU")
    checks = {check.route: check for check in kernels.check_kernels(True, None)}
    assert (checks["cpu_native"].error, checks["cpu_native"].problem) == (None, "too much shared memory")
    assert (checks["xla"].error, checks["xla"].problem) == (None, None), "NaN, which JSON has not"
    assert not any(check.is_right for check in checks.values())
    speeds = {speed.route: speed for speed in kernels.time_kernels(True, None)}
    assert speeds["cpu_native"].problem == "too much shared memory"
    assert speeds["xla"].microseconds is not None


def test_calls_are_timed_behind_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second for each look at the clock, whatever lies between: shared out among the calls and their layers."""
    spec = kernels.TEST_SPECS[0]
    seconds: Iterator[int] = iter(range(100))
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: float(next(seconds)))
    args = kernels.make_args(spec)
    took = kernels._seconds_a_layer(lambda q, *_: q, args, num_repeats=2)
    assert took == 1 / kernels.NUM_QUEUED / kernels.NUM_LAYERS


def test_a_wrong_flag_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="that directory has no kernels"):
        gpu_check.main(["--tiny", "--prepared", str(tmp_path / "missing")])
    from pallas_kernels import deviceless

    monkeypatch.setattr(deviceless, "unavailable_reason", lambda: None)
    with pytest.raises(ConfigError, match="--card H999 is not known; there are H200, A100"):
        gpu_check.main(["--prepare", str(tmp_path), "--card", "H999"])


def test_other_libraries_that_hang_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if options.get("timeout") is None:
            return subprocess.CompletedProcess(command, 0, stdout=json.dumps([["x", "y", 1.0]]))
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    assert gpu_check._peers() == []


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import runpy, sys; from jaxserve import nvidia; nvidia.nvidia_driver = lambda: None; sys.argv = ['gpu_check']\n"
    code += "runpy.run_module('jaxserve.bench.gpu_check', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("jaxserve: error: --device gpu: no NVIDIA driver was found")
    assert "Traceback" not in done.stderr
