"""What the roofline says our kernels move, against what the interpreter counts; and that a decode step moves little more than it must."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.bench import roofline
from jaxserve.bench.roofline import Attention, GroupedProduct
from jaxserve.bench.whole_step import WholeStep
from jaxserve.models.registry import resolve_spec
from jaxserve.models.spec import MoESpec
from pallas_kernels import deviceless, triton_on_numpy
from pallas_kernels.grouped_linear.api import NO_COPY, grouped_linear
from pallas_kernels.grouped_linear.arg_specs import GroupedLinearSpec
from pallas_kernels.grouped_linear.arg_specs import make_args as grouped_args
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.arg_specs import AttentionSpec, make_args
from pallas_kernels.write_kv.api import write_kv
from tests.deviceless.conftest import CONFIGS, Programs

pytestmark = pytest.mark.skipif(deviceless.unavailable_reason() is not None, reason=str(deviceless.unavailable_reason()))

ROOT = Path(__file__).parents[2]
CLOSE = 0.02


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "parts", "page_size", "window"),
    [
        ((700, 33, 512), 8, 2, 64, 2, 16, None),
        ((300, 40), 8, 4, 128, 2, 8, 100),
        ((200, 64), 16, 1, 576, 1, 16, None),
        ((1000,), 16, 4, 64, 2, 32, None),
    ],
)
def test_attention_moves_what_the_formula_says(
    rows: tuple[int, ...], heads: int, kv_heads: int, head_dim: int, parts: int, page_size: int, window: int | None
) -> None:
    spec = AttentionSpec(
        name="counted", rows=tuple((1, length) for length in rows), num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        page_size=page_size, max_pages=1024 // page_size, page_dtype="float16", num_parts=parts, window=window, is_decode=True,
    )  # fmt: skip
    args = make_args(spec)
    args = args._replace(q=args.q.astype("float16"))
    options = {"is_decode": True, "scale": 0.1, "window": window, "implementation": "triton"}
    _, traffic = triton_on_numpy.run(paged_attention, *args, **options)
    shape = Attention(
        num_rows=len(rows), num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, num_parts=parts, page_size=page_size, max_keys=1024,
        window=window,
    )  # fmt: skip
    assert shape.cost(rows).num_bytes == pytest.approx(traffic.load_bytes + traffic.store_bytes, rel=CLOSE)


def test_writing_moves_what_the_formula_says() -> None:
    spec = AttentionSpec(
        name="written", rows=((1, 9), (1, 20)), num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, max_pages=2, page_dtype="float16"
    )
    pages = make_args(spec).pages
    k = pages[1, 0, :, :2].swapaxes(0, 1).copy()
    _, traffic = triton_on_numpy.run(
        write_kv, pages, k, k, *make_args(spec).page_tables[:, :1].T, *make_args(spec).page_tables[:, :1].T * 0, implementation="triton"
    )
    assert roofline.write_cost(2, 2 * 64, 2).num_bytes == pytest.approx(traffic.load_bytes + traffic.store_bytes, rel=CLOSE)


def test_grouped_products_move_what_the_formula_says() -> None:
    spec = GroupedLinearSpec(
        num_rows=60, num_blocks=6, num_used=4, block_size=8, num_experts=5, num_inputs=192, num_outputs=256, dtype="float16",
        out_dtype="float16",
    )  # fmt: skip
    args = grouped_args(spec)
    _, traffic = triton_on_numpy.run(grouped_linear, *args, implementation="triton")
    product, num_rows = GroupedProduct(192, 256), np.count_nonzero(args.place[: 4 * 8] != NO_COPY)
    cost = product.cost(num_rows, 6, 4, 8)
    assert cost.num_bytes + product.reread_bytes(num_rows) == pytest.approx(traffic.load_bytes + traffic.store_bytes, rel=CLOSE)
    assert cost.num_operations == 2 * 4 * 8 * 192 * 256


def test_expected_experts_and_blocks_by_hand() -> None:
    """Two tokens, one of two experts each: both meet in one expert half of the time."""
    moe = MoESpec(num_experts=2, top_k=1, size=8, activation="silu")
    assert roofline.expected_experts(moe, 2) == pytest.approx(1.5)
    assert roofline.expected_blocks(moe, 2, 1) == pytest.approx(2.0)
    assert roofline.expected_blocks(moe, 2, 4) == pytest.approx(1.5)


def test_told_bytes_by_hand() -> None:
    """Two cards, three rows: each sends half of every sum of 3 x 8,192 numbers, and receives as much; 161 sums in 80 layers."""
    step = WholeStep(resolve_spec(json.loads((CONFIGS / "llama-3.1-70b.json").read_text())), num_devices=2)
    assert roofline.told_bytes(step, 3) == 161 * 3 * 8192 * 2
    assert roofline.told_bytes(replace(step, num_devices=1), 3) == 0


def test_pages_held_by_hand() -> None:
    """Pages of 16. All keys: 63 pages for 1,000 of them. A window of 100 at key 999 begins at 900, in page 56 of 0 to 62."""
    config = json.loads((CONFIGS / "gemma-3-27b.json").read_text())
    spec = resolve_spec(config | {"sliding_window": 100})
    num_windows = sum(group.window is not None for group in spec.kv_groups)
    assert 0 < num_windows < len(spec.kv_groups)
    assert roofline.pages_held(spec, 1000, 16) == 7 * num_windows + 63 * (len(spec.kv_groups) - num_windows)


def test_a_decode_step_moves_little_more_than_it_must(programs: Programs) -> None:
    floors = roofline.decode_floors(programs.step, programs.step.max_num_seqs, programs.module("decode"))
    ratios = {floor.context: floor.ratio for floor in floors}
    assert all(0.97 < ratio <= 1.15 for ratio in ratios.values()), ratios


def test_the_table_of_floors_is_not_stale(programs: Programs) -> None:
    """The rows of the largest batch; the others come from the same code."""
    table = runpy.run_path(str(ROOT / "scripts" / "roofline_table.py"))
    floors = roofline.decode_floors(programs.step, programs.step.max_num_seqs, programs.module("decode"))
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    missing = [row for row in table["rows"](programs.name, programs.step, floors) if row not in text]
    assert not missing, "docs/performance.md is stale: run scripts/roofline_table.py"
