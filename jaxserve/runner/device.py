"""Chooses the device, its threads and its dtype before JAX starts, and reports them (`jaxserve doctor`).

`set_up_devices` must run before anything asks JAX for a device: platform, thread count and GPU memory share are read once, when the
backend starts. Knows no model beyond the widths that the dtype probe multiplies. `runner.memory` says how
much fits.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version

import jax
import jax.numpy as jnp
from jax._src import xla_bridge
from jax.typing import DTypeLike

import jaxserve
from jaxserve.cgroup import usable_cores
from jaxserve.config import EngineConfig, cache_dir
from jaxserve.errors import ConfigError
from jaxserve.models.linear import linear
from jaxserve.models.spec import ModelSpec
from jaxserve.nvidia import choose_platform, cuda_plugin, nvidia_driver
from jaxserve.runner.backend import kv_cache_name, page_dtype
from jaxserve.runner.memory import free_host_bytes
from pallas_kernels import dispatch

logger = logging.getLogger(__name__)

THREADS_VARIABLE = "PJRT_NPROC"
"""What JAX's CPU client reads its thread count from; XLA_FLAGS has nothing that works for it in 0.11."""
MEMORY_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
REPORTED_PACKAGES = ("jax", "jaxlib", "flax", "orbax-checkpoint", "numpy", "tokenizers", "grpcio", "jax-triton", "triton")

PROBE_ROWS = (8, 128)
PROBE_MAX_ELEMENTS = 1 << 22
PROBE_BYTES = 16 << 20
"""Weights that the probe walks through, as a step does: a single small matrix would stay in the processor's cache."""


def set_up_devices(config: EngineConfig) -> list[jax.Device]:
    """Starts JAX on the kind of device that the configuration asks for, and returns as many as the model is to be shared by.

    In a process where JAX already runs, takes them from what there is; threads and memory share stay as they are. The CPU is cut into as
    many devices as are needed.

    Raises:
        ConfigError: No GPU was found where one was asked for, too few are there, or there is an NVIDIA driver that JAX cannot use.
    """
    count = config.tensor_parallel_size
    kind = choose_platform(config.device, nvidia_driver(), cuda_plugin(), jax.config.jax_platforms or "")
    if not xla_bridge.backends_are_initialized():
        if config.num_threads is not None or not {THREADS_VARIABLE, "NPROC"} & os.environ.keys():
            os.environ[THREADS_VARIABLE] = str(config.num_threads or usable_cores())
        if not {MEMORY_VARIABLE, "XLA_PYTHON_CLIENT_MEM_FRACTION"} & os.environ.keys():
            os.environ[MEMORY_VARIABLE] = str(config.gpu_memory_utilization)
        # With the platforms named, a GPU that does not start is an error; by default JAX would go on with the CPU.
        jax.config.update("jax_platforms", "cpu" if kind == "cpu" else "cuda,cpu")
        if kind == "cpu" and count > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            jax.config.update("jax_num_cpu_devices", count)
    try:
        devices = jax.local_devices(backend=kind)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"JAX cannot use the {kind}: {reason}. NVIDIA driver: {nvidia_driver() or 'none'}; CUDA plugin: {cuda_plugin() or 'none'}. "
            "Update the driver to what the plugin needs, or run on the CPU on purpose with --device cpu."
        ) from error
    if count > len(devices):
        ways_out = f"Give --tensor-parallel-size {len(devices)} or less"
        if kind == "cpu":  # it is cut only when JAX starts
            ways_out += ", or load the model before anything else in this process uses JAX (without a device count in XLA_FLAGS)"
        raise ConfigError(f"tensor_parallel_size is {count}, but JAX has {len(devices)} {kind} devices here. {ways_out}.")
    return devices[:count]


def choose_dtype(wanted: str, device: jax.Device, spec: ModelSpec) -> str:
    """The dtype to run in: "bfloat16", "float16" or "float32".

    For "auto" the checkpoint's own on GPU. On CPU float32, unless the checkpoint is no more exact than bfloat16 or float16 and a
    probe of the model's matrix sizes (under 0.3 s) finds bfloat16 faster.
    """
    if wanted != "auto":
        return wanted
    if device.platform != "cpu":
        return spec.dtype or "bfloat16"
    if spec.dtype == "float32":
        return "float32"
    bfloat16_s, float32_s = (
        _probe(spec.hidden_size, max(layer.mlp.size for layer in spec.layers), dtype, device) for dtype in (jnp.bfloat16, jnp.float32)
    )
    choice = "bfloat16" if bfloat16_s < float32_s else "float32"
    logger.info("dtype %s: a probe took %.2f ms in bfloat16, %.2f ms in float32", choice, bfloat16_s * 1e3, float32_s * 1e3)
    return choice


