"""Reads a GGUF file as a Hugging Face checkpoint: config, tokenizer, and tensors dequantized row by row.

What llama.cpp's conversion changed is changed back: rows of q and k in an interleaved order (pairs of rotated dimensions are
adjacent) are put into Hugging Face's (first halves, then second halves), norm weights that had one added lose it, and stacks of experts
are taken apart. Which architecture has which is in `gguf_names.py`; go on to `match.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.convert.gguf_config import ROPE_TENSORS, generation_config, hugging_face_config
from jaxserve.convert.gguf_file import GGUFTensor, read_gguf_file
from jaxserve.convert.gguf_names import LAYOUTS, Layout, layer_part
from jaxserve.convert.gguf_tokenizer import tokenizer_files
from jaxserve.convert.source import Source, SourceTensor, listed
from jaxserve.errors import CheckpointError


def read_gguf(path: Path) -> Source:
    """The checkpoint in one GGUF file.

    Unquantized tensors keep their type. Quantized ones become float32, the type their formats are defined in: a product of a
    float16 scale and an integer needs up to 19 significant bits, which neither float16 (11) nor bfloat16 (8) keeps. The config's
    dtype, which the runner follows, is then bfloat16.

    Raises:
        CheckpointError: Damaged file, or an architecture, a tokenizer or a tensor type that is not supported.
    """
    metadata, tensors = read_gguf_file(path)
    _check_types(path, tensors)
    rope_tensors = {name: tensors.pop(name) for name in ROPE_TENSORS if name in tensors}
    factors = {name: tensor.read_rows(0, tensor.shape[0]).tolist() for name, tensor in rope_tensors.items()}
    config = hugging_face_config(metadata, {name: tensor.shape for name, tensor in tensors.items()}, _shortest(factors))
    config["dtype"] = _compute_dtype(tensors)
    small_files = tokenizer_files(metadata, vocab_size=config["vocab_size"])
    small_files["generation_config.json"] = json.dumps(generation_config(metadata), indent=2).encode()
    layout = LAYOUTS[metadata["general.architecture"]]
    converted = {source.name: source for tensor in tensors.values() for source in _sources(tensor, layout, config)}
    return Source("gguf", (path,), config, converted, small_files)


def _shortest(factors: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The shortest decimal form of each value that was stored in 32 bits, which is what the original config said."""
    return {name: [float(str(np.float32(value))) for value in values] for name, values in factors.items()}


def _check_types(path: Path, tensors: Mapping[str, GGUFTensor]) -> None:
    """Every type must be one that `gguf` dequantizes: tried on one block each, before anything is written."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    for type_name in {tensor.type_name for tensor in tensors.values()} - {"F64"}:
        kind = GGMLQuantizationType[type_name]
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            names = [name for name, tensor in tensors.items() if tensor.type_name == type_name]
            raise CheckpointError(f"{path}: the type {type_name} of {listed(names, 3)} cannot be dequantized by gguf.") from None


def _compute_dtype(tensors: Mapping[str, GGUFTensor]) -> str:
    """The config's dtype: that of most bytes if it is a plain float, else bfloat16."""
    by_type: dict[str, int] = {}
    for tensor in tensors.values():
        by_type[tensor.type_name] = by_type.get(tensor.type_name, 0) + tensor.num_bytes
    main = max(by_type, key=lambda name: by_type[name])
    return {"F16": "float16", "F32": "float32", "F64": "float32"}.get(main, "bfloat16")


def _sources(tensor: GGUFTensor, layout: Layout, config: Mapping[str, Any]) -> Iterator[SourceTensor]:
    """The tensor as Hugging Face has it: one, or one for each expert of a stack."""
    part = layer_part(tensor.name.rpartition(".")[0])[1]
    if layout.expert_name(tensor.name, 0) is not None:
        for expert in range(tensor.shape[0]):
            offset, row_bytes = tensor.offset + expert * tensor.row_bytes, tensor.row_bytes // tensor.shape[1]
            one = replace(tensor, shape=tensor.shape[1:], offset=offset, row_bytes=row_bytes)
            yield _plain(one, layout.expert_name(tensor.name, expert) or "")
        return
    source = _plain(tensor, layout.hugging_face_name(tensor.name))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if layout.is_interleaved and part in heads:
        yield _permuted(tensor, source, heads[part])
    elif layout.is_norm_offset and tensor.name.endswith("norm.weight"):
        yield replace(source, read_rows=lambda start, stop: tensor.read_rows(start, stop) - np.ones((), tensor.dtype))
    else:
        yield source


def _plain(tensor: GGUFTensor, name: str) -> SourceTensor:
    return SourceTensor(name, tensor.shape, tensor.dtype, tensor.type_name, tensor.num_bytes, tensor.read_rows)


def _permuted(tensor: GGUFTensor, source: SourceTensor, num_heads: int) -> SourceTensor:
    num_rows = tensor.shape[0]
    if num_rows % (2 * num_heads):
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} has {num_rows} rows, which is not an even number for each of {num_heads} heads."
        )
    head_dim = num_rows // num_heads

    def read_rows(start: int, stop: int) -> np.ndarray:
        rows = tensor.read_rows(start, stop)
        pairs = rows.reshape((stop - start) // head_dim, head_dim // 2, 2, *rows.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    return replace(source, read_rows=read_rows, row_multiple=head_dim)
