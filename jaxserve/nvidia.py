"""What of NVIDIA's is on this machine: the driver, JAX's plugin and the GPUs that this process may use. Loads neither JAX nor CUDA.

Next: `runner.device`, which starts JAX on one of them, and `serve.shares`, which deals them out among engines.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from jaxserve.errors import ConfigError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The variable that tells CUDA which GPUs a process may use, by number or name, in order."""
SMI_TIMEOUT_S = 30


def choose_platform(wanted: str, driver: str | None, plugin: str | None, jax_platforms: str = "") -> str:
    """ "cpu" or "gpu" for a `--device` value, from what the machine has. `jax_platforms` is the user's JAX_PLATFORMS, followed by auto."""
    if wanted == "cpu" or (wanted == "auto" and jax_platforms == "cpu"):
        return "cpu"
    if driver is None:
        if wanted == "gpu":
            raise ConfigError("--device gpu: no NVIDIA driver was found. Install one, or run on the CPU with --device cpu.")
        return "cpu"
    if plugin is None:
        raise ConfigError(
            f"this machine has NVIDIA driver {driver}, but JAX has no CUDA plugin to use it with: the extra `cuda12` is missing. "
            "Install it (`pip install '.[cuda12]'` in a clone), or run on the CPU on purpose with --device cpu."
        )
    return "gpu"


def nvidia_driver(root: Path = Path("/")) -> str | None:
    """Version of the NVIDIA driver ("unknown" where it does not say), or None where this process has none.

    A container sees its host's /proc entry also when it was given no GPU; it then has neither device file nor libcuda.
    """
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
        found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
        driver = found[0] if found else "unknown"
    except OSError:
        driver = None
    has_device = any((root / "dev" / name).exists() for name in ("nvidiactl", "nvidia0"))
    has_wsl = (root / "dev/dxg").exists() and _has_libcuda()
    if has_device or has_wsl or (driver is not None and _has_libcuda()):
        return driver or "unknown"
    return None


def cuda_plugin() -> str | None:
    """Name of the installed CUDA plugin of JAX."""
    for name in ("xla_cuda13", "xla_cuda12"):
        try:
            if find_spec(f"jax_plugins.{name}") is not None:
                return name
        except ModuleNotFoundError:
            return None
    return None


def visible_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    What the variable says where it is set (numbers, UUIDs, parts of a GPU made by MIG); else all that nvidia-smi lists, or that have a
    device file where it is missing.
    """
    given = environ.get(VISIBLE_DEVICES)
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        # CUDA itself reads only up to the first name that is no device.
        return names[: next((i for i, name in enumerate(names) if name in ("", "-1")), None)]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True).stdout
        count = sum(line.startswith("GPU ") for line in listed.splitlines())
    except (OSError, subprocess.SubprocessError):
        count = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in (root / "dev").glob("nvidia*"))
    return [str(i) for i in range(count)]


def _has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
