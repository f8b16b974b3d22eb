"""Logical tensors cut out of fused ones, against plain slices, whatever rows the source can be read in."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from jaxserve.convert.match import cut_out, match_tensors
from jaxserve.convert.source import SourceTensor
from jaxserve.errors import CheckpointError
from jaxserve.models.spec import Cut, TensorSpec

EVERY = slice(None)
N, K, G, H, D, F, E = 6, 2, 3, 4, 8, 5, 3


class Case(NamedTuple):
    """A part of a fused tensor: what it is cut by, and what it must be."""

    cut: Cut
    expected: Callable[[np.ndarray], np.ndarray]


def head_rows(w: np.ndarray, num_heads: int, first: int, count: int) -> np.ndarray:
    """Of `num_heads` runs of rows, `count` heads of H rows from head `first` on in each."""
    return np.concatenate([run[first * H : (first + count) * H] for run in np.split(w, num_heads)])


CASES = {
    "rows": Case(Cut((20, D), (20, D), (slice(7, 13),)), lambda w: w[7:13]),
    "last rows": Case(Cut((20, D), (20, D), (slice(12, 20),)), lambda w: w[12:]),
    "third of a bias": Case(Cut((3 * D,), (3, D), (1,)), lambda b: b[D : 2 * D]),
    "one kv head behind the queries": Case(Cut(((N + 2) * H, D), (N + 2, H, D), (slice(N, N + 1),)), lambda w: w[N * H : (N + 1) * H]),
    "[N, 3, H, D] keys": Case(Cut((N * 3 * H, D), (N, 3, H, D), (EVERY, 1)), lambda w: head_rows(w, N, 1, 1)),
    "[N, 3, H] values": Case(Cut((N * 3 * H,), (N, 3, H), (EVERY, 2)), lambda b: head_rows(b, N, 2, 1)),
    "[K, G + 2, H, D] queries": Case(Cut((K * (G + 2) * H, D), (K, G + 2, H, D), (EVERY, slice(G))), lambda w: head_rows(w, K, 0, G)),
    "[K, G + 2, H, D] keys": Case(Cut((K * (G + 2) * H, D), (K, G + 2, H, D), (EVERY, G)), lambda w: head_rows(w, K, G, 1)),
    "[K, G + 2, H] values": Case(Cut((K * (G + 2) * H,), (K, G + 2, H), (EVERY, G + 1)), lambda b: head_rows(b, K, G + 1, 1)),
    "input axis first": Case(Cut((D, F), (D, F), (EVERY,), True), lambda w: w.T),
    "columns, input axis first": Case(Cut((D, 3 * D), (D, 3, D), (EVERY, 2), True), lambda w: w[:, 2 * D :].T),
    "an expert's half": Case(Cut((E, 2 * F, D), (E, 2, F, D), (1, 1)), lambda w: w[1, F:]),
    "an expert": Case(Cut((E, D, F), (E, D, F), (2,)), lambda w: w[2]),
    "an expert, input axis first": Case(Cut((E, F, D), (E, F, D), (0,), True), lambda w: w[0].T),
    "an expert's half, input axis first": Case(Cut((E, D, 2 * F), (E, D, 2, F), (2, EVERY, 0), True), lambda w: w[2, :, :F].T),
    "gate and up in turns": Case(Cut((E, D, 2 * F), (E, D, F, 2), (1, EVERY, EVERY, 1), True), lambda w: w[1, :, 1::2].T),
    "biases in turns": Case(Cut((E, 2 * F), (E, F, 2), (2, EVERY, 0)), lambda b: b[2, ::2]),
}


class Rows:
    """A tensor that gives rows at multiples only, as quantized formats do, and notes which were read."""

    def __init__(self, array: np.ndarray, multiple: int) -> None:
        self.array, self.multiple = array, multiple
        self.was_read = np.zeros(len(array), bool)

    def read(self, start: int, stop: int) -> np.ndarray:
        assert start % self.multiple == 0 and 0 <= start < stop <= len(self.array), (start, stop)
        assert stop % self.multiple == 0 or stop == len(self.array), (start, stop)
        self.was_read[start:stop] = True
        return self.array[start:stop].copy()

    def tensor(self, name: str = "fused") -> SourceTensor:
        return SourceTensor(name, self.array.shape, self.array.dtype, "F32", self.array.nbytes, self.read, self.multiple)


@pytest.mark.parametrize("multiple", [1, 3, 4, 32])
@pytest.mark.parametrize("name", CASES)
def test_a_part_equals_a_plain_slice(name: str, multiple: int) -> None:
    cut, expected = CASES[name]
    fused = np.random.default_rng(0).standard_normal(cut.source_shape).astype(np.float32)
    part = expected(fused)
    rows = Rows(fused, multiple)
    tensor = cut_out(TensorSpec("part", part.shape, ("fused",), cut=cut), rows.tensor())
    assert tensor.shape == part.shape and tensor.name == "fused" and tensor.stored_bytes == part.nbytes
    for pieces in (1, 2):
        step = tensor.row_multiple * pieces
        read = [tensor.read_rows(start, min(start + step, len(part))) for start in range(0, len(part), step)]
        np.testing.assert_array_equal(np.concatenate(read), part)


@pytest.mark.parametrize(
    ("name", "rows"), [("rows", range(7, 13)), ("an expert's half", range(1, 2)), ("one kv head behind the queries", range(24, 28))]
)
def test_other_rows_are_not_read(name: str, rows: range) -> None:
    cut, expected = CASES[name]
    source = Rows(np.zeros(cut.source_shape, np.float32), 1)
    shape = expected(source.array).shape
    cut_out(TensorSpec("part", shape, ("fused",), cut=cut), source.tensor()).read_rows(0, shape[0])
    assert np.flatnonzero(source.was_read).tolist() == list(rows)


def test_rows_are_read_piece_by_piece() -> None:
    source = Rows(np.arange(40, dtype=np.float32).reshape(20, 2), 4)
    tensor = cut_out(TensorSpec("part", (8, 2), ("fused",), cut=Cut((20, 2), (20, 2), (slice(8, 16),))), source.tensor())
    assert tensor.row_multiple == 4
    np.testing.assert_array_equal(tensor.read_rows(4, 8), source.array[12:16])
    assert np.flatnonzero(source.was_read).tolist() == [12, 13, 14, 15]


def test_a_fused_tensor_of_another_shape_or_missing_is_named_once() -> None:
    wanted = [TensorSpec(part, (4, 2), ("model.fused", "fused"), cut=Cut((8, 2), (2, 4, 2), (i,))) for i, part in enumerate("qk")]
    fused = Rows(np.zeros((8, 3), np.float32), 1).tensor()
    with pytest.raises(CheckpointError, match=r"Tensors 1 of another shape than the config says: fused is \[8, 3\], not \[8, 2\]\.$"):
        match_tensors(wanted, {"fused": fused}, ())
    with pytest.raises(CheckpointError, match=r"Tensors 1 missing: model\.fused \[8, 2\]\.$"):
        match_tensors(wanted, {}, ())


def test_everything_wrong_is_told_at_once() -> None:
    wanted = [TensorSpec("a", (1,), ("a",)), TensorSpec("b", (1,), ("b",)), TensorSpec("c", (1,), ("c",), is_optional=True)]
    tensors = {name: Rows(np.zeros(2, np.float32), 1).tensor(name) for name in ("b", "x", "table")}
    with pytest.raises(CheckpointError, match=r"1 missing: a \[1\]; 1 of another shape .*: b is \[2\], not \[1\]; 1 unexpected: x \[2\]"):
        match_tensors(wanted, tensors, ("^table$",))
