"""The order of a conversion: find, check everything, then write beside the destination and rename.

Nothing is written before config, tensors, tokenizer and disk space were checked, and a failure leaves nothing behind. Knows no
format; the steps are in the modules named in the package's docstring.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from jaxserve.checkpoint import DTYPES, FORMAT_VERSION, MANIFEST_NAME, IgnoredTensors, Manifest, SourceFile, TensorEntry, is_checkpoint
from jaxserve.checkpoint_report import size
from jaxserve.convert.hub import download, is_hub_id
from jaxserve.convert.match import match_tensors
from jaxserve.convert.mxfp4 import unpacked
from jaxserve.convert.read_gguf import read_gguf
from jaxserve.convert.read_safetensors import PICKLED, pickle_message, read_directory
from jaxserve.convert.source import Source, SourceTensor
from jaxserve.convert.write_orbax import Item, write_weights
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import family_of, resolve_spec, text_config
from jaxserve.models.spec import ModelSpec
from jaxserve.models.tensors import ignored_patterns, logical_tensors

_STORED_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}


class Progress(Protocol):
    """Told of a conversion's course: lines worth keeping, and the bytes written so far."""

    def note(self, line: str) -> None:
        """One line for the user."""

    def advance(self, done_bytes: int, total_bytes: int, name: str) -> None:
        """`done_bytes` of `total_bytes` are written; `name` is the tensor being written."""


class Silent:
    """Progress that nobody watches."""

    def note(self, line: str) -> None:
        """Drops the line."""

    def advance(self, done_bytes: int, total_bytes: int, name: str) -> None:
        """Drops the figures."""


