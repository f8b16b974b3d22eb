"""The directory of a server: its own, and those that killed servers left."""

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.serve.private_directory import private_directory, sweep


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def make(path: Path) -> Path:
    path.mkdir()
    (path / "engine.sock").touch()
    return path


def test_only_this_user_can_enter_it_and_it_is_gone_afterwards(tmp_path, monkeypatch, dead_pid):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left_behind = make(tmp_path / f"jaxserve-{dead_pid}-abc")
    with private_directory() as directory:
        assert directory.name.startswith(f"jaxserve-{os.getpid()}-")
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert not left_behind.exists()
        (directory / "engine.sock").touch()
    assert not list(tmp_path.iterdir())


def test_what_lives_or_is_not_ours_is_left_alone(tmp_path, dead_pid):
    kept = [make(tmp_path / name) for name in (f"jaxserve-{os.getpid()}-abc", f"other-{dead_pid}-abc", "jaxserve-x")]
    target = make(tmp_path / "target")
    link = tmp_path / f"jaxserve-{dead_pid}-link"
    link.symlink_to(target)
    sweep(tmp_path)
    assert all((path / "engine.sock").exists() for path in (*kept, target, link))


def test_links_inside_are_removed_and_not_followed(tmp_path, dead_pid):
    target = make(tmp_path / "target")
    stale = make(tmp_path / f"jaxserve-{dead_pid}-abc")
    (stale / "link").symlink_to(target)
    sweep(tmp_path)
    assert not stale.exists()
    assert (target / "engine.sock").exists()


def test_a_locked_one_belongs_to_a_server_of_another_container(tmp_path, dead_pid):
    path = make(tmp_path / f"jaxserve-{dead_pid}-abc")
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    sweep(tmp_path)
    assert path.exists()
    os.close(descriptor)
    sweep(tmp_path)
    assert not path.exists()


def test_a_path_too_long_for_sockets_is_told(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match="TMPDIR is too long"):
        private_directory().__enter__()
    assert not list(long.iterdir())
