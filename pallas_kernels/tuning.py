"""Sizes of kernels (tiles, stages, splits) that were measured on a device, in place of what an implementation computes from shapes.

An implementation computes its sizes as a frozen dataclass and asks `tuned`, at the time it is traced. What was measured lies in
`pallas_kernels/<operation>/tuning/<device>.json`, by shape class; there is no file for most devices, and then nothing changes. A module
with sizes to tune says what to try: `TUNABLES`, from the first word of a shape class to fields and their values. Knows no kernel and
measures nothing: `jaxserve bench kernels --tune` does, with `trial`, and writes with `write`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROOT = Path(__file__).parent


class Launch(NamedTuple):
    """What sizes belong to: an operation's implementation, at shapes of one class."""

    operation: str
    implementation: str
    shape_class: str


@dataclass(slots=True)
class Trial:
    """Attributes: sizes: used in place of measured ones. asked: what launches were traced, each with the sizes that it computed."""

    sizes: Mapping[Launch, Mapping[str, int]]
    asked: dict[Launch, Any] = field(default_factory=dict)


_trial: Trial | None = None


def shape_class(kind: str, *, rounded: Mapping[str, int], **exact: int | str) -> str:
    """The name of a class of shapes: `exact` as it is, `rounded` up to a power of two.

    >>> shape_class("decode", rounded={"rows": 24}, head_dim=128)
    'decode head_dim=128 rows<=32'
    """
    parts = [f"{name}={value}" for name, value in exact.items()]
    parts += [f"{name}<={1 << max(0, value - 1).bit_length()}" for name, value in rounded.items()]
    return " ".join((kind, *parts))


def tuned[S: DataclassInstance](operation: str, implementation: str, shape_class: str, sizes: S) -> S:
    """`sizes`, with what was measured for this class of shapes on the device that is compiled for.

    Raises:
        ValueError: The file names something that `sizes` does not have, or is damaged.
    """
    launch = Launch(operation, implementation, shape_class)
    if _trial is not None:
        _trial.asked[launch] = sizes
        return replace(sizes, **_trial.sizes.get(launch, {}))
    kind = device_kind()
    measured = _read(operation, kind).get("sizes", {}).get(implementation, {}).get(shape_class, {})
    if unknown := measured.keys() - {spec.name for spec in fields(sizes)}:
        raise ValueError(f"{file_of(operation, kind)} has sizes that {implementation} does not know: {', '.join(sorted(unknown))}")
    return replace(sizes, **measured)


def fastest(operation: str, kind: str) -> str | None:
    """The implementation that was measured to be the fastest on a kind of device, if any was."""
    name: str | None = _read(operation, kind).get("fastest")
    return name


@contextmanager
def trial(sizes: Mapping[Launch, Mapping[str, int]]) -> Iterator[Trial]:
    """What is traced inside uses these sizes, and the computed ones where there are none, instead of those in files."""
    global _trial
    before, _trial = _trial, Trial(sizes)
    try:
        yield _trial
    finally:
        _trial = before


def device_kind() -> str:
    """JAX's name of the device that is compiled for, such as "NVIDIA H200"; it need not be here."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind


def file_of(operation: str, kind: str) -> Path:
    """Where the measurements of an operation on a kind of device lie."""
    return ROOT / operation / "tuning" / (re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") + ".json")


def write(operation: str, kind: str, sizes: Mapping[Launch, Mapping[str, int]], fastest: str | None, facts: Mapping[str, Any]) -> Path:
    """Adds measurements to the file of a kind of device; those of other shape classes stay, as does `fastest` where it is None.

    Args:
        sizes: By launch; none ({}) takes what was known of the launch out: the computed ones are the best.
        facts: How they were made: versions, date.
    """
    path = file_of(operation, kind)
    known = _read(operation, kind)
    merged: dict[str, dict[str, Any]] = {name: dict(classes) for name, classes in known.get("sizes", {}).items()}
    for launch, values in sizes.items():
        merged.setdefault(launch.implementation, {})[launch.shape_class] = dict(values)
    kept = {name: {shape: values for shape, values in classes.items() if values} for name, classes in merged.items()}
    measured = {name: classes for name, classes in kept.items() if classes}
    content = {"device": kind, **facts, "fastest": fastest or known.get("fastest"), "sizes": measured}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    _read.cache_clear()
    return path


@functools.cache
def _read(operation: str, kind: str) -> dict[str, Any]:
    """What the file has; raises ValueError that names it where that are no measurements."""
    path = file_of(operation, kind)
    try:
        content: Any = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; delete it, or measure again") from error
    if not isinstance(content, dict) or not isinstance(content.get("fastest"), str | None) or not _are_sizes(content.get("sizes", {})):
        raise ValueError(f"{path} has no measurements as `tuning.write` writes them; delete it, or measure again")
    return content


def _are_sizes(sizes: Any) -> bool:
    """Whether these are whole numbers above 0, by implementation, shape class and field."""
    inner: list[Any] = [sizes]
    for _ in range(2):
        if not all(isinstance(each, dict) for each in inner):
            return False
        inner = [value for each in inner for value in each.values()]
    return all(isinstance(each, dict) and all(type(value) is int and value > 0 for value in each.values()) for each in inner)