@dataclass(frozen=True, slots=True)
class _Located:
    """Where the source lies, what the manifest calls it, and the hub commit."""

    path: Path
    name: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    """A conversion that was checked and can be written."""

    located: _Located
    source: Source
    spec: ModelSpec
    items: Sequence[Item]
    ignored: Sequence[IgnoredTensors]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Converts a checkpoint to Orbax.

    Args:
        src: A Hugging Face directory, a GGUF file or a hub id.
        dst: Directory to make.
        dtype: bfloat16, float16 or float32; auto keeps each tensor's stored type (float32 where it was quantized).
        revision: Branch, tag or commit of a hub id.
        overwrite: Replace `dst` if it is a converted checkpoint.
        progress: Told of the course.

    Raises:
        CheckpointError: Whatever is wrong with source, destination or disk, with what to do.
    """
    dst, progress = Path(os.path.abspath(dst)), progress or Silent()  # tensorstore takes no path with `..` in it
    _check_destination(dst, overwrite)
    job = _prepare(_locate(str(src), revision), dtype)
    for line in job.source.notes:
        progress.note(line)
    for left in job.ignored:
        progress.note(f"left out on purpose: {left.count} tensors, {size(left.num_bytes)}, matching {left.pattern}")
    _write(job, dst, overwrite, progress)


def _check_destination(dst: Path, overwrite: bool) -> None:
    if not (dst.exists() or dst.is_symlink()):
        return
    if not overwrite:
        raise CheckpointError(f"{dst} exists; --overwrite replaces it.")
    if not is_checkpoint(dst):
        raise CheckpointError(f"{dst} exists and is not a converted checkpoint, so it is not overwritten; name another place.")


def _locate(src: str, revision: str | None) -> _Located:
    path = Path(src).expanduser()
    if path.exists():
        if revision is not None:
            raise CheckpointError(f"--revision {revision} is for hub ids, but {src} is a path.")
        return _Located(path, str(path.resolve()))
    if is_hub_id(src):
        path, commit = download(src, revision)
        return _Located(path, src, commit)
    raise CheckpointError(f"{src} does not exist, and is not a hub id such as org/name.")


def _prepare(located: _Located, dtype: str) -> _Job:
    """Reads headers and small files, and checks that they make a model that can be served."""
    try:
        source = _read(located.path)
    except OSError as error:
        raise CheckpointError(f"{located.name} cannot be read: {error}") from error
    if (method := text_config(source.config).get("quantization_config", source.config.get("quantization_config"))) is not None:
        kind = method.get("quant_method") if isinstance(method, Mapping) else method
        if kind != "mxfp4":
            raise CheckpointError(f"{located.name} is quantized ({kind}), which is not supported; supported: none, mxfp4 and GGUF's types.")
        source = unpacked(source)
    spec = resolve_spec(source.config)
    family = family_of(spec)
    pairs, ignored = match_tensors(logical_tensors(family, spec), source.tensors, ignored_patterns(family, spec))
    items = [Item(wanted.name, _target_dtype(tensor, dtype), tensor) for wanted, tensor in pairs]
    return _Job(located, source, spec, items, ignored, dtype)


def _read(path: Path) -> Source:
    if is_checkpoint(path):
        raise CheckpointError(f"{path} is already converted; convert its source to change it.")
    if path.is_dir():
        return read_directory(path)
    if path.suffix in PICKLED:
        raise CheckpointError(pickle_message(f"{path} is a pickled file"))
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is one file of a checkpoint; name its directory, {path.parent}, which must hold config.json too.")
    return read_gguf(path)


def _target_dtype(tensor: SourceTensor, dtype: str) -> str:
    if tensor.stored_type not in _STORED_DTYPES and tensor.dtype.name != "float32":
        raise CheckpointError(f"Tensor {tensor.name} is stored as {tensor.stored_type}, which is no plain float; it is not supported.")
    return dtype if dtype != "auto" else _STORED_DTYPES.get(tensor.stored_type, "float32")


def _write(job: _Job, dst: Path, overwrite: bool, progress: Progress) -> None:
    """Writes beside `dst`, then renames."""
    scratch = dst.parent / f".{dst.name}.tmp-{os.getpid()}"
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        _check_disk_space(dst.parent, job.num_bytes + sum(map(len, job.source.small_files.values())))
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        progress.note(f"converting {job.located.name}: {len(job.items)} tensors, {size(job.num_bytes)}" + _shrink_hint(job.items))
        files = _write_and_hash(scratch / "weights", job.source.files, job.items, _counter(job.num_bytes, progress))
        _write_small_files(scratch, job)
        (scratch / MANIFEST_NAME).write_text(_manifest(job, files).to_json(), encoding="utf-8")
        os.sync()
        _check_destination(dst, overwrite)  # another process may have made it meanwhile
        _move_into_place(scratch, dst)
    except OSError as error:
        raise CheckpointError(f"{dst} cannot be written: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _counter(total: int, progress: Progress) -> Callable[[Item, int], None]:
    done = 0

    def on_written(item: Item, num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress.advance(done, total, item.name)

    return on_written


def _shrink_hint(items: Sequence[Item]) -> str:
    is_dequantized = any(item.source.stored_type not in _STORED_DTYPES and item.dtype == "float32" for item in items)
    return " (quantized tensors become float32, which is exact; `jaxserve convert --dtype bfloat16` halves that)" if is_dequantized else ""


def _check_disk_space(directory: Path, needed: int) -> None:
    """Room for the arrays (padding of chunks and file system blocks: 1 % and 16 MiB) and the small files."""
    needed = needed + needed // 100 + (16 << 20)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(
            f"{directory} has {size(free)} free, {size(needed)} are needed. Free some, convert elsewhere, or use a smaller --dtype."
        )


def _write_and_hash(
    path: Path, files: Sequence[Path], items: Sequence[Item], on_written: Callable[[Item, int], None]
) -> tuple[SourceFile, ...]:
    """Writes the arrays while another thread hashes the source files."""
    is_stopped = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        try:
            hashes = pool.submit(_hash_files, files, is_stopped)
            write_weights(path, items, on_written)
            return hashes.result()
        except BaseException:
            is_stopped.set()  # leaving the pool waits for the thread
            raise


def _hash_files(files: Sequence[Path], is_stopped: threading.Event) -> tuple[SourceFile, ...]:
    result = []
    for path in files:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while not is_stopped.is_set() and (block := file.read(4 << 20)):
                digest.update(block)
        result.append(SourceFile(path.name, path.stat().st_size, digest.hexdigest()))
    return tuple(result)


def _write_small_files(directory: Path, job: _Job) -> None:
    config, small_files = dict(job.source.config), job.source.small_files
    if job.dtype != "auto":
        config = _with_dtype(config, job.dtype)
        if isinstance(config.get("text_config"), Mapping):
            config["text_config"] = _with_dtype(config["text_config"], job.dtype)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name, content in small_files.items():
        (directory / name).write_bytes(content)
    if "generation_config.json" not in small_files:
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
        (directory / "generation_config.json").write_text(json.dumps(ids, indent=2), encoding="utf-8")


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")} | {"dtype": dtype}


def _manifest(job: _Job, files: tuple[SourceFile, ...]) -> Manifest:
    items = job.items
    by_dtype = {dtype: sum(item.num_bytes for item in items if item.dtype == dtype) for dtype in DTYPES}
    tensors = {
        item.name: TensorEntry(item.source.shape, item.dtype, item.num_bytes, item.source.name, item.source.stored_type) for item in items
    }
    try:
        created_by = f"jaxserve {version('jaxserve')}"
    except PackageNotFoundError:  # run from a source tree that is not installed
        created_by = "jaxserve"
    return Manifest(
        format_version=FORMAT_VERSION,
        created_by=created_by,
        layout="logical",
        quantization="none",
        family=job.spec.family,
        model_type=job.spec.model_type,
        architectures=job.spec.architectures,
        dtype=max(by_dtype, key=lambda name: by_dtype[name]),
        num_tensors=len(items),
        num_parameters=sum(item.source.size for item in items),
        num_bytes=job.num_bytes,
        source=job.located.name,
        source_kind=job.source.kind,
        revision=job.located.revision,
        source_files=files,
        ignored=tuple(job.ignored),
        tensors=tensors,
    )


def _move_into_place(scratch: Path, dst: Path) -> None:
    """Renames; an old checkpoint is moved aside first, since a directory that is not empty cannot be replaced in one step."""
    if not dst.exists():
        scratch.rename(dst)
        return
    old = dst.parent / f".{dst.name}.old-{os.getpid()}"
    dst.rename(old)
    try:
        scratch.rename(dst)
    except OSError:
        with suppress(OSError):
            old.rename(dst)
        raise
    shutil.rmtree(old, ignore_errors=True)
