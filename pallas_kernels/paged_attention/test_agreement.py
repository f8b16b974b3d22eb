"""All implementations on one grid: `xla`, `cpu_native`, `mosaic_gpu` and `triton` (both interpreted) give what `reference` gives.

The grid has every head dimension and page size, every page dtype, MQA, GQA and MHA, decode and mixed steps, and each of window, chunk, soft
cap and sinks; then shapes are drawn. What an implementation lacks by its own words it need not do. Needs both interpreters.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings

from pallas_kernels import deviceless, dispatch
from pallas_kernels.dispatch import Device
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.arg_specs import AttentionArgs, AttentionSpec, largest_value, make_args, make_scales, make_sinks
from pallas_kernels.paged_attention.strategies import HEAD_DIMS, PAGE_DTYPES, PAGE_SIZES, attention_specs

if (reason := deviceless.unavailable_reason()) is not None:
    pytest.skip(reason, allow_module_level=True)

from pallas_kernels import mosaic_on_cpu, triton_on_numpy

H200 = Device("gpu", (9, 0))
HERE = [name for name in ("xla", "cpu_native") if dispatch.available()[name] is None]
DECODE_ROWS = ((1, 1), (1, 70), (1, 33))
MIXED_ROWS = ((1, 40), (1, 5), (3, 3), (18, 61))


def _spec(
    head_dim: int, page_size: int, page_dtype: str, heads: tuple[int, int], rows: tuple[tuple[int, int], ...], **rules: Any
) -> AttentionSpec:
    is_decode = rows is DECODE_ROWS
    return AttentionSpec(
        name=f"{head_dim}-{page_size}-{page_dtype}", rows=rows, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim,
        page_size=page_size, max_pages=-(-90 // page_size), page_dtype=page_dtype, is_decode=is_decode, num_padding_rows=1,
        num_padding_tokens=1 if is_decode else 5, num_shared_pages=1, **rules,
    )  # fmt: skip


GRID = (
    _spec(64, 8, "bfloat16", (6, 2), DECODE_ROWS, window=20),
    _spec(80, 16, "float16", (2, 2), MIXED_ROWS, has_sinks=True),
    _spec(96, 32, "int8", (4, 1), DECODE_ROWS, soft_cap=3.0),
    _spec(128, 64, "uint8", (4, 2), MIXED_ROWS, chunk=30),
    _spec(192, 128, "bfloat16", (8, 1), MIXED_ROWS, soft_cap=3.0, has_sinks=True),
    _spec(256, 256, "float32", (3, 3), DECODE_ROWS, num_parts=1),
    _spec(128, 16, "bfloat16", (8, 2), MIXED_ROWS, window=17, has_sinks=True),
)


def options_of(spec: AttentionSpec, args: AttentionArgs) -> dict[str, Any]:
    return {
        "is_decode": spec.is_decode, "scale": spec.head_dim**-0.5, "window": spec.window, "chunk": spec.chunk, "soft_cap": spec.soft_cap,
        "sinks": make_sinks(spec), "kv_scales": make_scales(spec, args),
    }  # fmt: skip


def run(spec: AttentionSpec, args: AttentionArgs, implementation: str) -> np.ndarray:
    options = options_of(spec, args)
    if implementation == "triton":
        return np.asarray(triton_on_numpy.run(paged_attention, *args, **options, implementation="triton")[0])
    scales = options.pop("kv_scales")
    attend = jax.jit(functools.partial(paged_attention, implementation=implementation, **options))
    if implementation == "mosaic_gpu":
        with mosaic_on_cpu.interpreted():
            return np.asarray(attend(*args, kv_scales=scales))
    with mosaic_on_cpu.hardly_optimized():
        return np.asarray(attend(*args, kv_scales=scales))


def check(spec: AttentionSpec) -> list[str]:
    """Runs all that can serve the shape; returns their names."""
    args = make_args(spec)
    expected = run(spec, args, "reference")
    on_card = [name for name in ("mosaic_gpu", "triton") if dispatch.lacks(name, H200, spec.needs) is None]
    for name in (*HERE, *on_card):
        out = run(spec, args, name)
        bound = 1e-5 if name in HERE or spec.page_dtype == "float32" else 5e-3
        np.testing.assert_allclose(out, expected, rtol=0, atol=bound * largest_value(spec, args), err_msg=name)
        assert not out[args.token_row == len(args.kv_length)].any(), f"{name}: padding tokens give 0"
        assert not spec.is_decode or not out[args.kv_length == 0].any(), f"{name}: rows without keys give 0"
    return on_card


def test_the_grid_for_mosaic_and_triton_has_everything() -> None:
    assert {spec.head_dim for spec in GRID} == set(HEAD_DIMS)
    assert {spec.page_size for spec in GRID} == set(PAGE_SIZES)
    assert {spec.page_dtype for spec in GRID} == set(PAGE_DTYPES)


@pytest.mark.parametrize("spec", GRID, ids=lambda spec: spec.name)
def test_cpu_mosaic_and_triton_agree_with_reference(spec: AttentionSpec) -> None:
    on_card = check(spec)
    assert "triton" in on_card
    assert ("mosaic_gpu" in on_card) == (spec.num_parts == 2)


@settings(max_examples=4, deadline=None, derandomize=True, database=None, phases=[Phase.generate])  # shrinking would take long
@given(spec=attention_specs(max_rows=3, max_length=80, max_tokens=12))
def test_cpu_mosaic_and_triton_agree_on_drawn_shapes(spec: AttentionSpec) -> None:
    check(spec)
