"""The one list of shapes that tests and the bench of `paged_attention` share, and the arrays that belong to a shape.

The arrays are hostile on purpose: NaN in the null page, in the unwritten tail of every row's last page and in pages that no row
owns (of 8-bit pages in the scales, and in the bits where the format has NaN), and page-table entries that point there or nowhere: those
past the length, and those of pages that fell out of the window or chunk of all of a row's tokens, which the scheduler gives to others.
An implementation that reads what it must not shows it. Next: `strategies` (drawn shapes), `test_paged_attention`,
`bench_paged_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from pallas_kernels.dispatch import Needs

DTYPES: dict[str, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8, "uint8": np.uint8
}  # fmt: skip
FLOAT8_NAN = 0x7F
"""Bits of float8_e4m3fn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One step's shape.

    Attributes:
        rows: For each row (tokens computed, positions that hold keys after them); decode rows first.
        num_padding_rows, num_padding_tokens: Appended after the real ones.
        max_pages: Width of the page table.
        num_parts: Of a page: 2, or 1 where keys are the values too.
        num_shared_pages: Leading pages of the first row that the others have too, as far as they are full in both.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_pages: int
    num_padding_rows: int = 0
    num_padding_tokens: int = 0
    page_dtype: str = "float32"
    num_parts: int = 2
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    is_decode: bool = False
    q_dtype: str = "float32"
    num_shared_pages: int = 0

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return sum(count for count, _ in self.rows) + self.num_padding_tokens

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the rows hold: what one layer must read at least once (no window)."""
        item = np.dtype(DTYPES[self.page_dtype]).itemsize
        return sum(length for _, length in self.rows) * self.num_parts * self.num_kv_heads * self.head_dim * item

    @property
    def needs(self) -> Needs:
        """What the shape asks of an implementation."""
        return Needs(
            head_dim=self.head_dim, page_size=self.page_size, num_parts=self.num_parts, page_dtype=self.page_dtype, q_dtype=self.q_dtype,
            group=self.num_heads // self.num_kv_heads, window=self.window, chunk=self.chunk, soft_cap=self.soft_cap,
            has_sinks=self.has_sinks,
        )  # fmt: skip

    def first_visible(self, position: int) -> int:
        """The first position that a token sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position // self.chunk * self.chunk


class AttentionArgs(NamedTuple):
    """The positional arguments of `api.paged_attention`, as NumPy arrays."""

    q: np.ndarray
    pages: np.ndarray
    page_tables: np.ndarray
    row_start: np.ndarray
    kv_length: np.ndarray
    token_row: np.ndarray
    position: np.ndarray


