"""What is said of NVIDIA's driver, JAX's plugin and the GPUs, from directories and commands made up here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jaxserve import nvidia
from jaxserve.errors import ConfigError
from jaxserve.nvidia import choose_platform, nvidia_driver, visible_gpus


@pytest.mark.parametrize(
    ("wanted", "driver", "plugin", "variable", "expected"),
    [
        ("auto", None, None, "", "cpu"),
        ("auto", None, "xla_cuda12", "", "cpu"),
        ("auto", "570.1", "xla_cuda12", "", "gpu"),
        ("auto", "570.1", None, "cpu", "cpu"),
        ("cpu", "570.1", None, "", "cpu"),
        ("gpu", "570.1", "xla_cuda13", "cpu", "gpu"),
    ],
)
def test_platform(wanted: str, driver: str | None, plugin: str | None, variable: str, expected: str) -> None:
    assert choose_platform(wanted, driver, plugin, variable) == expected


@pytest.mark.parametrize("wanted", ["auto", "gpu"])
def test_a_driver_without_the_extra_stops_and_names_the_fix(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"driver 570\.1.*`cuda12` is missing.*pip install '\.\[cuda12\]'.*--device cpu"):
        choose_platform(wanted, "570.1", None)


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        choose_platform("gpu", None, "xla_cuda12")


def test_driver_of_a_machine_and_of_a_container_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "_has_libcuda", lambda: False)
    assert nvidia_driver(tmp_path) is None
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\nGCC version: 12.3.0\n")
    assert nvidia_driver(tmp_path) is None  # the host's entry, seen from a container that was given no GPU
    monkeypatch.setattr(nvidia, "_has_libcuda", lambda: True)
    assert nvidia_driver(tmp_path) == "570.133.20"
    monkeypatch.setattr(nvidia, "_has_libcuda", lambda: False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert nvidia_driver(tmp_path) == "570.133.20"
    version.unlink()
    assert nvidia_driver(tmp_path) == "unknown"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0", ["0"]),
        ("3, 1", ["3", "1"]),
        ("GPU-8932f937,MIG-2b7,5", ["GPU-8932f937", "MIG-2b7", "5"]),
        ("2,-1,3", ["2"]),
        ("", []),
    ],
)
def test_the_variable_says_which_gpus_there_are(given: str, expected: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": given}) == expected


def test_without_it_nvidia_smi_or_the_device_files_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = "GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n  MIG 1g.18gb Device 0: (UUID: MIG-3)\n"
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: subprocess.CompletedProcess(args, 0, listed))
    assert visible_gpus({}) == ["0", "1"]

    def missing(*args: object, **options: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia4", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]  # CUDA numbers those that it sees
