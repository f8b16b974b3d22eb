"""Pieces: any piece size gives the same arrays, and a conversion stays within its memory."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint import open_checkpoint
from jaxserve.convert import convert, write_orbax
from jaxserve.convert.source import SourceTensor

ROOT = Path(__file__).parents[2]
GGUF = ROOT / "tests" / "data" / "golden" / "llama3-rope-gguf-q4_k_m" / "model-Q4_K_M.gguf"


def tensor(shape, multiple=1):
    dtype = np.dtype(np.float32)
    return SourceTensor("t", shape, dtype, "F32", 4 * math.prod(shape), lambda start, stop: np.zeros(0), row_multiple=multiple)


@pytest.mark.parametrize(
    ("shape", "multiple", "rows"),
    [
        ((100,), 1, 100),
        ((1, 10), 1, 1),
        ((0, 10), 1, 1),
        ((1000, 1 << 20), 1, 8),  # 32 MiB
        ((17, 1 << 20), 1, 6),  # three even pieces, not 8 + 8 + 1
        ((64, 1 << 20), 16, 16),  # a head is never cut
        ((96, 1 << 18), 16, 32),
        ((4, 1 << 26), 1, 1),
    ],
)
def test_rows_of_a_piece(shape, multiple, rows):
    assert write_orbax.piece_rows(tensor(shape, multiple)) == rows


@pytest.mark.parametrize("piece_bytes", [1, 40_000, 1 << 20])
def test_piece_size_changes_nothing(converted, tmp_path, monkeypatch, piece_bytes):
    # Quantized blocks and the permuted rows of q and k among them.
    monkeypatch.setattr(write_orbax, "PIECE_BYTES", piece_bytes)
    convert(GGUF, tmp_path / "converted")
    pieces, whole = open_checkpoint(tmp_path / "converted"), open_checkpoint(converted(GGUF.parent.name))
    assert pieces.names == whole.names
    for name in whole.names:
        np.testing.assert_array_equal(pieces.read(name), whole.read(name))


def test_peak_memory(tmp_path):
    spec = importlib.util.spec_from_file_location("measure_convert_memory", ROOT / "scripts" / "measure_convert_memory.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    dimensions = script.sizes(0.3, is_top_heavy=True)
    source = script.write_safetensors(tmp_path / "large-embedding", dimensions)
    assert script.measure(source, tmp_path / "converted", 4 * dimensions[0] * dimensions[1])