def make_args(spec: AttentionSpec, seed: int = 0) -> AttentionArgs:
    """Random arrays of a shape; the physical order of pages is random too, and follows the seed alone."""
    rng = np.random.default_rng(seed)
    num_rows = len(spec.rows) + spec.num_padding_rows
    pages_of_row = [-(-length // spec.page_size) for _, length in spec.rows]
    num_spare = 2
    num_pages = 1 + sum(pages_of_row) + num_spare
    shape = (num_pages, spec.num_parts, spec.num_kv_heads, spec.page_size, spec.head_dim)
    pages = np.full(shape, np.nan, np.float32)
    # Keys and values of 8 bits are numbers of that format, and their scales keep the products near 1 (`make_scales`).
    spread = {"int8": 40.0, "uint8": 100.0}.get(spec.page_dtype, 1.0)
    free = rng.permutation(np.arange(1, num_pages))
    spare = free[:num_spare]
    out_of_range = np.array([num_pages + 7, -3])
    page_tables = rng.choice(np.concatenate((spare, out_of_range, [0])), (num_rows, spec.max_pages))
    used = num_spare
    for row, ((num_tokens, length), count) in enumerate(zip(spec.rows, pages_of_row, strict=True)):
        first = spec.first_visible(length - num_tokens) // spec.page_size
        page_tables[row, first:count] = free[used + first : used + count]
        for index in range(first, count):
            if row > 0 and _is_shared(spec, row, index):
                page_tables[row, index] = page_tables[0, index]
                continue
            filled = min(spec.page_size, length - index * spec.page_size)
            values = rng.standard_normal((spec.num_parts, spec.num_kv_heads, filled, spec.head_dim)) * spread
            pages[free[used + index], :, :, :filled] = values
        used += count

    counts = [count for count, _ in spec.rows] + [0] * spec.num_padding_rows
    token_row = np.concatenate((np.repeat(np.arange(num_rows), counts), np.full(spec.num_padding_tokens, num_rows)))
    position = np.concatenate([np.arange(length - count, length) for count, length in spec.rows] + [np.zeros(spec.num_padding_tokens)])
    # Queries that 16 bits hold: what an implementation loses then comes from its sums, not from rounding its input.
    q = rng.standard_normal((spec.num_tokens, spec.num_heads, spec.head_dim)).astype(ml_dtypes.bfloat16)
    return AttentionArgs(
        q=q.astype(DTYPES[spec.q_dtype]),
        pages=_stored(pages, spec.page_dtype),
        page_tables=page_tables.astype(np.int32),
        row_start=np.cumsum([0, *counts]).astype(np.int32),
        kv_length=np.array([length for _, length in spec.rows] + [0] * spec.num_padding_rows, np.int32),
        token_row=token_row.astype(np.int32),
        position=position.astype(np.int32),
    )


def _is_shared(spec: AttentionSpec, row: int, index: int) -> bool:
    """Whether page `index` of a row is the first row's: full in both, and still owned by the first."""
    num_tokens, length = spec.rows[0]
    is_full = (index + 1) * spec.page_size <= min(length, spec.rows[row][1])
    return is_full and spec.first_visible(length - num_tokens) // spec.page_size <= index < spec.num_shared_pages


def _stored(pages: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 numbers as a page dtype holds them. Int8 has no NaN; there the scales have it."""
    if dtype == "int8":
        return np.nan_to_num(np.clip(np.round(pages), -127, 127), nan=99.0).astype(np.int8)
    if dtype == "uint8":
        bits = np.clip(pages, -448.0, 448.0).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return np.where(np.isnan(pages), np.uint8(FLOAT8_NAN), bits)
    return pages.astype(DTYPES[dtype])


def make_scales(spec: AttentionSpec, args: AttentionArgs, seed: int = 0) -> np.ndarray | None:
    """Scales for the pages of `make_args`: NaN at places that no row owns. None where pages are not of 8 bits."""
    if spec.page_dtype not in ("int8", "uint8"):
        return None
    is_owned = np.zeros((len(args.pages), spec.page_size), bool)
    for row, (num_tokens, length) in enumerate(spec.rows):
        at = np.arange(spec.first_visible(length - num_tokens) // spec.page_size * spec.page_size, length)
        is_owned[args.page_tables[row, at // spec.page_size], at % spec.page_size] = True
    scales = np.random.default_rng(seed).uniform(0.005, 0.03, args.pages.shape[:4]).astype(np.float32)
    return np.where(is_owned[:, None, None, :], scales, np.float32(np.nan))


def exact_pages(spec: AttentionSpec, args: AttentionArgs) -> np.ndarray:
    """The numbers that the pages of `make_args` stand for, in float64."""
    scales = make_scales(spec, args)
    if scales is None:
        return args.pages.astype(np.float64)
    numbers = args.pages if spec.page_dtype == "int8" else args.pages.view(ml_dtypes.float8_e4m3fn)
    return numbers.astype(np.float64) * scales[..., None]


def largest_value(spec: AttentionSpec, args: AttentionArgs) -> float:
    """max|V|, which errors are measured by."""
    return float(np.nanmax(np.abs(exact_pages(spec, args)[:, -1])))


def make_sinks(spec: AttentionSpec) -> np.ndarray | None:
    """One sink logit for each head, near the size of the scores; None when the shape has none."""
    return np.linspace(-1.0, 2.0, spec.num_heads, dtype=np.float32) if spec.has_sinks else None


DECODE = AttentionSpec(
    name="decode", rows=((1, 1), (1, 16), (1, 17), (1, 90)), num_padding_rows=2, num_padding_tokens=2,
    num_heads=6, num_kv_heads=2, head_dim=64, page_size=16, max_pages=8, is_decode=True,
)  # fmt: skip
MIXED = AttentionSpec(
    name="mixed", rows=((1, 33), (1, 7), (5, 5), (40, 75), (2, 19)), num_padding_rows=1, num_padding_tokens=15,
    num_heads=6, num_kv_heads=2, head_dim=64, page_size=16, max_pages=8,
)  # fmt: skip


def _variants() -> tuple[AttentionSpec, ...]:
    return (
        DECODE,
        MIXED,
        replace(DECODE, name="decode-bf16", page_dtype="bfloat16"),
        replace(MIXED, name="mixed-bf16", page_dtype="bfloat16", num_heads=8, head_dim=128),
        replace(MIXED, name="mixed-f16", page_dtype="float16", num_heads=2),
        replace(DECODE, name="decode-odd", num_heads=7, num_kv_heads=1, head_dim=40, page_size=8, max_pages=13),
        replace(MIXED, name="mixed-odd", num_heads=7, num_kv_heads=1, head_dim=8, page_size=128, max_pages=1),
        replace(DECODE, name="decode-all", window=16, soft_cap=3.0, has_sinks=True),
        replace(MIXED, name="mixed-all", window=9, soft_cap=3.0, has_sinks=True),
        replace(DECODE, name="decode-chunk", chunk=16, num_parts=1, num_kv_heads=1, head_dim=40),
        replace(MIXED, name="mixed-chunk", chunk=20, num_parts=1, num_kv_heads=1, page_dtype="bfloat16"),
        replace(DECODE, name="decode-80-int8", page_dtype="int8", num_kv_heads=6, head_dim=80, page_size=32, num_shared_pages=1),
        replace(MIXED, name="mixed-96-fp8", page_dtype="uint8", num_heads=4, num_kv_heads=1, head_dim=96, page_size=64, window=30),
        replace(DECODE, name="decode-192-fp8", page_dtype="uint8", head_dim=192, page_size=256, soft_cap=3.0, has_sinks=True),
        replace(MIXED, name="mixed-256-int8", page_dtype="int8", num_heads=2, head_dim=256, page_size=8, max_pages=11, chunk=30),
    )


TEST_SPECS: tuple[AttentionSpec, ...] = _variants()
"""Few and small: each compiles for each implementation."""

BENCH_SPECS: tuple[AttentionSpec, ...] = tuple(
    AttentionSpec(
        name=f"{kind}-{dtype}", rows=rows, num_heads=9, num_kv_heads=3, head_dim=64, page_size=16, max_pages=16,
        page_dtype=dtype, is_decode=kind == "decode",
    )
    for kind, rows in (("decode", ((1, 128),) * 32), ("mixed", ((1, 128),) * 16 + ((112, 240),)))
    for dtype in ("bfloat16", "float32")
)  # fmt: skip
"""SmolLM2-135M's heads: 32 rows with 128 of 256 positions filled, and a step that mixes decode rows with a chunk."""


def ragged_batch(num_tokens: int, *, num_rows: int = 32, max_length: int = 4096) -> AttentionSpec:
    """Rows of evenly spread lengths from 1 to `max_length`, in no order, each with `num_tokens` at its end (SmolLM2-135M's heads).

    With several tokens the shortest rows hold as many keys as that.
    """
    lengths = np.linspace(1, max_length, num_rows).round().astype(int)
    lengths = np.random.default_rng(0).permutation(np.maximum(lengths, num_tokens))
    return AttentionSpec(
        name=f"{num_rows} rows x {num_tokens}", rows=tuple((num_tokens, int(length)) for length in lengths), num_heads=9, num_kv_heads=3,
        head_dim=64, page_size=16, max_pages=max_length // 16, page_dtype="bfloat16", is_decode=num_tokens == 1,
    )  # fmt: skip


def dense_batch(ragged: AttentionSpec) -> AttentionSpec:
    """As many rows with the same keys in all, of equal length."""
    lengths = [length for _, length in ragged.rows]
    return replace(ragged, rows=tuple((count, sum(lengths) // len(lengths)) for count, _ in ragged.rows))
