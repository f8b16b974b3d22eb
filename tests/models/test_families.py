"""Every family on its golden checkpoint: its spec, which tensors it takes and which it refuses. Logits are compared in `tests/golden`."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.convert.match import match_tensors
from jaxserve.convert.read_safetensors import read_directory
from jaxserve.convert.source import SourceTensor
from jaxserve.errors import CheckpointError
from jaxserve.models.host_memory import HostMemory
from jaxserve.models.load import split_model
from jaxserve.models.registry import FAMILIES, family_of, resolve_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.models.tensors import ignored_patterns, logical_tensors

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))

NEXT_TOKEN_FAMILIES = ("deepseek_v3", "glm4_moe")
"""Their checkpoints hold layers beyond the last that predict several tokens ahead; they are left out."""


@functools.cache
def source_of(folder: str) -> tuple[ModelSpec, dict[str, SourceTensor]]:
    source = read_directory(GOLDEN / folder)
    return resolve_spec(source.config), dict(source.tensors)


def matched(spec: ModelSpec, tensors: dict[str, SourceTensor]) -> Any:
    family = family_of(spec)
    return match_tensors(logical_tensors(family, spec), tensors, ignored_patterns(family, spec))


def is_head(name: str) -> bool:
    return name in ("lm_head.weight", "embed_out.weight")


def first_of_each_family() -> list[str]:
    by_family = {source_of(folder)[0].family: folder for folder in reversed(FOLDERS)}
    return sorted(by_family.values())


def test_every_family_has_a_golden_checkpoint() -> None:
    assert {source_of(folder)[0].family for folder in FOLDERS} == {family.name for family in FAMILIES}


@pytest.mark.parametrize("folder", [name for name in FOLDERS if (GOLDEN / name / "config.legacy.json").exists()])
def test_both_spellings_of_a_config_give_the_same_spec(folder: str) -> None:
    spec, legacy = source_of(folder)[0], resolve_spec(json.loads((GOLDEN / folder / "config.legacy.json").read_text()))
    assert spec == legacy and hash(spec) == hash(legacy)


@pytest.mark.parametrize("folder", FOLDERS)
def test_layers_of_equal_kind_share_their_spec(folder: str) -> None:
    spec, _ = source_of(folder)
    assert len(set(spec.layers)) <= 3, "one trace for each"
    assert sorted(i for group in spec.kv_groups for i in group.layer_ids) == [i for i, place in enumerate(spec.kv_places) if place]


@pytest.mark.parametrize("folder", FOLDERS)
def test_conversion_takes_every_element_of_every_tensor(folder: str) -> None:
    spec, tensors = source_of(folder)
    pairs, ignored = matched(spec, tensors)
    assert ignored == []
    taken: Counter[str] = Counter()
    for wanted, tensor in pairs:
        assert tensor.shape == wanted.shape
        taken[tensor.name] += tensor.size
    assert taken == {name: tensor.size for name, tensor in tensors.items()}
    assert len({wanted.name for wanted, _ in pairs}) == len(pairs)


@pytest.mark.parametrize("folder", first_of_each_family())
def test_a_missing_tensor_is_named(folder: str) -> None:
    spec, tensors = source_of(folder)
    for name in tensors:
        if is_head(name):  # without it, the head is the embedding
            continue
        with pytest.raises(CheckpointError, match="1 missing: ") as caught:
            matched(spec, {other: tensor for other, tensor in tensors.items() if other != name})
        assert f"1 missing: {name} {list(tensors[name].shape)}." in str(caught.value)


@pytest.mark.parametrize("folder", first_of_each_family())
def test_a_tensor_under_another_name_is_missing_and_unexpected(folder: str) -> None:
    spec, tensors = source_of(folder)
    for name, tensor in tensors.items():
        renamed = {**tensors, name + "_x": replace(tensor, name=name + "_x")}
        del renamed[name]
        with pytest.raises(CheckpointError) as caught:
            matched(spec, renamed)
        assert f"1 unexpected: {name}_x {list(tensor.shape)}" in str(caught.value)
        assert f"1 missing: {name} " in str(caught.value) or is_head(name)


@pytest.mark.parametrize("folder", first_of_each_family())
def test_a_tensor_of_another_shape_is_named(folder: str) -> None:
    spec, tensors = source_of(folder)
    for name, tensor in tensors.items():
        for axis in range(len(tensor.shape)):
            shape = tuple(size + (i == axis) for i, size in enumerate(tensor.shape))
            with pytest.raises(CheckpointError) as caught:
                matched(spec, {**tensors, name: replace(tensor, shape=shape)})
            assert f"1 of another shape than the config says: {name} is {list(shape)}, not {list(tensor.shape)}." in str(caught.value)


@pytest.mark.parametrize("folder", first_of_each_family())
def test_a_tensor_too_many_is_named(folder: str) -> None:
    spec, tensors = source_of(folder)
    in_last = re.compile(rf"\b(layers|h)\.{spec.num_layers - 1}\.")
    name, tensor = next((name, tensor) for name, tensor in tensors.items() if in_last.search(name))
    extra = replace(tensor, name=in_last.sub(rf"\1.{spec.num_layers}.", name))
    if spec.family in NEXT_TOKEN_FAMILIES:
        assert [ignored.count for ignored in matched(spec, {**tensors, extra.name: extra})[1]] == [1]
    else:
        with pytest.raises(CheckpointError, match="1 unexpected: ") as caught:
            matched(spec, {**tensors, extra.name: extra})
        assert extra.name in str(caught.value)
    strange = replace(tensor, name="model.layers.0.strange.weight")
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.layers\.0\.strange\.weight"):
        matched(spec, {**tensors, strange.name: strange})


@pytest.mark.parametrize("folder", FOLDERS)
def test_loading_sets_every_parameter(folder: str, golden: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "empty", lambda self, shape, dtype: np.full(shape, np.nan, dtype))
    case = golden(folder)
    leaves = split_model(case.model())[1]
    assert not any(np.isnan(leaf).any() for leaf in leaves)
    # Every tensor once: parts of fused ones, and those that are split again, included.
    assert sum(leaf.size for leaf in leaves) == sum(tensor.size for tensor in case.tensors.values())
