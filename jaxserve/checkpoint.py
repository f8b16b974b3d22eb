"""A converted checkpoint on disk: its manifest, and a reader that gives one tensor at a time.

    weights/                an Orbax checkpoint: one array per logical tensor, unfused, raw chunks of rows
    config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja (if any)
    manifest.json           what this file's `Manifest` says

Written by `jaxserve.convert`; read by `jaxserve.models.load`, described for people by `checkpoint_report.py`. Imports no JAX:
the arrays are read by tensorstore, which Orbax itself reads them with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
ARRAYS = Path("weights", "state")
"""Where the arrays lie: `state` is the name Orbax gives a saved tree."""

DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One logical tensor: its shape, dtype and bytes here, the name and type it had in the source."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    source: str
    source_type: str


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One weight file that was read."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class IgnoredTensors:
    """Source tensors left out on purpose: the family's pattern, how many matched, and their bytes."""

    pattern: str
    count: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a converted checkpoint is and where it came from.

    Attributes:
        layout: `logical`: one array per tensor, unfused, in Hugging Face's orientation.
        dtype: That of most bytes; each tensor has its own in `tensors`.
        source: What was converted: a path, or a hub id with the commit in `revision`.
    """

    format_version: int
    created_by: str
    layout: str
    quantization: str
    family: str
    model_type: str
    architectures: tuple[str, ...]
    dtype: str
    num_tensors: int
    num_parameters: int
    num_bytes: int
    source: str
    source_kind: str
    revision: str | None
    source_files: tuple[SourceFile, ...]
    ignored: tuple[IgnoredTensors, ...]
    tensors: Mapping[str, TensorEntry]

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, path: Path) -> Manifest:
        """Parses manifest.json; CheckpointError if it is of another format version or damaged."""
        redo = "Convert the source again: jaxserve convert SRC DST --overwrite"
        try:
            value = json.loads(text)
            version = value["format_version"]
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}. {redo}") from error
        if version != FORMAT_VERSION:
            raise CheckpointError(f"{path} has format version {version}, this jaxserve reads {FORMAT_VERSION}. {redo}")
        try:
            tensors = {name: TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for name, entry in value["tensors"].items()}
            lists = {
                "architectures": tuple(value["architectures"]),
                "source_files": tuple(SourceFile(**entry) for entry in value["source_files"]),
                "ignored": tuple(IgnoredTensors(**entry) for entry in value["ignored"]),
            }
            return cls(**{**value, **lists, "tensors": tensors})
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}. {redo}") from error


class Checkpoint:
    """An open converted checkpoint. Small files are read when first asked for, tensors each time."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the family's order."""
        return tuple(self.manifest.tensors)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return self._json("config.json")

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json; empty where there is none."""
        return self._json("generation_config.json", is_optional=True)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a text: of config (a wrapper's text model too), generation config and tokenizer."""
        text_config = self.config.get("text_config")
        sources = [self.config, text_config if isinstance(text_config, dict) else {}, self.generation_config]
        ids: set[int] = set()
        for source in sources:
            value = source.get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
        token_id = self._tokenizer_eos()
        return frozenset(ids if token_id is None else ids | {token_id})

    @cached_property
    def num_token_ids(self) -> int | None:
        """Ids that the tokenizer has are below it; a model's vocabulary may be padded beyond them. None without a tokenizer."""
        vocab = self._tokenizer.get("model", {}).get("vocab") or ()
        ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
        ids += [entry["id"] for entry in self._tokenizer.get("added_tokens") or ()]
        ids += map(int, self._json("tokenizer_config.json", is_optional=True).get("added_tokens_decoder") or ())
        return max(ids) + 1 if vocab else None

    @cached_property
    def _tokenizer(self) -> dict[str, Any]:
        return self._json("tokenizer.json", is_optional=True)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor, as the manifest says. KeyError: the checkpoint has no such tensor."""
        return self.manifest.tensors[name].shape

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """One tensor as stored, or some of its rows; only the pieces on disk that hold them are read.

        Args:
            name: A logical name of `names`, such as `layers.0.self_attn.q_proj.weight`.
            rows: Start and stop along the first axis.

        Raises:
            KeyError: The checkpoint has no such tensor.
            CheckpointError: Its files are missing or damaged.
        """
        import tensorstore as ts

        entry = self.manifest.tensors[name]
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{self.path / ARRAYS / name}/"},
            # Without this a lost chunk reads as zeros.
            "fill_missing_data_reads": False,
        }
        try:
            store = ts.open(spec, open=True, read=True).result()
            if store.shape != entry.shape or store.dtype.numpy_dtype != DTYPES[entry.dtype]:
                raise ValueError(f"{store.dtype.name} {list(store.shape)}, the manifest says {entry.dtype} {list(entry.shape)}")
            return np.asarray((store if rows is None else store[rows.start : rows.stop]).read(order="C").result())
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read: {error}") from error

    def _json(self, name: str, *, is_optional: bool = False) -> dict[str, Any]:
        path = self.path / name
        if is_optional and not path.exists():
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}.")
        return value

    def _tokenizer_eos(self) -> int | None:
        """The id of tokenizer_config.json's `eos_token`."""
        config = self._json("tokenizer_config.json", is_optional=True)
        token = config.get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content is None:
            return None
        added = config.get("added_tokens_decoder") or {}
        for token_id, entry in added.items():
            if entry.get("content") == content:
                return int(token_id)
        ids = {entry["content"]: entry["id"] for entry in self._tokenizer.get("added_tokens") or []}
        vocab = self._tokenizer.get("model", {}).get("vocab")
        return ids.get(content, vocab.get(content) if isinstance(vocab, dict) else None)


def is_checkpoint(path: Path) -> bool:
    """Whether a path holds a converted checkpoint, of whatever format version."""
    return (path / MANIFEST_NAME).is_file()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a converted checkpoint; reads its manifest only.

    Raises:
        CheckpointError: There is none, or its format version is another.
    """
    path = Path(path)
    if not is_checkpoint(path):
        hint = "" if not path.exists() else f" Convert it first: jaxserve convert {path} DST"
        raise CheckpointError(
            f"{path} is not a converted checkpoint ({'no manifest.json' if path.exists() else 'it does not exist'}).{hint}"
        )
    manifest_path = path / MANIFEST_NAME
    try:
        text = manifest_path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise CheckpointError(f"{manifest_path} cannot be read: {error}") from error
    # tensorstore takes no path with `..` in it.
    return Checkpoint(Path(os.path.abspath(path)), Manifest.from_json(text, manifest_path))
