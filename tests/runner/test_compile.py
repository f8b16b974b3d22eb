"""Ahead-of-time compilation, the persistent cache, and counting compiles."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runner.compile import CompileCounter, compile_all, set_up_compile_cache


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    counter = CompileCounter()
    yield counter
    counter.close()


@pytest.fixture
def cache_settings() -> Iterator[None]:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
    saved = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in saved.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def lowering(size: int) -> Any:
    def scale(x: jax.Array) -> jax.Array:
        return x * size + 1

    return lambda: jax.jit(scale).lower(jax.ShapeDtypeStruct((size,), jnp.float32))


def test_every_program_is_compiled_and_told(counter: CompileCounter) -> None:
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int, seconds: float) -> None:
        assert seconds > 0
        told.append((done, total))

    programs = compile_all({size: lowering(size) for size in (3, 1, 2)}, progress)
    assert list(programs) == [3, 1, 2]
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert counter.num_compiles == 3
    for size, program in programs.items():
        assert program(jnp.ones(size)).tolist() == [size + 1] * size


def test_the_first_error_is_raised_and_the_rest_dropped() -> None:
    started: list[int] = []

    def failing() -> Any:
        raise ValueError("cannot lower")

    def counted() -> Any:
        started.append(1)
        return lowering(2)()

    with pytest.raises(ValueError, match="cannot lower"):
        compile_all({0: failing, **dict.fromkeys(range(1, 50), counted)}, num_threads=1)
    assert len(started) < 49


def test_a_second_start_loads_from_the_cache(tmp_path: Path, counter: CompileCounter, cache_settings: None) -> None:
    for _ in range(2):
        directory = set_up_compile_cache(EngineConfig(model="m", compilation_cache_dir=str(tmp_path / "compiled")))
        compile_all({5: lowering(5)})
    assert counter.num_cache_hits == 1
    assert directory.stat().st_mode & 0o777 == 0o700
    assert any(directory.iterdir())


def test_a_cache_that_cannot_be_made_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--compilation-cache-dir"):
        set_up_compile_cache(EngineConfig(model="m", compilation_cache_dir=str(tmp_path / "file" / "compiled")))


def test_only_a_watched_compile_is_late(counter: CompileCounter, caplog: pytest.LogCaptureFixture) -> None:
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    double_jit = jax.jit(double)
    double_jit(jnp.ones(3))
    with counter.watch():
        double_jit(jnp.ones(3))
        other = threading.Thread(target=lambda: double_jit(jnp.ones(7)))
        other.start()
        other.join()
    assert counter.late_compiles == 0
    x = jnp.ones(4)
    before = counter.num_compiles
    with counter.watch(), caplog.at_level(logging.ERROR):
        double_jit(x)
    assert counter.late_compiles == 1
    assert counter.num_compiles == before + 1
    assert "double" in caplog.text
    double_jit(jnp.ones(5))
    assert counter.late_compiles == 1
