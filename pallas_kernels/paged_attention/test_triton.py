"""The Triton kernels: interpreted against the reference, with every byte they touch watched, and compiled for cards that are not here."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec

from pallas_kernels import deviceless, triton_on_numpy
from pallas_kernels.dispatch import Needs
from pallas_kernels.mosaic_on_cpu import hardly_optimized
from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.arg_specs import (
    DECODE,
    MIXED,
    TEST_SPECS,
    AttentionArgs,
    AttentionSpec,
    make_args,
    make_scales,
    make_sinks,
)
from pallas_kernels.paged_attention.strategies import attention_specs

if (reason := deviceless.unavailable_reason()) is not None:
    pytest.skip(reason, allow_module_level=True)

SCALE = 0.125


def options_of(spec: AttentionSpec, args: AttentionArgs) -> dict[str, Any]:
    return {
        "is_decode": spec.is_decode,
        "scale": SCALE,
        "window": spec.window,
        "chunk": spec.chunk,
        "soft_cap": spec.soft_cap,
        "sinks": make_sinks(spec),
        "kv_scales": make_scales(spec, args),
    }


def interpreted(spec: AttentionSpec, args: AttentionArgs) -> tuple[np.ndarray, triton_on_numpy.Traffic]:
    return triton_on_numpy.run(paged_attention, *args, **options_of(spec, args), implementation="triton")


def largest_value(args: AttentionArgs, options: dict[str, Any]) -> float:
    pages, scales = args.pages[:, -1], options["kv_scales"]
    if scales is None:
        return float(np.nanmax(np.abs(pages.astype(np.float32))))
    numbers = pages.view(ml_dtypes.float8_e4m3fn) if pages.dtype == np.uint8 else pages
    return float(np.nanmax(np.abs(numbers.astype(np.float32)) * scales[:, -1, :, :, None]))


def check(spec: AttentionSpec) -> None:
    """Within 1e-5 of the largest value where products are of float32 numbers, within 5e-3 where they are of float16 ones."""
    args = make_args(spec)
    options = options_of(spec, args)
    scales = None if options["kv_scales"] is None else jnp.asarray(options["kv_scales"])
    reference = jax.jit(functools.partial(paged_attention, **(options | {"kv_scales": scales}), implementation="reference"))
    with hardly_optimized():
        expected = reference(*args._replace(q=args.q.astype(np.float32)))
    out, _ = interpreted(spec, args)
    assert out.dtype == args.q.dtype
    bound = 1e-5 if args.q.dtype == np.float32 else 5e-3
    np.testing.assert_allclose(out, expected, rtol=0, atol=bound * largest_value(args, options))
    assert not out[args.token_row == len(args.kv_length)].any(), "padding tokens give 0"


@pytest.mark.parametrize("spec", TEST_SPECS, ids=lambda spec: spec.name)
def test_equals_reference(spec: AttentionSpec) -> None:
    check(spec)


def test_tiles_without_a_key_for_some_queries() -> None:
    """The last tokens of a chunk see none of the first tile's keys: their peak is still -inf there, and must not become NaN."""
    check(replace(MIXED, rows=((40, 100),), num_heads=2, num_kv_heads=1, window=9))


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(spec=attention_specs(q_dtypes=("float32", "float16")))
def test_drawn_shapes_equal_reference(spec: AttentionSpec) -> None:
    # The interpreter's product of bfloat16 is wrong: there is none, as the queries are of another dtype and both become float32.
    check(spec)


LATENT = replace(DECODE, num_heads=16, num_kv_heads=1, head_dim=576, num_parts=1, rows=((1, 1), (1, 40), (1, 90)), num_padding_tokens=2)


@pytest.mark.parametrize("num_heads", [16, 40])
@pytest.mark.parametrize("page_dtype", ["float32", "float16"])
def test_latent_attention(page_dtype: str, num_heads: int) -> None:
    """Keys of 512 + 64 dimensions that are the values too, and more heads than fit a tile."""
    spec = replace(LATENT, page_dtype=page_dtype, q_dtype=page_dtype, num_heads=num_heads)
    check(spec)
    check(replace(spec, rows=((1, 40), (11, 30)), is_decode=False, num_padding_tokens=3))


# Rows of one part, of just two, of some and of all; tables of 640 positions, so five parts of 128 keys.
SPLIT = replace(DECODE, name="split", rows=((1, 1), (1, 128), (1, 129), (1, 300), (1, 640)), num_heads=4, num_kv_heads=2, max_pages=40)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"window": 300, "has_sinks": True},
        {"chunk": 256, "num_parts": 1, "soft_cap": 3.0},
        {"is_decode": False, "rows": ((1, 300), (7, 200), (1, 1), (1, 640)), "has_sinks": True, "num_padding_tokens": 5},
        {"page_dtype": "uint8", "q_dtype": "float16", "rows": ((1, 40), (1, 600))},
    ],
    ids=["plain", "window", "chunk", "mixed", "fp8"],
)
def test_long_rows_are_split(change: dict[str, Any]) -> None:
    spec = replace(SPLIT, **change)
    sizes = triton.triton_sizes.single_token_sizes(
        num_rows=len(spec.rows) + 2, num_kv_heads=2, group=2, num_parts=spec.num_parts, head_dim=64, page_bytes=4, dot_bytes=4, max_keys=640
    )
    assert sizes.num_splits == 5
    check(spec)


