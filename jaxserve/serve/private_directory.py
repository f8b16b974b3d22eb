"""The directory of one running server: its sockets, and what its front ends count together. Only this user can enter it.

It is locked for as long as the server lives. A server that was killed cannot remove its directory; the next one does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxserve.errors import ConfigError

_NAME = re.compile(r"jaxserve-(\d+)-\w+")
MAX_PATH_BYTES = 88
"""A Unix socket in the directory must have a name of at most 107 bytes (103 on macOS)."""


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Makes the directory for the block, named after this process, and removes those of servers that are dead.

    Raises ConfigError where it cannot be made.
    """
    sweep(Path(tempfile.gettempdir()))
    try:
        path = Path(tempfile.mkdtemp(prefix=f"jaxserve-{os.getpid()}-"))
    except OSError as error:
        raise ConfigError(f"cannot make a directory for sockets: {error}; set TMPDIR to one that can be written.") from None
    try:
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise ConfigError(f"TMPDIR is too long for sockets: {path} has more than {MAX_PATH_BYTES} bytes; set it to a shorter one.")
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield path
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Removes the directories of this user's servers that are dead; follows no links."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            found = _NAME.fullmatch(entry.name)
            with contextlib.suppress(OSError):
                if found and _is_ours(entry) and not _is_alive(int(found[1])) and not _is_locked(entry.path):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_locked(path: str) -> bool:
    """Whether a server holds it: its process id may mean nothing here when it runs in another container that shares the directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
