"""The Mosaic GPU kernels: interpreted against the reference, where every race is a failure, and compiled for an H200 that is not here."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings

from pallas_kernels import deviceless
from pallas_kernels.dispatch import Needs
from pallas_kernels.mosaic_on_cpu import Report, hardly_optimized, interpreted
from pallas_kernels.paged_attention import mosaic_gpu, mosaic_gpu_tile
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.arg_specs import (
    FLOAT8_NAN,
    MIXED,
    AttentionArgs,
    AttentionSpec,
    largest_value,
    make_args,
    make_scales,
    make_sinks,
)
from pallas_kernels.paged_attention.strategies import attention_specs
from pallas_kernels.quantized_kv import is_quantized

if (reason := deviceless.unavailable_reason()) is not None:
    pytest.skip(reason, allow_module_level=True)

PAGE_DTYPES = ("bfloat16", "float16", "float32", "int8", "uint8")
Q_DTYPES = ("float32", "bfloat16", "float16")


TOLERANCE = {"float32": 1e-6}
"""By page dtype, as a share of the largest value; others have 5e-3. Two bfloat16 in place of a float32 would be off by more than 1e-6."""
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-10}
"""Of outputs, by their dtype."""


def attend(spec: AttentionSpec, implementation: str, args: AttentionArgs, scales: np.ndarray | None) -> Any:
    sinks: Any = make_sinks(spec)
    return paged_attention(
        *args, is_decode=spec.is_decode, scale=spec.head_dim**-0.5, window=spec.window, chunk=spec.chunk, soft_cap=spec.soft_cap,
        sinks=sinks, kv_scales=scales, implementation=implementation,
    )  # fmt: skip


def run(spec: AttentionSpec, args: AttentionArgs, scales: np.ndarray | None = None) -> tuple[np.ndarray, Report]:
    with interpreted() as report:
        return np.asarray(jax.jit(functools.partial(attend, spec, "mosaic_gpu"))(args, scales)), report


def check(spec: AttentionSpec, seed: int = 0) -> Report:
    """Queries are numbers that 16 bits hold."""
    args = make_args(spec, seed)
    scales = make_scales(spec, args, seed)
    out, report = run(spec, args, scales)
    exact = args._replace(q=args.q.astype(np.float32))
    with hardly_optimized():
        expected = jax.jit(functools.partial(attend, spec, "reference"))(exact, scales)
    tolerance = TOLERANCE.get(spec.page_dtype, 5e-3) + ROUNDING[spec.q_dtype]
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=0, atol=tolerance * largest_value(spec, args))
    assert not out[args.token_row == len(args.kv_length)].any(), "padding tokens give 0"
    return report


def drawn(*, is_decode: bool) -> Any:
    specs = attention_specs(
        is_decode=is_decode, page_dtypes=PAGE_DTYPES, q_dtypes=Q_DTYPES, max_rows=3, max_length=200, max_tokens=40, has_latent=False
    )
    return specs.filter(lambda spec: mosaic_gpu.lacks(spec.needs, mosaic_gpu.CAPABILITY) is None)


@settings(max_examples=6, deadline=None, derandomize=True, database=None, phases=[Phase.generate])  # shrinking would take long
@given(spec=drawn(is_decode=True))
def test_mosaic_decode_of_drawn_shapes_equals_reference(spec: AttentionSpec) -> None:
    check(spec)


@settings(max_examples=5, deadline=None, derandomize=True, database=None, phases=[Phase.generate])  # shrinking would take long
@given(spec=drawn(is_decode=False))
def test_mosaic_mixed_steps_of_drawn_shapes_equal_reference(spec: AttentionSpec) -> None:
    check(spec)


# Of tables of 1,024 positions four parts; some rows have keys for one part alone, and one for none.
LONG = AttentionSpec(
    name="long", rows=((1, 900), (1, 1), (1, 65)), num_heads=4, num_kv_heads=1, head_dim=128, page_size=32, max_pages=32,
    num_padding_rows=1, num_padding_tokens=1, page_dtype="bfloat16", is_decode=True, has_sinks=True,
)  # fmt: skip


@pytest.mark.parametrize("limit", [{}, {"window": 300}, {"chunk": 512, "soft_cap": 3.0}], ids=str)
def test_mosaic_long_rows_are_split(limit: dict[str, Any]) -> None:
    assert mosaic_gpu.planning.num_splits(num_rows=4, num_kv_heads=1, max_keys=1024, kv_tile=64) == 4
    check(replace(LONG, **limit))


@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"page_dtype": "int8", "head_dim": 128, "page_size": 8, "max_pages": 20},
        {"page_dtype": "uint8", "head_dim": 80, "page_size": 32},
        {"page_dtype": "float32", "head_dim": 96, "page_size": 16, "max_pages": 10},
    ],
    ids=lambda sizes: sizes["page_dtype"],
)
def test_mosaic_widens_what_wgmma_cannot_read(sizes: dict[str, Any], is_decode: bool) -> None:
    """More tiles than are in flight, the first and the last cut; and a row of one key, where nothing averages errors out."""
    rows = ((1, 1), (1, 130)) if is_decode else ((1, 1), (12, 150))
    spec = replace(MIXED, rows=rows, num_heads=4, num_padding_tokens=1, window=120, has_sinks=True, is_decode=is_decode, **sizes)
    check(spec)


@pytest.mark.parametrize(("page_dtype", "key_bytes"), [("bfloat16", 2 * 128), ("int8", 128 + 4)])
def test_mosaic_decode_moves_little_more_than_it_must(page_dtype: str, key_bytes: int) -> None:
    """Each key and value that a row sees comes once for all heads that share it, in whole boxes; pages out of sight never."""
    spec = replace(
        LONG, window=900, rows=((1, 1000), (1, 950)), num_heads=8, num_padding_rows=0, num_padding_tokens=0, has_sinks=False,
        page_dtype=page_dtype,
    )  # fmt: skip
    args = make_args(spec)
    _, report = run(spec, args, make_scales(spec, args))
    needed = 2 * 900 * 2 * key_bytes + 2 * spec.num_tokens * spec.num_heads * spec.head_dim * 2
    moved = report.read_bytes + report.written_bytes
    print(f"moved {moved} bytes, {moved / needed:.3f} of what it must")
    assert needed <= moved <= 1.15 * needed


@pytest.mark.parametrize("page_dtype", ["bfloat16", "uint8", "int8"])
def test_mosaic_nan_of_a_row_shows_there_and_nowhere_else(page_dtype: str) -> None:
    """In a number, or where those have no NaN in a scale."""
    spec = replace(MIXED, page_dtype=page_dtype, rows=((1, 33), (1, 7), (20, 75)), num_heads=4)
    args = make_args(spec)
    scales = make_scales(spec, args)
    pages, spoilt_scales = args.pages.copy(), None if scales is None else scales.copy()
    for row in (0, 2):
        page = args.page_tables[row, 0]
        if page_dtype == "int8":
            spoilt_scales[page, 0, :, 0] = np.nan  # type: ignore[index]
        else:
            pages[page, 0, :, 0] = np.nan if page_dtype == "bfloat16" else FLOAT8_NAN
    step = jax.jit(functools.partial(attend, spec, "mosaic_gpu"))
    with interpreted():
        out, spoilt = np.asarray(step(args, scales)), np.asarray(step(args._replace(pages=pages), spoilt_scales))
    is_spoilt = np.isin(args.token_row, (0, 2))
    assert np.isnan(spoilt[is_spoilt]).all()
    np.testing.assert_array_equal(spoilt[~is_spoilt], out[~is_spoilt])


def test_mosaic_an_empty_walk_has_no_tiles() -> None:
    """A copy that nobody waits for would arrive after its block has gone."""
    plan = mosaic_gpu.planning.plan_decode(head_dim=64, group=8, page_size=16, page_bytes=2, max_keys=512)
    assert plan is not None
    for first, end, count in ((5, 5, 0), (16, 16, 0), (0, 0, 0), (5, 6, 1), (15, 16 + plan.kv_tile, 2)):
        assert mosaic_gpu_tile.walk(jnp.int32(first), jnp.int32(end), plan).count == count


def test_mosaic_rows_without_keys_give_zeros() -> None:
    args = make_args(LONG)
    args.kv_length[:] = 0
    out, report = run(LONG, args)
    assert not out.any()
    assert report.read_bytes < 1024, "lengths, no queries, no keys"


def layer(
    *, head_dim: int, page_size: int, group: int = 4, dtype: Any = jnp.bfloat16, page_dtype: Any = None, num_pages: int = 1000, **rules: Any
) -> Any:
    """A layer of a model in a step of 512 tokens and 64 rows, some of which decode: one program with both kernels."""
    num_heads, num_kv_heads, page_dtype = 8 * group, 8, page_dtype or dtype
    shape = (num_pages, 2, num_kv_heads, page_size, head_dim)
    shapes = (
        ((512, num_heads, head_dim), dtype), (shape, page_dtype), ((64, 8192 // page_size), jnp.int32),
        ((65,), jnp.int32), ((64,), jnp.int32), ((512,), jnp.int32), ((512,), jnp.int32), ((num_heads,), jnp.float32),
        *[(shape[:4], jnp.float32)] * is_quantized(page_dtype),
    )  # fmt: skip
    options: dict[str, Any] = {"window": None, "chunk": None, "soft_cap": None, "is_decode": False} | rules

    def step(*args: Any) -> Any:
        *rest, sinks, scales = args if is_quantized(page_dtype) else (*args, None)
        return paged_attention(*rest, scale=head_dim**-0.5, sinks=sinks, kv_scales=scales, implementation="mosaic_gpu", **options)

    return step, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 64, "page_size": 8, "window": 1000},
        {"head_dim": 80, "page_size": 16, "group": 1, "dtype": jnp.float16},
        {"head_dim": 96, "page_size": 32, "group": 12},
        {"head_dim": 128, "page_size": 64, "group": 7, "chunk": 8192},
        {"head_dim": 192, "page_size": 8, "group": 64},
        {"head_dim": 256, "page_size": 256, "group": 2, "window": 1024, "soft_cap": 50.0},
        {"head_dim": 64, "page_size": 8, "page_dtype": jnp.uint8, "group": 8},
        {"head_dim": 96, "page_size": 32, "page_dtype": jnp.int8, "dtype": jnp.float16, "group": 32},
        {"head_dim": 128, "page_size": 16, "page_dtype": jnp.int8},
        {"head_dim": 256, "page_size": 256, "page_dtype": jnp.uint8, "window": 1024, "soft_cap": 50.0},
        {"head_dim": 128, "page_size": 16, "dtype": jnp.float32, "group": 12},
        {"head_dim": 128, "page_size": 16, "num_pages": 2**31 // (2 * 8 * 16 * 128) + 8, "group": 12},
    ],
    ids=str,
)
def test_mosaic_compiles_for_h200(sizes: dict[str, Any]) -> None:
    """Interpreting checks no layouts, compiling does, and refuses what takes more shared memory than the card has."""
    step, shapes = layer(**sizes)
    hlo = str(deviceless.compile_for("H200", step, *shapes).as_text())
    assert hlo.count('custom_call_target="mosaic_gpu') == 2
    of_pages = [line for line in hlo.splitlines() if f"[{sizes.get('num_pages', 1000)}," in line]
    assert not [line for line in of_pages if re.search(r" (gather|copy|convert|fusion)\(", line)], "pages are read in place"


def test_mosaic_says_what_it_lacks() -> None:
    assert mosaic_gpu.lacks(Needs(), (9, 0)) is None
    wanted = Needs(head_dim=576, page_size=4, num_parts=1, page_dtype="float32", group=128)
    assert mosaic_gpu.lacks(wanted, (8, 0)) == (
        "wgmma on capability 8.0; pages of one part (latent attention); head_dim 576 (it has multiples of 16 up to 256); "
        "page_size 4 (it has multiples of 8); 128 query heads for a kv head (it has up to 64)"
    )
    assert mosaic_gpu.lacks(Needs(page_dtype="float32", head_dim=192), (9, 0)) == (
        "shared memory for head_dim 192 with 4 query heads for a kv head, bfloat16 queries and float32 pages"
    )
