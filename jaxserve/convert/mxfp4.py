"""MXFP4 tensors as GPT-OSS checkpoints store them, read as plain floats.

Each is a pair: `<name>_blocks`, uint8 `[E, rows, groups, 16]` of two 4-bit floats a byte (the low half first), and `<name>_scales`, uint8
`[E, rows, groups]`, the exponent that 32 of them share (OCP Microscaling Formats 1.0: value * 2 ** (scale - 127)). transformers' unpacked
form, which the family reads, is `[E, groups * 32, rows]`. Knows no model; used by `pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np

from jaxserve.convert.source import Source, SourceTensor
from jaxserve.errors import CheckpointError

BLOCKS, SCALES = "_blocks", "_scales"
_EXPONENT_BIAS = 127
_VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def unpacked(source: Source) -> Source:
    """The source with every pair as one tensor of float32, dequantized as its rows (experts) are read."""
    tensors = dict(source.tensors)
    for name in [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]:
        tensors[name] = _tensor(name, tensors)
        del tensors[name + BLOCKS], tensors[name + SCALES]
    return replace(source, tensors=tensors)


def _tensor(name: str, tensors: Mapping[str, SourceTensor]) -> SourceTensor:
    blocks, scales = tensors[name + BLOCKS], tensors.get(name + SCALES)
    if scales is None or len(blocks.shape) != 4 or blocks.shape[:3] != scales.shape or {blocks.dtype, scales.dtype} != {np.dtype(np.uint8)}:
        raise CheckpointError(f"Tensor {name} is no MXFP4 tensor: {name}{BLOCKS} and {name}{SCALES} do not fit together.")
    num_experts, num_rows, num_groups, num_bytes = blocks.shape

    def read(start: int, stop: int) -> np.ndarray:
        packed = blocks.read_rows(start, stop)
        values = np.stack([_VALUES[packed & 15], _VALUES[packed >> 4]], axis=-1).reshape(*packed.shape[:3], 2 * num_bytes)
        values = np.ldexp(values, scales.read_rows(start, stop).astype(np.int32)[..., None] - _EXPONENT_BIAS)
        return values.reshape(stop - start, num_rows, -1).swapaxes(1, 2)

    return SourceTensor(
        name=name,
        shape=(num_experts, num_groups * 2 * num_bytes, num_rows),
        dtype=np.dtype(np.float32),
        stored_type="MXFP4",
        stored_bytes=blocks.stored_bytes + scales.stored_bytes,
        read_rows=read,
    )
