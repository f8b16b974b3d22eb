"""From a checkpoint's `config.json` to its spec and family.

Unwraps multimodal configs to their text model. Knows which families exist and nothing of what is in them; go on to
`families/llama.py`. Knows no JAX: conversion and the engine's start-up read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.families.cohere import COHERE, COHERE2
from jaxserve.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from jaxserve.models.families.ernie4_5 import ERNIE4_5
from jaxserve.models.families.exaone4 import EXAONE4
from jaxserve.models.families.falcon import FALCON
from jaxserve.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from jaxserve.models.families.glm4 import GLM4
from jaxserve.models.families.glm4_moe import GLM4_MOE
from jaxserve.models.families.gpt2 import GPT2
from jaxserve.models.families.gpt_bigcode import GPT_BIGCODE
from jaxserve.models.families.gpt_neox import GPT_NEOX
from jaxserve.models.families.gpt_oss import GPT_OSS
from jaxserve.models.families.gptj import GPTJ
from jaxserve.models.families.granite import GRANITE
from jaxserve.models.families.granitemoe import GRANITEMOE
from jaxserve.models.families.llama import LLAMA
from jaxserve.models.families.llama4 import LLAMA4
from jaxserve.models.families.minicpm3 import MINICPM3
from jaxserve.models.families.mixtral import MIXTRAL
from jaxserve.models.families.olmo import OLMO, OLMO2, OLMO3
from jaxserve.models.families.olmoe import OLMOE
from jaxserve.models.families.opt import OPT
from jaxserve.models.families.phi import PHI
from jaxserve.models.families.phi3 import PHI3
from jaxserve.models.families.qwen import QWEN2, QWEN3
from jaxserve.models.families.qwen3_next import QWEN3_NEXT
from jaxserve.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from jaxserve.models.families.smollm3 import SMOLLM3
from jaxserve.models.families.stablelm import STABLELM
from jaxserve.models.families.starcoder2 import STARCODER2
from jaxserve.models.spec import Family, ModelSpec

FAMILIES: tuple[Family, ...] = (
    COHERE, COHERE2, DEEPSEEK_V2, DEEPSEEK_V3, ERNIE4_5, EXAONE4, FALCON, GEMMA, GEMMA2, GEMMA3, GLM4, GLM4_MOE, GPT2, GPT_BIGCODE,
    GPT_NEOX, GPT_OSS, GPTJ, GRANITE, GRANITEMOE, LLAMA, LLAMA4, MINICPM3, MIXTRAL, OLMO, OLMO2, OLMO3, OLMOE, OPT, PHI, PHI3, QWEN2,
    QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_NEXT, SMOLLM3, STABLELM, STARCODER2,
)  # fmt: skip

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
        known = family.architectures
        if any(name in known for name in architectures) or (not architectures and model_type in known.values()):
            return family
    names = supported_architectures()
    near = get_close_matches(next(iter(architectures), ""), names, n=1)
    raise CheckpointError(
        f"Unsupported model: architectures {list(architectures)}, model_type {model_type!r}."
        + (f" The nearest supported one is {near[0]}." if near else "")
        + f" Supported architectures: {', '.join(names)}."
    )
