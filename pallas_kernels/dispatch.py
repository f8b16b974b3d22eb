"""Which implementation runs: by what the machine and the model are, never by trial at run time.

`choose` takes the best that lacks nothing and says why; `lacks` names what keeps an implementation from running. Both are asked once, at
start-up, for all of a model's layers; `load` then finds each operation's function by the chosen name. Knows no model. Next: an
operation's `api`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax

from pallas_kernels import tuning
from pallas_kernels.linear import cpu_native as native_linear
from pallas_kernels.paged_attention import cpu_native as native_attention

IMPLEMENTATIONS = ("cpu_native", "mosaic_gpu", "triton", "xla", "reference")
"""Best first, where nothing else was measured: see `choose`."""

_FALLBACKS = {
    "linear": {"mosaic_gpu": "xla", "triton": "xla"},
    "grouped_linear": {"cpu_native": "xla", "mosaic_gpu": "xla"},
    "write_kv": {"cpu_native": "xla", "mosaic_gpu": "xla"},
}
"""By operation: what runs in place of an implementation that it does not have."""


@dataclass(frozen=True, slots=True)
class Device:
    """What decides whether an implementation can run.

    Attributes:
        platform: JAX's name: "cpu", "gpu".
        capability: Compute capability of an NVIDIA GPU, such as (9, 0).
        kind: JAX's name of the model, such as "NVIDIA H200"; measurements lie under it (`tuning`).
    """

    platform: str
    capability: tuple[int, int] | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What one layer asks of `paged_attention`; the defaults are a plain layer's.

    Attributes:
        num_parts: Of a page: 2, or 1 where keys are the values too.
        group: Query heads that share a kv head.
    """

    head_dim: int = 128
    page_size: int = 16
    num_parts: int = 2
    page_dtype: str = "bfloat16"
    q_dtype: str = "bfloat16"
    group: int = 4
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


def this_device(device: jax.Device | None = None) -> Device:
    """Describes a JAX device, by default the one that programs run on."""
    device = device or jax.devices()[0]
    capability = getattr(device, "compute_capability", None)  # "9.0"; CPU devices have none
    if capability is None:
        return Device(device.platform, kind=device.device_kind)
    major, _, minor = str(capability).partition(".")
    return Device(device.platform, (int(major), int(minor or 0)), device.device_kind)


def lacks(implementation: str, device: Device, *needs: Needs) -> str | None:
    """What is missing for an implementation to serve layers with these needs (a plain layer, if none is given); None if nothing is.

    Several things are separated by "; ". The first call for cpu_native may build it (seconds). Raises ValueError for an unknown name.
    """
    _check_name(implementation)
    if implementation in ("xla", "reference"):
        return None
    if implementation == "cpu_native":
        return f"a CPU, this is a {device.platform}" if device.platform != "cpu" else _missing(implementation)
    if device.platform != "gpu" or device.capability is None:
        return f"an NVIDIA GPU, this is a {device.platform}"
    module = _module("paged_attention", implementation)
    found = [module.lacks(need, device.capability) for need in needs or (Needs(),)]
    if implementation == "triton":
        found.append(_missing(implementation))
    return "; ".join(dict.fromkeys(part for reasons in found if reasons for part in reasons.split("; "))) or None


def available(device: Device | None = None, *needs: Needs) -> dict[str, str | None]:
    """For each implementation None, or what it lacks on a device, by default this one."""
    device = device or this_device()
    return {name: lacks(name, device, *needs) for name in IMPLEMENTATIONS}


def choose(device: Device, *needs: Needs) -> tuple[str, str]:
    """The implementation for layers with these needs (a plain layer, if none is given), and one clause that says why.

    On a GPU it is what was measured to be the fastest there (`tuning.fastest`), if it lacks nothing; else triton.
    """
    if device.platform == "cpu":
        reason = lacks("cpu_native", device, *needs)
        return ("cpu_native", "native code for this CPU") if reason is None else ("xla", f"cpu_native lacks: {reason}")
    measured = tuning.fastest("paged_attention", device.kind)
    if measured is not None and measured not in IMPLEMENTATIONS:
        raise ValueError(f"{tuning.file_of('paged_attention', device.kind)} has a fastest implementation that does not exist: {measured!r}")
    if measured is not None and lacks(measured, device, *needs) is None:
        return measured, f"measured to be the fastest on {device.kind}"
    reason = lacks("triton", device, *needs)
    if reason is None and device.capability is not None:
        return "triton", "the default for GPUs of capability {}.{}".format(*device.capability)
    return "xla", f"triton lacks: {reason}"


def load(operation: str, implementation: str) -> Callable[..., Any]:
    """The function of an operation's implementation, or of what runs in its place where the operation has none (`_FALLBACKS`).

    Does not look at the device: programs are also compiled for devices that this machine does not have. Raises ValueError naming what
    there is, or which software is missing here.
    """
    _check_name(implementation)
    if (reason := _missing(implementation)) is not None:
        raise ValueError(f"implementation {implementation!r} cannot run here: it lacks {reason}")
    module = _module(operation, _FALLBACKS.get(operation, {}).get(implementation, implementation))
    function: Callable[..., Any] = getattr(module, operation)
    return function


def _check_name(implementation: str) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} does not exist; choose one of {', '.join(IMPLEMENTATIONS)}")


def _missing(implementation: str) -> str | None:
    """Software that an implementation needs and this machine does not have."""
    if implementation == "cpu_native":
        reason = native_attention.unavailable_reason() or native_linear.unavailable_reason()
        return f"a native build ({reason})" if reason else None
    if implementation == "triton" and (find_spec("triton") is None or find_spec("jax_triton") is None):
        return "the packages triton and jax-triton (extra cuda12)"
    return None


def _module(operation: str, implementation: str) -> Any:
    return importlib.import_module(f"pallas_kernels.{operation}.{implementation}")