def _probe(hidden_size: int, mlp_size: int, dtype: DTypeLike, device: jax.Device) -> float:
    """Seconds a token for one pass over weights of the model's width, in a step of few rows and in one of many, added."""
    width = min(mlp_size, PROBE_MAX_ELEMENTS // hidden_size)
    num_weights = max(1, min(16, PROBE_BYTES // (4 * width * hidden_size)))
    weights = [jnp.zeros((width, hidden_size), dtype, device=device) for _ in range(num_weights)]
    multiply = jax.jit(linear)
    total = 0.0
    for rows in PROBE_ROWS:
        x = jnp.zeros((rows, hidden_size), dtype, device=device)
        multiply(x, weights[0]).block_until_ready()
        best = math.inf
        for _ in range(3):
            started = time.perf_counter()
            jax.block_until_ready([multiply(x, weight) for weight in weights])
            best = min(best, time.perf_counter() - started)
        total += best / rows
    return total


def report() -> str:
    """What `jaxserve doctor` prints: versions, devices, threads, memory, and what would be used and why."""
    problem = None
    try:
        device = set_up_devices(EngineConfig(model=""))[0]
    except ConfigError as error:
        problem = str(error)
        device = set_up_devices(EngineConfig(model="", device="cpu"))[0]
    here = dispatch.this_device(device)
    attention, reason = dispatch.choose(here)
    rows = [
        ("jaxserve", f"{jaxserve.__version__}, Python {platform.python_version()}, {platform.platform()}"),
        ("versions", ", ".join(f"{name} {_version(name)}" for name in REPORTED_PACKAGES)),
        ("NVIDIA driver", nvidia_driver() or "none"),
        ("CUDA plugin", cuda_plugin() or "none (extra cuda12)"),
        ("devices", f"{len(jax.local_devices())} x {device.device_kind}"),
        ("threads", f"{os.environ.get(THREADS_VARIABLE) or os.environ.get('NPROC') or usable_cores()}, of {os.cpu_count()} cores"),
        ("memory", _memory_line(device)),
        ("attention", f"{attention} ({reason})"),
        *(("", f"{name}: {_standing(name, lack)}") for name, lack in dispatch.available(here).items() if name != attention),
        ("KV pages", _pages_line(attention, here)),
        ("cache directory", str(cache_dir())),
    ]
    if problem is not None:
        rows.append(("PROBLEM", problem))
    return "\n".join(f"{name:<17}{text}" for name, text in rows)


def _standing(implementation: str, lack: str | None) -> str:
    """Why an implementation was not taken for a plain layer."""
    return f"serves here too, comes later; --attention-backend {implementation} forces it" if lack is None else f"lacks {lack}"


def _pages_line(attention: str, here: dispatch.Device) -> str:
    """The page dtypes that the chosen implementation serves for a plain layer, and what it lacks for the others."""
    choices = EngineConfig.__dataclass_fields__["kv_cache_dtype"].metadata["choices"]
    dtypes = dict.fromkeys(page_dtype(name, "") for name in choices if name != "auto")
    lacks = {kv_cache_name(dtype): dispatch.lacks(attention, here, dispatch.Needs(page_dtype=dtype)) for dtype in dtypes}
    served = ", ".join(name for name, lack in lacks.items() if lack is None)
    others = "".join(f"; for {name} it lacks {lack}" for name, lack in lacks.items() if lack is not None)
    return f"auto is the dtype of the activations; {attention} serves {served}{others}"


def _memory_line(device: jax.Device) -> str:
    host = f"{free_host_bytes() / 2**30:.1f} GiB free for this process"
    stats = device.memory_stats() if device.platform != "cpu" else None
    return f"{stats['bytes_limit'] / 2**30:.1f} GiB of the device; host: {host}" if stats else host


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
