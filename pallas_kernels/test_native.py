"""Building native code: once, into a private place, with a reason when it cannot be."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pallas_kernels import native
from pallas_kernels.paged_attention import cpu_native

needs_compiler = pytest.mark.skipif(cpu_native.unavailable_reason() is not None, reason="no C++ compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cc"
    path.write_text('extern "C" int answer() { return 42; }')
    return path


@needs_compiler
def test_builds_once_into_a_private_directory(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, digest = native.load_library(source)
    assert library.answer() == 42
    assert cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("built twice"))
    assert native.load_library(source)[1] == digest
    assert [path.name for path in cache.glob("*.so")] == [f"answer-{digest}.so"]
    assert not list(cache.glob("*.tmp"))


@needs_compiler
def test_a_changed_source_is_another_library(cache: Path, source: Path) -> None:
    _, before = native.load_library(source)
    source.write_text('extern "C" int answer() { return 43; }')
    library, after = native.load_library(source)
    assert before != after
    assert library.answer() == 43


@needs_compiler
def test_who_comes_second_waits_for_the_first_build(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is a file's, so two threads stand for two processes."""
    build, builds = native._build, []

    def slow_build(*args: Any) -> None:
        builds.append(args)
        time.sleep(0.2)
        build(*args)

    monkeypatch.setattr(native, "_build", slow_build)
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda _: native.load_library(source)[0].answer(), range(2)))
    assert answers == [42, 42]
    assert len(builds) == 1


@needs_compiler
def test_source_that_does_not_compile_gives_the_compilers_words(cache: Path, source: Path) -> None:
    source.write_text("int answer( {")
    with pytest.raises(native.NativeUnavailable, match=r"could not build answer\.cc: .*error"):
        native.load_library(source)
    assert not list(cache.glob("*.tmp"))


@needs_compiler
def test_refuses_a_cache_that_others_can_write(cache: Path, source: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(native.NativeUnavailable, match="writable by nobody else"):
        native.load_library(source)


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(native.NativeUnavailable, match=r"no C\+\+ compiler: install g\+\+ or clang\+\+, or set CXX"):
        native.load_library(cpu_native.SOURCE)
