"""Builds a C++ source of this package on first use, and loads it.

The library lies in the user's cache, named after everything that decides its contents: source, compiler, flags, the CPU and the
FFI headers. A machine without a compiler, or a build that fails, is not an error here: `NativeUnavailable` says why and the
caller takes another implementation. Knows no operation; see `paged_attention.cpu_native`.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

FLAGS = (
    "-std=gnu++20",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fPIC",
    "-shared",
    "-pthread",
    "-w",
)
"""No -ffast-math: it may assume that there is no NaN and no infinity, and the kernels rely on both."""
BUILD_TIMEOUT_S = 300


class NativeUnavailable(Exception):
    """Why native code cannot run on this machine."""


def load_library(source: Path) -> tuple[ctypes.CDLL, str]:
    """The library built from `source`, and a short hash of what it was built from. Raises NativeUnavailable.

    Two processes that start together build once: the second waits at a lock, then finds the file.
    """
    try:
        compiler = _compiler()
        digest = _digest(source, compiler)
        directory = _cache_directory()
        path = directory / f"{source.stem}-{digest}.so"
        if not path.exists():
            with open(directory / f"{source.stem}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    _build(source, compiler, path)
        return ctypes.CDLL(str(path)), digest
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home directory
        raise NativeUnavailable(f"cannot build or load {source.name}: {error}") from error


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        if path := shutil.which(name):
            return path
    raise NativeUnavailable("no C++ compiler: install g++ or clang++, or set CXX")


def _cache_directory() -> Path:
    root = os.environ.get("JAXSERVE_CACHE")
    base = Path(root).expanduser() if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve"
    directory = base / "native"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # What lies here is loaded as code, so nobody else may be able to put something here.
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NativeUnavailable(f"{directory} must belong to you and be writable by nobody else: chmod 700 it, or set JAXSERVE_CACHE")
    return directory


def _digest(source: Path, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=BUILD_TIMEOUT_S).stdout
    parts = (source.read_bytes(), version, " ".join(FLAGS).encode(), _cpu().encode(), jax.lib.__version__.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cpu() -> str:
    """What -march=native looks at: a cache on a shared disk must not hand one machine's code to another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def _build(source: Path, compiler: str, path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False) as target:
        temporary = Path(target.name)
    try:
        command = [compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", str(source), "-o", str(temporary)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=BUILD_TIMEOUT_S)
        if done.returncode:
            raise NativeUnavailable(f"{compiler} could not build {source.name}: {_first_error(done.stderr)}")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _first_error(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
