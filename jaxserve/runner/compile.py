"""Compiles every program before the first request, keeps them between starts, and notices a compile that comes later.

Knows neither what the programs compute nor when steps run. Next: `runner.runner`, which lowers them and calls them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.config import EngineConfig, cache_dir
from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

Lower = Callable[[], Any]
"""Lowers one program by shapes alone; the result has `.compile()`."""
Progress = Callable[[int, int, float], None]
"""Called after each program with how many are done, how many there are, and the seconds that one took."""

MAX_COMPILE_THREADS = 8
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


def compile_all[K](programs: Mapping[K, Lower], progress: Progress | None = None, *, num_threads: int = 2) -> dict[K, Any]:
    """Lowers and compiles each program ahead of time. Returns the executables by the same keys, in the same order.

    Lowering is Python and runs one at a time; what XLA compiles meanwhile runs beside it, on `num_threads` threads (at most 8).
    The first error is raised, after what was running has ended.
    """

    def build(lower: Lower) -> tuple[Any, float]:
        started = time.perf_counter()
        return lower().compile(), time.perf_counter() - started

    compiled: dict[K, Any] = {}
    with ThreadPoolExecutor(max_workers=max(1, min(num_threads, MAX_COMPILE_THREADS)), thread_name_prefix="compile") as pool:
        futures = {pool.submit(build, lower): key for key, lower in programs.items()}
        try:
            for i, future in enumerate(as_completed(futures), start=1):
                compiled[futures[future]], seconds = future.result()
                if progress is not None:
                    progress(i, len(programs), seconds)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {key: compiled[key] for key in programs}


def set_up_compile_cache(config: EngineConfig) -> Path:
    """Makes JAX keep every compiled program on disk; returns the directory. Raises ConfigError when it cannot be made."""
    try:
        directory = Path(config.compilation_cache_dir).expanduser() if config.compilation_cache_dir else cache_dir() / "compile"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the compile cache: {error}. Set --compilation-cache-dir or JAXSERVE_CACHE.") from None
    if jax.config.jax_compilation_cache_dir != str(directory):
        jax.config.update("jax_compilation_cache_dir", str(directory))
        compilation_cache.reset_cache()  # JAX keeps the directory it saw first
    # Even the smallest program takes longer to compile than to load.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory


class CompileCounter:
    """Counts what JAX compiles in this process, from jax.monitoring.

    Attributes:
        num_compiles: Programs compiled or loaded from the persistent cache.
        num_cache_hits: Those that were loaded.
        late_compiles: Those made inside `watch`, where nothing may compile any more; each is an error in the log.
    """

    def __init__(self) -> None:
        self.num_compiles = 0
        self.num_cache_hits = 0
        self.late_compiles = 0
        self._lock = threading.Lock()
        self._thread = threading.local()
        monitoring.register_event_duration_secs_listener(self._on_duration)
        monitoring.register_event_listener(self._on_event)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Any compile by this thread inside is late. Another thread's is not: it may be another engine, or the user's own JAX."""
        self._thread.is_watched = True
        try:
            yield
        finally:
            self._thread.is_watched = False

    def close(self) -> None:
        """Stops counting."""
        monitoring.unregister_event_duration_listener(self._on_duration)
        monitoring.unregister_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event != _COMPILE_EVENT:
            return
        is_late = getattr(self._thread, "is_watched", False)
        with self._lock:
            self.num_compiles += 1
            self.late_compiles += is_late
        if is_late:
            # The stack shows which call did it; its shapes or dtypes are not those of a warmed-up program.
            logger.error("compiled %s during a step (%.2f s)", kwargs.get("fun_name", "a program"), duration_secs, stack_info=True)

    def _on_event(self, event: str, **kwargs: str | int) -> None:
        if event == _CACHE_HIT_EVENT:
            with self._lock:
                self.num_cache_hits += 1