@pytest.mark.parametrize(("num_rows", "num_splits"), [(1, 32), (8, 32), (32, 8), (200, 2), (256, 1), (512, 1)])
def test_rows_are_split_only_where_cores_would_be_idle(num_rows: int, num_splits: int) -> None:
    sizes = triton.triton_sizes.single_token_sizes(
        num_rows=num_rows, num_kv_heads=1, group=8, num_parts=2, head_dim=128, page_bytes=2, dot_bytes=2, max_keys=32768
    )
    assert sizes.num_splits == num_splits


def test_rows_without_keys_give_zeros_with_sinks_too() -> None:
    spec = replace(SPLIT, has_sinks=True)
    args = make_args(spec)
    args.kv_length[:] = 0
    out, traffic = interpreted(spec, args)
    assert not out.any()
    assert traffic.load_bytes < args.q.nbytes * 4


@pytest.mark.parametrize("spec", [DECODE, MIXED], ids=lambda spec: spec.name)
def test_nan_of_a_row_shows_there_and_nowhere_else(spec: AttentionSpec) -> None:
    args = make_args(spec)
    pages = args.pages.copy()
    pages[args.page_tables[0, 0], 0, :, 0] = np.nan
    out, spoilt = interpreted(spec, args)[0], interpreted(spec, args._replace(pages=pages))[0]
    assert np.isnan(spoilt[0]).all()
    np.testing.assert_array_equal(spoilt[1:], out[1:])


ONE_KEY = replace(DECODE, num_heads=1, num_kv_heads=1, head_dim=256, max_pages=1, num_padding_rows=0, num_padding_tokens=0)


def test_every_float16_is_read_exactly() -> None:
    """With one key the output is its value: all 65,536 patterns, subnormals, infinities and NaN among them."""
    spec = replace(ONE_KEY, rows=((1, 1),) * 256, page_dtype="float16")
    args = make_args(spec)
    values = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    args.pages[args.page_tables[:, 0], 1, 0, 0] = values
    np.testing.assert_array_equal(interpreted(spec, args)[0][:, 0], values.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
def test_every_8_bit_number_is_read_exactly(dtype: Any) -> None:
    spec = replace(ONE_KEY, rows=((1, 1),), page_dtype="int8" if dtype == np.int8 else "uint8")
    args = make_args(spec)
    bits = np.arange(256, dtype=np.uint8)
    args.pages[args.page_tables[0, 0], 1, 0, 0] = bits.view(args.pages.dtype)
    scale = make_scales(spec, args)[args.page_tables[0, 0], 1, 0, 0]
    np.testing.assert_allclose(interpreted(spec, args)[0][0, 0], bits.view(dtype).astype(np.float32) * scale, rtol=1e-6)


FAR = replace(DECODE, rows=((1, 3),), num_heads=2, num_kv_heads=1, page_dtype="int8", max_pages=1, num_padding_rows=1, num_padding_tokens=1)


def far_page() -> jax.Array:
    """Runs in the interpreting process: the one page lies past 2^31 elements, in memory that nobody else touches."""
    args = make_args(FAR)
    options = options_of(FAR, args)
    page, last = args.page_tables[0, 0], 2**31 // args.pages[0].size + 7
    pages, scales = np.zeros((last + 1, *args.pages.shape[1:]), np.int8), np.zeros((last + 1, *args.pages.shape[1:4]), np.float32)
    pages[last], scales[last] = args.pages[page], options["kv_scales"][page]
    args = args._replace(pages=pages, page_tables=np.full_like(args.page_tables, last))
    return triton.paged_attention(*args, **(options | {"kv_scales": scales}))  # NumPy arrays are not copied


def test_page_past_two_to_the_31_elements() -> None:
    """Flat offsets into the page array need 64 bits."""
    near, _ = interpreted(FAR, make_args(FAR))
    np.testing.assert_array_equal(triton_on_numpy.run(far_page)[0], near)


@pytest.mark.parametrize(
    "change",
    [{}, {"window": 100}, {"chunk": 256}, {"page_dtype": "uint8", "head_dim": 128}],
    ids=["plain", "window", "chunk", "fp8"],
)
def test_decode_moves_little_more_than_it_must(change: dict[str, Any]) -> None:
    """Each key and value that a row sees is loaded once for all heads that share it, pages out of its sight never, and splits are cheap."""
    spec = replace(SPLIT, num_heads=8, rows=((1, 300), (1, 640), (1, 513), (1, 200)), **change)
    args = make_args(spec)
    _, traffic = interpreted(spec, args)
    seen = sum(length - spec.first_visible(length - 1) for _, length in spec.rows)
    scale_bytes = 4 if spec.page_dtype == "uint8" else 0
    needed = seen * spec.num_kv_heads * 2 * (spec.head_dim * args.pages.itemsize + scale_bytes) + 2 * args.q.nbytes
    assert needed <= traffic.load_bytes + traffic.store_bytes <= 1.15 * needed


def layer(
    *, is_decode: bool = False, n: int, k: int, h: int, dtype: Any = jnp.bfloat16, page_dtype: Any = None, parts: int = 2, **options: Any
) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """A layer of a step of 64 rows (and 2,048 tokens, if it is mixed) with 8,192 positions in the table: function and shapes."""
    num_tokens, page_dtype = 64 if is_decode else 2048, page_dtype or dtype
    int32s = [(64, 512), (65,), (64,), (num_tokens,), (num_tokens,)]
    shapes = [jax.ShapeDtypeStruct((num_tokens, n, h), dtype), jax.ShapeDtypeStruct((4096, parts, k, 16, h), page_dtype)]
    shapes += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in int32s]
    function = functools.partial(paged_attention, is_decode=is_decode, scale=0.1, implementation="triton", **options)
    if page_dtype not in (jnp.uint8, jnp.int8):
        return function, shapes
    with_scales = [*shapes, jax.ShapeDtypeStruct(shapes[1].shape[:4], jnp.float32)]
    return lambda *args: function(*args[:-1], kv_scales=args[-1]), with_scales


