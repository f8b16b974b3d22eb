"""Layers by what they see: groups that share a page table, and each layer's place."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.models.registry import resolve_spec
from jaxserve.models.spec import KVGroup, LayerSpec, kv_groups

LAYER = resolve_spec({"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}).layers[0]


def layers(pattern: str) -> list[LayerSpec]:
    """F sees everything, W a window, V another one, C a chunk."""
    limits = {"F": {}, "W": {"window": 16}, "V": {"window": 32}, "C": {"chunk": 16}}
    return [replace(LAYER, attention=replace(LAYER.attention, **limits[kind])) for kind in pattern]


def sizes(pattern: str) -> list[tuple[int | None, int]]:
    return [(group.window, group.num_layers) for group in kv_groups(layers(pattern))]


def test_one_kind_is_one_group() -> None:
    assert kv_groups(layers("FFFF")) == (KVGroup((0, 1, 2, 3)),)
    assert kv_groups(layers("WWW")) == (KVGroup((0, 1, 2), window=16),)
    assert kv_groups(layers("CC")) == (KVGroup((0, 1), chunk=16),)


def test_every_other_layer() -> None:
    assert kv_groups(layers("WFWF")) == (KVGroup((0, 2), window=16), KVGroup((1, 3)))


def test_gemma3_of_26_layers() -> None:
    # Five windows, then a full layer: 22 windowed layers, 4 full ones.
    groups = kv_groups(layers(("WWWWWF" * 5)[:26]))
    assert [(group.window, group.num_layers) for group in groups] == [(16, 4)] * 5 + [(16, 2), (None, 4)]
    assert groups[0].layer_ids == (0, 1, 2, 3) and groups[5].layer_ids == (24, 25) and groups[6].layer_ids == (5, 11, 17, 23)


def test_about_equal_kinds_are_one_group_each() -> None:
    assert sizes("WWWFF") == [(16, 3), (None, 2)]
    assert sizes("WWWWFFF") == [(16, 4), (None, 3)]


def test_uneven_kinds_are_cut_to_the_rarest() -> None:
    assert sizes("WWWWWFF") == [(16, 2), (16, 2), (16, 1), (None, 2)]
    assert sizes("FWWWW") == [(None, 1)] + [(16, 1)] * 4


def test_windows_of_different_length_and_chunks_are_kinds_of_their_own() -> None:
    assert kv_groups(layers("WVCF")) == (KVGroup((0,), window=16), KVGroup((1,), window=32), KVGroup((2,), chunk=16), KVGroup((3,)))


@given(st.text("FWVC", min_size=1, max_size=40))
def test_groups_are_uniform_and_hold_every_layer_once(pattern: str) -> None:
    stack = layers(pattern)
    groups = kv_groups(stack)
    assert sorted(i for group in groups for i in group.layer_ids) == list(range(len(pattern)))
    for group in groups:
        assert {(stack[i].attention.window, stack[i].attention.chunk) for i in group.layer_ids} == {(group.window, group.chunk)}
        assert list(group.layer_ids) == sorted(group.layer_ids)
    # Only the last group of a kind leaves page arrays unused.
    longest = max(group.num_layers for group in groups)
    for group, following in pairwise(groups):
        assert group.num_layers == longest or (group.window, group.chunk) != (following.window, following.chunk)


@pytest.mark.parametrize("pattern", ["FFF", "WFWF", "WWWWWF" * 4 + "WW", "CCCF"])
def test_places_are_distinct_page_arrays_of_a_group(pattern: str) -> None:
    spec = resolve_spec({"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": len(pattern)})
    spec = replace(spec, layers=tuple(layers(pattern)))
    assert len(set(spec.kv_places)) == len(pattern)
    for i, place in enumerate(spec.kv_places):
        assert place is not None
        group, j = place
        assert spec.kv_groups[group].layer_ids[j] == i and j < spec.num_page_arrays
    assert spec.num_page_arrays == max(group.num_layers for group in spec.kv_groups)
