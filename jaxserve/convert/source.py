"""What every reader hands to the converter: a model's config, its small files, and its tensors as functions that read rows.

Nothing of a tensor is in memory until its rows are asked for, and rows come from plain file reads: pages of a mapped file would
count as memory of this process, and a file that shrinks under a mapping kills it. Knows no format and no model; the readers are
`read_safetensors.py` and `read_gguf.py`, who uses this is `pipeline.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a source checkpoint.

    Attributes:
        name: As the source calls it (GGUF names are already translated to Hugging Face's).
        shape: In Hugging Face's orientation.
        dtype: What `read_rows` returns: the stored type, or float32 for dequantized tensors.
        stored_type: The type in the file, such as BF16 or Q4_1.
        stored_bytes: Bytes in the file.
        row_multiple: `read_rows` takes starts and stops that are multiples of it (or the end).
        read_rows: `(start, stop)` along the first axis -> `[stop - start, *shape[1:]]`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored_type: str
    stored_bytes: int
    read_rows: Callable[[int, int], np.ndarray]
    row_multiple: int = 1

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that can be converted.

    Attributes:
        kind: safetensors or gguf.
        files: The weight files, in order.
        config: The Hugging Face `config.json`, made from the metadata for a GGUF file.
        tensors: By name.
        small_files: What stands beside the weights (tokenizer, generation config, chat template): file name -> content.
        notes: Lines worth telling the user.
    """

    kind: str
    files: tuple[Path, ...]
    config: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]
    small_files: Mapping[str, bytes]
    notes: tuple[str, ...] = field(default=())


def read_exactly(path: Path, offset: int, num_bytes: int) -> np.ndarray:
    """`num_bytes` of a file as a new uint8 array; CheckpointError when the file ends before."""
    buffer = np.empty(num_bytes, np.uint8)
    view = memoryview(buffer)
    done = 0
    with path.open("rb", buffering=0) as file:
        while done < num_bytes:
            count = os.preadv(file.fileno(), [view[done:]], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{path} is truncated: bytes {offset} to {offset + num_bytes} are needed, it ends at {offset + done}."
                )
            done += count
    return buffer


def listed(names: list[str], limit: int = 10) -> str:
    """Names for a message: the first `limit`, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