LAYERS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b decode": {"is_decode": True, "n": 32, "k": 8, "h": 128},
    "llama-3.1-8b": {"n": 32, "k": 8, "h": 128},
    "llama-3.1-8b float32": {"n": 32, "k": 8, "h": 128, "dtype": jnp.float32},
    "smollm2-135m float16": {"n": 9, "k": 3, "h": 64, "dtype": jnp.float16},
    "phi head_dim 80": {"n": 32, "k": 32, "h": 80},
    "phi-3 head_dim 96 window": {"n": 32, "k": 32, "h": 96, "window": 2047},
    "head_dim 192 chunk": {"n": 40, "k": 8, "h": 192, "chunk": 8192},
    "gemma-2 soft cap": {"n": 16, "k": 8, "h": 256, "window": 4096, "soft_cap": 50.0},
    "qwen3-30b fp8": {"n": 32, "k": 4, "h": 128, "page_dtype": jnp.uint8},
    "int8 decode": {"is_decode": True, "n": 32, "k": 4, "h": 128, "page_dtype": jnp.int8},
    "deepseek-v2-lite latent": {"n": 16, "k": 1, "h": 576, "parts": 1},
    "head_dim 256 float32": {"n": 16, "k": 8, "h": 256, "dtype": jnp.float32},
    "latent float32": {"n": 16, "k": 1, "h": 576, "parts": 1, "dtype": jnp.float32},
    "deepseek-v3 latent": {"n": 128, "k": 1, "h": 576, "parts": 1},
}


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("H200", "llama-3.1-8b decode"),
        ("H200", "deepseek-v2-lite latent"),
        ("A100", "llama-3.1-8b"),
        ("A100", "qwen3-30b fp8"),
        ("A10", "gemma-2 soft cap"),
        ("A10", "deepseek-v3 latent"),
        ("A10", "latent float32"),
        ("L40", "llama-3.1-8b float32"),
        ("L40", "phi head_dim 80"),
        ("L40", "head_dim 192 chunk"),
        ("B200", "int8 decode"),
        ("RTX_PRO_6000", "phi-3 head_dim 96 window"),
        ("RTX_PRO_6000", "smollm2-135m float16"),
    ],
)
def test_compiles_within_shared_memory(card: str, name: str) -> None:
    function, shapes = layer(**LAYERS[name])
    compiled = deviceless.compile_for(card, function, *shapes)
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') in (1, 2, 3)


def test_sharded_heads_compile_without_communication() -> None:
    function, shapes = layer(**LAYERS["llama-3.1-8b decode"])
    mesh = deviceless.mesh("H200", 2)
    heads = [PartitionSpec(None, "tp"), PartitionSpec(None, None, "tp")] + [PartitionSpec()] * 5
    sharded = jax.shard_map(function, mesh=mesh, in_specs=tuple(heads), out_specs=heads[0], check_vma=False)
    text = deviceless.lower_for(mesh, sharded, *shapes).compile().as_text()
    assert "triton_kernel_call_ffi" in text
    assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


def test_says_what_it_lacks() -> None:
    assert triton.lacks(Needs(), (8, 0)) is None
    assert triton.lacks(Needs(head_dim=576, num_parts=1), (12, 0)) is None
    assert triton.lacks(Needs(head_dim=640), (7, 5)) == "capability 8.0 or newer, this is 7.5; head_dim 640, the limit is 576"
