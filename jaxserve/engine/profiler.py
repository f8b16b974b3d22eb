"""A trace of this process by jax.profiler, started and stopped by clients that may do so. JAX is imported only when one starts.

Read the result with xprof or TensorBoard, or at ui.perfetto.dev. Next: `engine.link_server`, which calls it.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from jaxserve.errors import InvalidRequest

logger = logging.getLogger(__name__)


class Profiler:
    """At most one trace at a time, since there is one for a whole process. Both methods block while files are written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._directory: str | None = None

    def start(self, directory: str) -> None:
        """Starts a trace into a directory, which is made where it is missing. InvalidRequest when one runs already or it cannot be made."""
        from jax import profiler

        with self._lock:
            if self._directory is not None:
                raise InvalidRequest(f"a trace into {self._directory} is running; stop it first.")
            if not directory:
                raise InvalidRequest("no directory is given; name one on the engine's machine.", param="directory")
            try:
                Path(directory).mkdir(parents=True, exist_ok=True)
                profiler.start_trace(directory)
            except (OSError, RuntimeError) as error:
                raise InvalidRequest(f"cannot trace into {directory}: {error}", param="directory") from error
            self._directory = directory
            logger.info("tracing into %s", directory)

    def stop(self) -> str:
        """Ends the trace and returns its directory. InvalidRequest when none runs."""
        from jax import profiler

        with self._lock:
            if self._directory is None:
                raise InvalidRequest("no trace is running; start one first.")
            directory, self._directory = self._directory, None
            profiler.stop_trace()
            logger.info("the trace in %s is complete", directory)
            return directory
