"""Parses a GGUF file: metadata and the list of tensors, and dequantizes rows of a tensor.

The header is read here rather than by `gguf.GGUFReader`, which maps the whole file, keeps several arrays for each of a
vocabulary's strings (150 MB and 2 s for 49,152 tokens) and does not tell a truncated file from a good one. Types, block sizes
and dequantization are the `gguf` package's. Knows no model; go on to `read_gguf.py`. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.convert.source import read_exactly
from jaxserve.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor as stored.

    Attributes:
        shape: Row-major, so the reverse of the order in the file.
        type_name: Such as F16 or Q4_K.
        offset: Of its first byte in the file.
        row_bytes: Bytes of one row, that is of everything but the first axis.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.shape[0] * self.row_bytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """What `read_rows` returns."""
        return np.dtype({"F16": np.float16, "BF16": ml_dtypes.bfloat16}.get(self.type_name, np.float32))

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Rows of the first axis: F16 and BF16 as they are, everything else as float32."""
        from gguf import GGMLQuantizationType, dequantize

        raw = read_exactly(self.path, self.offset + start * self.row_bytes, (stop - start) * self.row_bytes)
        shape = (stop - start, *self.shape[1:])
        if self.type_name in ("F32", "F16", "BF16"):
            return raw.view(self.dtype).reshape(shape)
        if self.type_name == "F64":
            return raw.view(np.float64).astype(np.float32).reshape(shape)
        # One row of blocks for each stored row; gguf computes in float32 as the formats define.
        blocks = raw.reshape(math.prod(shape[:-1]), -1) if len(shape) > 1 else raw.reshape(1, -1)
        return np.asarray(dequantize(blocks, GGMLQuantizationType[self.type_name]), np.float32).reshape(shape)


class _Cursor:
    """Reads values one after another from the mapped header; leaving the file is a truncated file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise CheckpointError(
                f"{self.path} is truncated or corrupt: its header goes on past its {len(self.data)} bytes. Download it again."
            )
        result = self.data[self.position : end]
        self.position = end
        return result

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        # Tokens of some files are not valid UTF-8; such a token cannot be encoded from text, but must not stop the rest.
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, type_id: int) -> Any:
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            item_type, count = self.scalar("I"), self.scalar("Q")
            if item_type in _SCALARS:
                code = f"{count}{_SCALARS[item_type]}" if count <= len(self.data) else ""
                return list(struct.unpack("<" + code, self.take(struct.calcsize("<" + code) if code else count)))
            return [self.value(item_type) for _ in range(count)]
        raise CheckpointError(f"{self.path} is corrupt: its header has a value of the unknown type {type_id}.")


def read_gguf_file(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata and tensors by name.

    Raises:
        CheckpointError: Not GGUF, an unknown version or tensor type, or tensors that reach past the file's end.
    """
    if path.stat().st_size < 24:
        raise CheckpointError(f"{path} is not a GGUF file, or is truncated: it has {path.stat().st_size} bytes.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        if cursor.take(4) != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it begins with {data[:4]!r}.")
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise CheckpointError(f"{path} has GGUF version {version}; supported: 2 and 3, little-endian.")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {}
        for _ in range(num_values):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        if (parts := metadata.get("split.count", 1)) != 1:
            raise CheckpointError(f"{path} is one of {parts} parts, which is not supported; merge them with llama-gguf-split --merge.")
        entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{path} is corrupt: general.alignment is {alignment!r}.")
        data_start = -(-cursor.position // alignment) * alignment
        tensors = {name: _tensor(path, name, shape, type_id, data_start + offset) for name, shape, type_id, offset in entries}
        if len(tensors) < len(entries):
            raise CheckpointError(f"{path} is corrupt: it holds two tensors of one name.")
        end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=data_start)
        if end > len(data):
            raise CheckpointError(f"{path} is truncated: {end} bytes are needed, it has {len(data)}. Download it again.")
    return metadata, tensors


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise CheckpointError(f"{cursor.path} is corrupt: tensor {name!r} has {num_dimensions} dimensions.")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _tensor(path: Path, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        raise CheckpointError(f"{path}: tensor {name} has the type {type_id}, which the installed gguf package does not know.") from None
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    # A 1-D tensor is one row per element where its type allows, so that rows always run along the first axis.
    if shape[-1] % block_elements:
        raise CheckpointError(f"{path} is corrupt: tensor {name} {list(shape)} is not whole blocks of {block_elements} ({kind.name}).")
    if len(shape) == 1 and block_elements > 1:
        raise CheckpointError(f"{path}: vector {name} is quantized ({kind.name}), which is not supported.")
    row_bytes = math.prod(shape[1:]) * block_bytes // block_elements
    return GGUFTensor(path, name, shape, kind.name, offset, row_bytes)
