"""A trace of this process by jax.profiler, started and stopped by clients that may do so. Is given JAX, imports none.

Read the result with xprof or TensorBoard, or at ui.perfetto.dev. Next: `engine.link_server`, which calls it.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Protocol

from jaxserve.errors import InvalidRequest

logger = logging.getLogger(__name__)


class Tracer(Protocol):
    """The part of the module jax.profiler that is used."""

    def start_trace(self, log_dir: str, /) -> None:
        """Begins to record into the directory."""

    def stop_trace(self) -> None:
        """Writes what was recorded."""


class Profiler:
    """At most one trace at a time, since there is one for a whole process. Both methods block while files are written.

    Args:
        tracer: jax.profiler; None in a process that cannot be traced.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self._lock = threading.Lock()
        self._directory: str | None = None

    def start(self, directory: str) -> None:
        """Starts a trace into a directory, which is made where it is missing. InvalidRequest when one runs already or it cannot be made."""
        with self._lock:
            if self._directory is not None:
                raise InvalidRequest(f"a trace into {self._directory} is running; stop it first.")
            if not directory:
                raise InvalidRequest("no directory is given; name one on the engine's machine.", param="directory")
            if self._tracer is None:
                raise InvalidRequest("this engine has no profiler.")
            try:
                Path(directory).mkdir(parents=True, exist_ok=True)
                self._tracer.start_trace(directory)
            except (OSError, RuntimeError) as error:
                raise InvalidRequest(f"cannot trace into {directory}: {error}", param="directory") from error
            self._directory = directory
            logger.info("tracing into %s", directory)

    def stop(self) -> str:
        """Ends the trace and returns its directory. InvalidRequest when none runs."""
        with self._lock:
            if self._tracer is None or self._directory is None:
                raise InvalidRequest("no trace is running; start one first.")
            directory, self._directory = self._directory, None
            self._tracer.stop_trace()
            logger.info("the trace in %s is complete", directory)
            return directory
