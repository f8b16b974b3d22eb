"""Writes tensors as an Orbax checkpoint, a piece of rows at a time, so that no tensor is ever whole in memory.

Orbax's own (partial) save wants whole arrays and holds more than two copies of each. So Orbax saves the tree with a placeholder
of one element for every tensor, which gives its metadata and commit marks, and then every array is replaced through tensorstore,
the library Orbax stores arrays with. Without compression and without OCDBT a chunk is the raw bytes of some rows, which restores
fastest (measured). Knows no model and no source format; the reader is `jaxserve.checkpoint`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoint import DTYPES
from jaxserve.convert.source import SourceTensor
from jaxserve.errors import CheckpointError

PIECE_BYTES = 32 << 20
"""Rows are read, converted and written in pieces of at most this many bytes in float32 (or one row, or one head)."""


@dataclass(frozen=True, slots=True)
class Item:
    """One array to write: logical name, dtype (a key of DTYPES), and where its rows come from."""

    name: str
    dtype: str
    source: SourceTensor

    @property
    def num_bytes(self) -> int:
        """Bytes it takes on disk."""
        return self.source.size * DTYPES[self.dtype].itemsize


def write_weights(path: Path, items: Sequence[Item], on_written: Callable[[Item, int], None]) -> None:
    """Writes all items as the Orbax checkpoint `path`, which must not exist.

    Args:
        path: Directory to make.
        items: At least one; names are unique.
        on_written: Called with the item and the bytes of each piece once it is written.

    Raises:
        CheckpointError: A source is damaged, a value does not fit the dtype, or the disk is full.
    """
    _save_placeholders(path, items)
    try:
        for item in items:
            _write_array(path / "state" / item.name, item, on_written)
    except (ValueError, OSError) as error:  # tensorstore reports failing file operations as ValueError
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def _save_placeholders(path: Path, items: Sequence[Item]) -> None:
    import orbax.checkpoint.experimental.v1 as ocp

    tree = {item.name: np.zeros((1,) * len(item.source.shape), DTYPES[item.dtype]) for item in items}
    context = ocp.Context()
    context.array.saving.use_ocdbt = False
    context.array.saving.use_compression = False
    with _quiet_absl(), context:
        ocp.save(path.absolute(), tree)


def _write_array(path: Path, item: Item, on_written: Callable[[Item, int], None]) -> None:
    """Writes one array; while a piece is being written the next one is read."""
    import tensorstore as ts

    rows = piece_rows(item.source)
    store = ts.open(_array_spec(path, item, rows), create=True, delete_existing=True).result()
    pending: tuple[Any, int] | None = None
    for start in range(0, item.source.shape[0], rows):
        piece = _cast(item, item.source.read_rows(start, min(start + rows, item.source.shape[0])))
        if pending is not None:
            pending[0].result()
            on_written(item, pending[1])
        # The piece is never touched again, so it need not be copied first.
        future = store[start : start + len(piece)].write(piece, can_reference_source_data_indefinitely=True)
        pending = future, piece.nbytes
    if pending is not None:
        pending[0].result()
        on_written(item, pending[1])


def piece_rows(source: SourceTensor) -> int:
    """Rows in a piece: whole multiples that fit PIECE_BYTES in float32 (at least one multiple), cut evenly.

    Evenly, because a chunk on disk is always whole: a last piece of few rows would be padded.
    """
    row_bytes = 4 * math.prod(source.shape[1:])
    multiples = -(-source.shape[0] // source.row_multiple)
    most = max(PIECE_BYTES // max(row_bytes * source.row_multiple, 1), 1)
    num_pieces = -(-multiples // most)
    return max(-(-multiples // max(num_pieces, 1)) * source.row_multiple, 1)


def _array_spec(path: Path, item: Item, rows: int) -> dict[str, Any]:
    shape = list(item.source.shape)
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        # The whole checkpoint is synced once, before its rename.
        "context": {"file_io_sync": False},
        # A chunk of zeros must exist on disk: the reader takes a missing one for damage.
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "shape": shape,
            "data_type": item.dtype,
            "fill_value": 0.0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [rows, *shape[1:]]}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        },
    }


def _cast(item: Item, piece: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        result = piece.astype(DTYPES[item.dtype], copy=False)
    if item.dtype == "float16" and piece.dtype != np.float16 and np.isinf(result).sum() > np.isinf(piece).sum():
        raise CheckpointError(f"Tensor {item.source.name} has values beyond float16's largest (65504). Use --dtype bfloat16 or float32.")
    return result


@contextmanager
def _quiet_absl() -> Iterator[None]:
    """Orbax warns through absl about OCDBT, which is not used on purpose."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
