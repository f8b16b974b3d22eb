"""Reads single values of a `config.json` with the checks every family needs; a wrong one is a CheckpointError naming the key.

Knows both spellings of keys (transformers 5 and older). Knows no architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Names in configs, and the formula each stands for."""

DTYPES = ("bfloat16", "float16", "float32")


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An integer of at least 1; absent or null gives the default, if there is one."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a positive integer, got {value!r}.")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0; absent or null gives the default, if there is one."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"config.json: {key} must be a number above 0, got {value!r}.")
    return float(value)


def activation(config: Mapping[str, Any], key: str = "hidden_act", default: str = "silu") -> str:
    """The activation's formula, a key of `mlp.ACTIVATIONS`."""
    name = config.get(key) or default
    if name not in ACTIVATIONS:
        raise CheckpointError(f"config.json: {key} {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def dtype(config: Mapping[str, Any]) -> str | None:
    """`dtype`, or `torch_dtype` as it was called; None where neither is given or it names no plain float."""
    value = config.get("dtype") or config.get("torch_dtype")
    name = str(value).removeprefix("torch.")
    return name if name in DTYPES else None


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A token id or a list of them; none when absent or null."""
    value = config.get(key)
    values = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if any(not isinstance(item, int) for item in values):
        raise CheckpointError(f"config.json: {key} must be a token id or a list of them, got {value!r}.")
    return values
