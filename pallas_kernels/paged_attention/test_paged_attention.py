"""Attention over pages: the reference against a brute-force loop, every other implementation against the reference."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, paged_attention, write_kv
from pallas_kernels.paged_attention.arg_specs import (
    DECODE,
    MIXED,
    TEST_SPECS,
    AttentionArgs,
    AttentionSpec,
    dense_batch,
    exact_pages,
    largest_value,
    make_args,
    make_scales,
    make_sinks,
    ragged_batch,
)
from pallas_kernels.paged_attention.bench_paged_attention import gathered_attention

FAST = [name for name, reason in dispatch.available().items() if reason is None and name != "reference"]
SCALE = 0.125


@functools.cache
def compiled(spec: AttentionSpec, implementation: str) -> Callable[..., jax.Array]:
    """One program for a shape and an implementation, shared by the tests."""
    options = {
        "is_decode": spec.is_decode,
        "window": spec.window,
        "chunk": spec.chunk,
        "soft_cap": spec.soft_cap,
        "sinks": make_sinks(spec),
    }
    return jax.jit(functools.partial(paged_attention, scale=SCALE, implementation=implementation, **options))


def run(spec: AttentionSpec, args: AttentionArgs, implementation: str) -> np.ndarray:
    return np.asarray(compiled(spec, implementation)(*args, kv_scales=make_scales(spec, args)))


def brute_force(spec: AttentionSpec, args: AttentionArgs) -> np.ndarray:
    """One token and one head at a time in float64, touching only the keys that the token may see."""
    q, _, tables, _, kv_length, token_row, position = args
    pages = exact_pages(spec, args)
    sinks = make_sinks(spec)
    out = np.zeros(q.shape)
    for token, row in enumerate(token_row):
        if row == len(kv_length):
            continue
        last = min(position[token], kv_length[row] - 1)
        first = spec.first_visible(last)
        for head in range(spec.num_heads if kv_length[row] else 0):
            kv_head = head // (spec.num_heads // spec.num_kv_heads)
            keys, values = [], []
            for s in range(first, last + 1):
                page = pages[tables[row, s // spec.page_size], :, kv_head, s % spec.page_size]
                keys.append(page[0])
                values.append(page[-1])
            scores = np.array(keys) @ q[token, head].astype(np.float64) * SCALE
            if spec.soft_cap is not None:
                scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
            weights = np.exp(scores)
            total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head]))
            out[token, head] = weights @ np.array(values) / total
    return out


def assert_close(spec: AttentionSpec, actual: np.ndarray, expected: np.ndarray, args: AttentionArgs) -> None:
    """Within 1e-5 of the largest value: all implementations compute in float32 whatever the pages' dtype."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * largest_value(spec, args))


@pytest.mark.parametrize("spec", TEST_SPECS, ids=lambda spec: spec.name)
def test_reference_is_the_definition(spec: AttentionSpec) -> None:
    args = make_args(spec)
    assert_close(spec, run(spec, args, "reference"), brute_force(spec, args), args)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("spec", TEST_SPECS, ids=lambda spec: spec.name)
def test_equals_reference(spec: AttentionSpec, implementation: str) -> None:
    args = make_args(spec)
    out = run(spec, args, implementation)
    assert_close(spec, out, run(spec, args, "reference"), args)
    assert not out[args.token_row == len(args.kv_length)].any(), "padding tokens give 0"


# Rows just below, at and just above a limit of one page and one place, and just below, at and above its double.
EDGES = tuple((1, length) for length in (16, 17, 18, 33, 34, 35))


@pytest.mark.parametrize("implementation", ["reference", *FAST])
@pytest.mark.parametrize("limit", [{"window": 17}, {"chunk": 17, "num_parts": 1}, {"window": 1, "num_parts": 1}, {"chunk": 1}], ids=str)
@pytest.mark.parametrize("spec", [replace(DECODE, rows=EDGES), MIXED], ids=lambda spec: spec.name)
def test_edges_of_windows_and_chunks(spec: AttentionSpec, limit: dict[str, int], implementation: str) -> None:
    """Each token against its own list of keys; no page below the first visible one may be read, whatever its table entry says."""
    spec = replace(spec, num_heads=2, num_kv_heads=1, head_dim=8, **limit)
    args = make_args(spec)
    assert_close(spec, run(spec, args, implementation), brute_force(spec, args), args)


