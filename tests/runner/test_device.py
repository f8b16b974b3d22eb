"""Choosing the device before JAX starts: platform, driver, threads, dtype, and doctor's report."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import cgroup
from jaxserve.cgroup import usable_cores
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.registry import resolve_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.nvidia import choose_platform
from jaxserve.runner import device as device_module
from jaxserve.runner.device import choose_dtype, report, set_up_devices
from pallas_kernels import dispatch


@pytest.fixture
def spec() -> ModelSpec:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return resolve_spec(config)


def test_a_backend_that_fails_names_driver_and_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()  # JAX runs already, so that the failing choice leaves no setting behind for other tests
    monkeypatch.setattr(device_module, "nvidia_driver", lambda: "470.57")
    monkeypatch.setattr(device_module, "cuda_plugin", lambda: "xla_cuda12")
    with pytest.raises(ConfigError, match=r"cannot use the gpu: .*470\.57.*xla_cuda12.*--device cpu"):
        set_up_devices(EngineConfig(model="m", device="gpu"))
    assert set_up_devices(EngineConfig(model="m", device="cpu"))[0].platform == "cpu"


def test_threads_follow_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    for quota, expected in ((None, cores), (0.5, 1), (1.9, 1), (1000.0, cores)):
        monkeypatch.setattr(cgroup, "cpu_quota", lambda quota=quota: quota)
        assert usable_cores() == expected


def test_too_few_devices_are_refused() -> None:
    jax.devices()  # JAX runs already, and so is not started with as many as are needed
    with pytest.raises(ConfigError, match=r"size is 200, but JAX has \d+ cpu devices here\. .*before anything else .* uses JAX"):
        set_up_devices(EngineConfig(model="m", device="cpu", tensor_parallel_size=200))


THREADS_SCRIPT = """
import os, sys
from jaxserve.config import EngineConfig
from jaxserve.runner.device import set_up_devices
devices = set_up_devices(EngineConfig(model="m", device="cpu", num_threads=3, gpu_memory_utilization=0.5, tensor_parallel_size=2))
import jax.numpy as jnp
(jnp.ones((64, 64)) @ jnp.ones((64, 64))).block_until_ready()
names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
print(sum("XLAEigen" in name for name in names), os.environ["XLA_CLIENT_MEM_FRACTION"], len(devices))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_threads_and_devices_are_set_before_jax_starts() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("NPROC", "PJRT_NPROC", "XLA_CLIENT_MEM_FRACTION")}
    done = subprocess.run([sys.executable, "-c", THREADS_SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "0.5", "2"]


def test_dtype(monkeypatch: pytest.MonkeyPatch, spec: ModelSpec) -> None:
    cpu = jax.devices("cpu")[0]
    gpu: Any = type("Device", (), {"platform": "gpu"})()
    assert choose_dtype("float16", cpu, spec) == "float16"
    assert choose_dtype("auto", gpu, spec) == "bfloat16"
    assert choose_dtype("auto", gpu, replace(spec, dtype="float32")) == "float32"
    assert choose_dtype("auto", cpu, replace(spec, dtype="float32")) == "float32"
    assert choose_dtype("auto", cpu, spec) in ("bfloat16", "float32")
    for seconds, expected in (({"bfloat16": 1.0, "float32": 2.0}, "bfloat16"), ({"bfloat16": 2.0, "float32": 1.0}, "float32")):
        monkeypatch.setattr(device_module, "_probe", lambda hidden, mlp, dtype, device, s=seconds: s[jax.numpy.dtype(dtype).name])
        assert choose_dtype("auto", cpu, spec) == expected


def test_report_names_devices_versions_and_attention() -> None:
    text = report()
    for expected in ("jax 0.11", "cpu", "threads", "GiB free", "attention", "NVIDIA driver"):
        assert expected in text
    assert "PROBLEM" not in text


def test_report_gives_each_kernel_its_reason() -> None:
    lines = dict(line.strip().split(": ", 1) for line in report().splitlines() if line.startswith(" "))
    assert lines["triton"] == lines["mosaic_gpu"] == "lacks an NVIDIA GPU, this is a cpu"
    assert lines["reference"] == "serves here too, comes later; --attention-backend reference forces it"


def test_report_says_which_pages_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def line() -> str:
        return next(line for line in report().splitlines() if line.startswith("KV pages"))

    lacks, attention = dispatch.lacks, dispatch.choose(dispatch.this_device())[0]
    assert line().endswith(f"auto is the dtype of the activations; {attention} serves bfloat16, float16, float32, int8, fp8")
    monkeypatch.setattr(
        dispatch,
        "lacks",
        lambda name, here, *needs: "uint8 pages" if needs and needs[0].page_dtype == "uint8" else lacks(name, here, *needs),
    )
    assert line().endswith(f"{attention} serves bfloat16, float16, float32, int8; for fp8 it lacks uint8 pages")


def test_report_shows_a_driver_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "nvidia_driver", lambda: "570.1")
    monkeypatch.setattr(device_module, "cuda_plugin", lambda: None)
    monkeypatch.setattr(device_module, "choose_platform", lambda wanted, *rest: choose_platform(wanted, "570.1", None))
    assert "PROBLEM" in report()
