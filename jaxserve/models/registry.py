"""From a checkpoint's `config.json` to its spec and family.

Unwraps multimodal configs to their text model. Knows which families exist and nothing of what is in them; go on to
`families/llama.py`. Knows no JAX: conversion and the engine's start-up read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.families.llama import LLAMA
from jaxserve.models.spec import Family, ModelSpec

FAMILIES: tuple[Family, ...] = (LLAMA,)

_INHERITED_KEYS = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings")
"""What a text model's config takes from its multimodal wrapper where it is silent."""


def supported_architectures() -> tuple[str, ...]:
    """Every value of `architectures` that can be served, sorted."""
    return tuple(sorted(name for family in FAMILIES for name in family.architectures))


def family_of(spec: ModelSpec) -> Family:
    """The family that made the spec."""
    return next(family for family in FAMILIES if family.name == spec.family)


def resolve_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a `config.json`; a multimodal config gives its text model.

    Raises:
        CheckpointError: The architecture is not supported (the message lists what is), or a field cannot be served exactly.
    """
    text = text_config(config)
    return _find_family(text).resolve(text)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model: `text_config` of a multimodal wrapper, else the config itself."""
    inner = config.get("text_config")
    if inner is None:
        return config
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"config.json: text_config must be an object, got {inner!r}.")
    inherited = {key: config[key] for key in _INHERITED_KEYS if key in config}
    return {**inherited, **inner}


def _find_family(config: Mapping[str, Any]) -> Family:
    architectures = config.get("architectures") or ()
    model_type = config.get("model_type")
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures) or (not architectures and model_type in family.model_types):
            return family
    raise CheckpointError(
        f"Unsupported model: architectures {list(architectures)}, model_type {model_type!r}. "
        f"Supported architectures: {', '.join(supported_architectures())}."
    )