# Around the places where the native kernel splits the keys of a row (1,024).
LONG = AttentionSpec(
    name="long", rows=((1, 1024), (1, 1025), (1, 2049), (1, 1), (3, 1026)), num_heads=2, num_kv_heads=1, head_dim=8, page_size=16,
    max_pages=130,
)  # fmt: skip


@pytest.mark.skipif("cpu_native" not in FAST, reason="no C++ compiler")
@pytest.mark.parametrize("limit", [{"has_sinks": True}, {"window": 1023}, {"chunk": 600, "num_heads": 20}], ids=str)
def test_rows_whose_keys_are_split(limit: dict[str, int]) -> None:
    spec = replace(LONG, **limit)
    args = make_args(spec)
    assert_close(spec, run(spec, args, "cpu_native"), brute_force(spec, args), args)


@pytest.mark.skipif("cpu_native" not in FAST, reason="no C++ compiler")
def test_the_bits_of_a_row_do_not_depend_on_its_batch() -> None:
    batch, alone = replace(LONG, rows=LONG.rows[:3], is_decode=True), replace(LONG, rows=LONG.rows[2:3], is_decode=True)
    args = make_args(batch)
    one = AttentionArgs(
        args.q[2:3], args.pages, args.page_tables[2:3], np.array([0, 1], np.int32), args.kv_length[2:3], np.array([0], np.int32),
        args.position[2:3],
    )  # fmt: skip
    np.testing.assert_array_equal(run(batch, args, "cpu_native")[2:], run(alone, one, "cpu_native"))


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("spec", [DECODE, MIXED], ids=lambda spec: spec.name)
def test_the_place_of_pages_does_not_matter(spec: AttentionSpec, implementation: str) -> None:
    """The same keys in other physical pages give the same bits."""
    args = make_args(spec)
    order = np.concatenate(([0], 1 + np.random.default_rng(5).permutation(len(args.pages) - 1)))
    inverse = np.argsort(order)
    is_page = (args.page_tables >= 0) & (args.page_tables < len(args.pages))
    tables = np.where(is_page, inverse[np.where(is_page, args.page_tables, 0)], args.page_tables).astype(np.int32)
    moved = args._replace(pages=args.pages[order], page_tables=tables)
    np.testing.assert_array_equal(run(spec, args, implementation), run(spec, moved, implementation))


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("spec", [DECODE, MIXED], ids=lambda spec: spec.name)
def test_nan_of_a_row_shows_there_and_nowhere_else(spec: AttentionSpec, implementation: str) -> None:
    """A NaN in a key that a row sees must not be hidden: the sampler looks for it."""
    args = make_args(spec)
    pages = args.pages.copy()
    pages[args.page_tables[0, 0], 0, :, 0] = np.nan
    out, spoilt = run(spec, args, implementation), run(spec, args._replace(pages=pages), implementation)
    assert np.isnan(spoilt[0]).all()
    np.testing.assert_array_equal(spoilt[1:], out[1:])


@pytest.mark.parametrize("implementation", FAST)
def test_every_float16_is_read_exactly(implementation: str) -> None:
    """With one key the output is its value: all 65,536 patterns, subnormals, infinities and NaN among them."""
    spec = replace(DECODE, rows=((1, 1),) * 256, num_heads=1, num_kv_heads=1, head_dim=256, max_pages=1, page_dtype="float16")
    spec = replace(spec, num_padding_rows=0, num_padding_tokens=0)
    args = make_args(spec)
    values = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    args.pages[args.page_tables[:, 0], 1, 0, 0] = values
    np.testing.assert_array_equal(run(spec, args, implementation)[:, 0], values.astype(np.float32))


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_every_pattern_of_8_bits_is_read_exactly(dtype: str, implementation: str) -> None:
    """With one key the output is its value: the number that ml_dtypes knows for the pattern, times its scale."""
    spec = AttentionSpec(
        name="", rows=((1, 1),), num_heads=1, num_kv_heads=1, head_dim=256, page_size=8, max_pages=1, page_dtype=dtype, is_decode=True
    )
    args = make_args(spec)
    args.pages[args.page_tables[0, 0], 1, 0, 0] = np.arange(256).astype(args.pages.dtype)
    np.testing.assert_array_equal(
        run(spec, args, implementation)[0, 0], exact_pages(spec, args)[args.page_tables[0, 0], 1, 0, 0].astype(np.float32)
    )


