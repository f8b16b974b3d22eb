"""From what a user calls a model to the path of a converted checkpoint, converting at most once.

Converted checkpoints are kept under `$JAXSERVE_CACHE` (else `$XDG_CACHE_HOME/jaxserve`, else `~/.cache/jaxserve`), keyed by what
the source is, the dtype and the format version. Of several processes one converts under a file lock, the others wait for it. The
conversion runs in a process of its own: it loads JAX, which a caller such as the front end must not have, and its memory goes
back to the machine when it ends. Knows no format; go on to `pipeline.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from jaxserve.checkpoint import FORMAT_VERSION, is_checkpoint, open_checkpoint
from jaxserve.config import cache_dir
from jaxserve.convert.hub import download, is_hub_id
from jaxserve.convert.read_safetensors import SMALL_FILES
from jaxserve.convert.tokenizer_files import SOURCES
from jaxserve.errors import ERROR_PREFIX, CheckpointError
from jaxserve.logs import announce


def resolve_model(
    model: str | Path, *, revision: str | None = None, dtype: str = "auto", progress: Callable[[str], None] | None = None
) -> Path:
    """The converted checkpoint of a model.

    Args:
        model: A converted checkpoint (returned as it is), a Hugging Face directory, a GGUF file, or a hub id.
        revision: Branch, tag or commit of a hub id.
        dtype: Of the converted weights: bfloat16, float16, float32, or auto for the stored types.
        progress: Takes lines about a download, a wait or a conversion; None prints the conversion's on stderr.

    Raises:
        CheckpointError: No such model, or it cannot be converted.
        ConfigError: The cache directory cannot be made.
    """
    if not str(model):
        raise CheckpointError("the model's name is empty: give a converted checkpoint, a Hugging Face directory, a GGUF file or a hub id.")
    path = Path(model).expanduser()
    if is_checkpoint(path):
        return path
    arguments = ["--dtype", dtype]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    if path.exists():
        if revision is not None:
            raise CheckpointError(f"revision {revision} is for hub ids, but {model} is a path.")
        source, name, identity = str(path.resolve()), path.resolve().stem, _path_identity(path.resolve())
    elif is_hub_id(str(model)):
        source, name = str(model), str(model).replace("/", "--")
        _, commit = download(source, revision)
        identity = json.dumps([source, commit])
        # What is downloaded now is what is converted.
        arguments += ["--revision", commit]
        environment["HF_HUB_OFFLINE"] = "1"
    else:
        raise CheckpointError(f"{model} does not exist, and is not a hub id such as org/name.")
    key = hashlib.sha256(json.dumps([identity, dtype, FORMAT_VERSION]).encode()).hexdigest()[:16]
    directory = cache_dir() / "checkpoints"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    destination = directory / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{key}"
    _convert_once(source, destination, arguments, environment, progress)
    return destination


def _path_identity(path: Path) -> str:
    """What a path holds, without reading it: the files that matter, with size and time of last change."""
    if path.is_dir():
        patterns = ("config.json", "model.safetensors.index.json", "*.safetensors", *SMALL_FILES, *SOURCES)
        files = sorted({file for pattern in patterns for file in path.glob(pattern)})
    else:
        files = [path]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return json.dumps([str(path), stats])


def _convert_once(
    source: str, destination: Path, arguments: list[str], environment: dict[str, str], progress: Callable[[str], None] | None
) -> None:
    """Converts unless `destination` is a readable checkpoint, once among all processes."""
    from filelock import FileLock, Timeout

    if _is_readable(destination):
        return
    lock = FileLock(f"{destination}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress is not None:
            progress(f"another process is converting {source}; waiting for it")
        lock.acquire()
    try:
        if not _is_readable(destination):
            # Left by processes that were killed; nobody else is here.
            for leftover in (destination, *destination.parent.glob(f".{destination.name}.*")):
                shutil.rmtree(leftover, ignore_errors=True)
            _run_conversion(source, destination, arguments, environment, progress)
    finally:
        lock.release()


def _is_readable(destination: Path) -> bool:
    try:
        open_checkpoint(destination)
    except (CheckpointError, OSError):
        return False
    return True


def _run_conversion(
    source: str, destination: Path, arguments: list[str], environment: dict[str, str], progress: Callable[[str], None] | None
) -> None:
    # -P: the caller's directory is not on the path, so a file there cannot stand in for a module.
    command = [sys.executable, "-P", "-m", "jaxserve.convert", source, str(destination), *arguments]
    show = progress or announce
    lines: list[str] = []
    with subprocess.Popen(command, env=_importable(environment), stderr=subprocess.PIPE, text=True, errors="replace") as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(line.rstrip("\n"))
                if not line.startswith(ERROR_PREFIX):  # raised below
                    show(lines[-1])
            status = process.wait()
        finally:
            process.terminate()
    if status != 0:
        errors = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
        raise CheckpointError(errors[-1] if errors else f"converting {source} ended with status {status}: {' / '.join(lines[-5:])}")


def _importable(environment: dict[str, str]) -> dict[str, str]:
    """The environment in which a child finds this very jaxserve, also when it is run from a source tree."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
