"""Reads a Hugging Face directory: config.json, safetensors (single or sharded) and the small files beside them.

The headers are parsed and checked here, before anything is written: every tensor must lie inside its file and have the bytes its
shape and type ask for. Pickled weights are never opened, since unpickling can run code. Knows nothing of models; the format is
described at https://huggingface.co/docs/safetensors. Go on to `match.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.convert.source import Source, SourceTensor, listed, read_exactly
from jaxserve.convert.tokenizer_files import convert_tokenizer
from jaxserve.errors import CheckpointError

SMALL_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Copied as they are where they exist."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

_MAX_HEADER_BYTES = 100_000_000


def read_directory(path: Path) -> Source:
    """The checkpoint in a Hugging Face directory.

    Raises:
        CheckpointError: No config.json or weights, only pickled weights, or a damaged file, each named.
    """
    if not (path / "config.json").exists() and (hint := _gguf_hint(path)):
        raise CheckpointError(f"{path} holds no config.json; {hint}")
    config = read_json_object(path / "config.json", what="a Hugging Face checkpoint")
    files, expected = _weight_files(path)
    tensors: dict[str, SourceTensor] = {}
    for file in files:
        for tensor in read_header(file):
            if tensor.name in tensors:
                raise CheckpointError(f"{file}: tensor {tensor.name} is also in another file of {path}.")
            tensors[tensor.name] = tensor
    lost = [f"{name} ({file})" for name, file in expected.items() if name not in tensors]
    if lost:
        raise CheckpointError(f"{path}: the index names tensors that its files do not hold: {listed(lost)}. Download the files again.")
    small_files = {name: (path / name).read_bytes() for name in SMALL_FILES if (path / name).is_file()}
    objects = {name: read_json_object(path / name, what="complete") for name in small_files if name.endswith(".json")}
    if "model" not in objects.get("tokenizer.json", {"model": None}):
        raise CheckpointError(f"{path / 'tokenizer.json'} has no model: it is not a tokenizer. Download the file again.")
    if "tokenizer.json" not in small_files:
        small_files |= convert_tokenizer(path, config)
    notes = () if "tokenizer.json" in small_files else ("no tokenizer.json: text cannot be encoded, only token ids can be served",)
    return Source("safetensors", tuple(files), config, tensors, small_files, notes)


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """A JSON file that must hold an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} holds no {path.name}: it is not {what}.") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def _weight_files(path: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The files to read, and for a sharded checkpoint which tensor its index expects in which file."""
    single = path / "model.safetensors"
    if single.is_file():
        return [single], {}
    index_path = path / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = read_json_object(index_path, what="a sharded checkpoint").get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) and Path(name).name == name for name in weight_map.values()):
            raise CheckpointError(f"{index_path}: weight_map must map tensors to file names of the same directory.")
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise CheckpointError(f"{path} lacks {len(missing)} of {len(names)} files that its index names: {listed(missing)}.")
        return [path / name for name in names], weight_map
    raise CheckpointError(_no_weights(path))


def _no_weights(path: Path) -> str:
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in PICKLED)
    if pickled:
        return pickle_message(f"{path} holds only pickled weights ({listed(pickled)})")
    if hint := _gguf_hint(path):
        return f"{path} holds no safetensors; {hint}"
    if (path / "adapter_config.json").exists():
        return f"{path} is a LoRA adapter, not a model; convert its base model."
    others = sorted(file.name for file in path.glob("*.safetensors"))
    return f"{path} holds neither model.safetensors nor model.safetensors.index.json" + (f", only {listed(others)}." if others else ".")


def _gguf_hint(path: Path) -> str:
    """What to give instead of a directory that holds GGUF files; empty where there are none."""
    gguf = sorted(path.glob("*.gguf"))
    return f"to convert a GGUF file, name it: {gguf[0]}" if gguf else ""


def pickle_message(found: str) -> str:
    """Why pickled weights are refused, and what to do."""
    return (
        f"{found}, which jaxserve never reads because unpickling can run code. Use a revision of the checkpoint with safetensors, "
        f"or save it again with transformers' save_pretrained."
    )


def read_header(path: Path) -> list[SourceTensor]:
    """The tensors of one safetensors file, each checked against the file's size."""
    file_bytes = path.stat().st_size
    if file_bytes < 8:
        raise CheckpointError(f"{path} is not a safetensors file, or is truncated: it has {file_bytes} bytes.")
    header_bytes = int(read_exactly(path, 0, 8).view("<u8")[0])
    if not 2 <= header_bytes <= _MAX_HEADER_BYTES:
        raise CheckpointError(f"{path} is not a safetensors file: its header claims {header_bytes} bytes (limit {_MAX_HEADER_BYTES}).")
    if 8 + header_bytes > file_bytes:
        raise CheckpointError(f"{path} is truncated: its header has {header_bytes} bytes, the file {file_bytes}. Download it again.")
    try:
        header = json.loads(read_exactly(path, 8, header_bytes).tobytes())
        header.pop("__metadata__", None)
        entries = [(name, str(e["dtype"]), tuple(map(int, e["shape"])), *map(int, e["data_offsets"])) for name, e in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} has a corrupt header: {error!r}. Download it again.") from error
    data_bytes = max((entry[4] for entry in entries), default=0)
    if 8 + header_bytes + data_bytes > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: {8 + header_bytes + data_bytes} bytes are needed, it has {file_bytes}. Download it again."
        )
    return [_tensor(path, 8 + header_bytes, *entry) for entry in entries]


def _tensor(path: Path, data_start: int, name: str, type_name: str, shape: tuple[int, ...], start: int, stop: int) -> SourceTensor:
    if type_name not in _DTYPES:
        raise CheckpointError(f"{path}: tensor {name} has type {type_name}, which is not supported; supported: {', '.join(_DTYPES)}.")
    dtype = _DTYPES[type_name]
    num_bytes = math.prod(shape) * dtype.itemsize
    if start < 0 or min(shape, default=1) < 0 or stop - start != num_bytes:
        raise CheckpointError(
            f"{path} is corrupt: tensor {name} ({type_name} {list(shape)}) needs {num_bytes} bytes, its header says {start} to {stop}."
        )
    read_rows = partial(_read_rows, path, data_start + start, dtype, shape)
    return SourceTensor(name, shape, dtype, type_name, num_bytes, read_rows)


def _read_rows(path: Path, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], start: int, stop: int) -> np.ndarray:
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    return read_exactly(path, offset + start * row_bytes, (stop - start) * row_bytes).view(dtype).reshape(stop - start, *shape[1:])