@pytest.mark.parametrize("implementation", FAST)
def test_bf16_output(implementation: str) -> None:
    """A bf16 query gives a bf16 output, one rounding away from the float32 one."""
    spec = next(spec for spec in TEST_SPECS if spec.name == "mixed-bf16")
    args = make_args(spec)
    half = args._replace(q=args.q.astype(jnp.bfloat16))
    out = run(spec, half, implementation)
    assert out.dtype == jnp.bfloat16
    exact = brute_force(spec, half._replace(q=half.q.astype(np.float32)))
    largest = np.nanmax(np.abs(args.pages[:, 1].astype(np.float32)))
    assert (np.abs(out.astype(np.float32) - exact) <= 1e-5 * largest + 2.0**-8 * np.abs(exact)).all()


@pytest.mark.parametrize("implementation", FAST)
def test_page_past_two_to_the_31_bytes(implementation: str) -> None:
    """Flat byte offsets into the page array need 64 bits."""
    spec = replace(DECODE, rows=((1, 3),), num_padding_rows=1, num_padding_tokens=1, num_heads=2, num_kv_heads=1, head_dim=8, max_pages=1)
    args = make_args(spec)
    num_pages = 2**31 // args.pages[0].nbytes + 8
    # Memory that nobody has touched takes no room, and XLA takes an aligned NumPy array as it is.
    raw = np.zeros(num_pages * args.pages[0].nbytes + 64, np.uint8)
    aligned = raw[-raw.ctypes.data % 64 :][: num_pages * args.pages[0].nbytes]
    far = aligned.view(np.float32).reshape(num_pages, *args.pages.shape[1:])
    far[num_pages - 1] = args.pages[args.page_tables[0, 0]]
    tables = np.full_like(args.page_tables, num_pages - 1)
    assert_close(spec, run(spec, args._replace(pages=far, page_tables=tables), implementation), brute_force(spec, args), args)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_copies_no_pages(implementation: str, dtype: str) -> None:
    """A donated page array is written and read by the compiled step with no copy or conversion of its size."""
    spec = replace(DECODE, page_dtype=dtype)
    args = make_args(spec)
    kv = np.zeros((spec.num_tokens, spec.num_kv_heads, spec.head_dim), np.float32)
    place = np.arange(spec.num_tokens, dtype=np.int32)

    def step(pages: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        pages = write_kv(pages, kv, kv, place, place)
        return pages, paged_attention(args.q, pages, *rest, is_decode=True, scale=SCALE, implementation=implementation)

    compiled = jax.jit(step, donate_argnums=0).lower(args.pages, *args[2:]).compile()
    shape = ",".join(map(str, args.pages.shape))
    copies = re.findall(rf"= \w+\[{shape}\]\S* (?:copy|convert|transpose|copy-start)\(.*", compiled.as_text())
    assert not copies, copies
    assert compiled.memory_analysis().alias_size_in_bytes == args.pages.nbytes


def test_float32_is_not_multiplied_as_tf32() -> None:
    """What XLA makes of products of float32 on a GPU where nothing is said: 1e-3 of error, not 1e-5."""
    args = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in make_args(MIXED)]
    text = jax.jit(functools.partial(paged_attention, is_decode=False, scale=1.0, implementation="xla")).lower(*args).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 4, "scores and values, of rows with one token and of chunks"
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products), products


def test_unknown_implementation_names_the_choices() -> None:
    with pytest.raises(ValueError, match="choose one of cpu_native, mosaic_gpu, triton, xla, reference"):
        run(DECODE, make_args(DECODE), "magic")


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_the_bench_compares_with_a_right_gather_and_a_batch_of_the_same_keys(num_tokens: int) -> None:
    ragged = ragged_batch(num_tokens, num_rows=3, max_length=32)
    assert sorted(length for _, length in ragged.rows) == [max(1, num_tokens), 16, 32]
    assert sum(length for _, length in dense_batch(ragged).rows) == sum(length for _, length in ragged.rows) // 3 * 3
    args = make_args(replace(ragged, page_dtype="float32"))
    # The gather form reads whole pages of every entry of the tables, so here there is something everywhere.
    args = args._replace(pages=np.nan_to_num(args.pages, nan=1.0), page_tables=np.clip(args.page_tables, 0, len(args.pages) - 1))
    options = {"is_decode": ragged.is_decode, "scale": SCALE, "implementation": "reference"}
    gathered = jax.jit(functools.partial(gathered_attention, **options))(*args)
    np.testing.assert_allclose(gathered, jax.jit(functools.partial(paged_attention, **options))(*args), rtol=0, atol=1e-5)
