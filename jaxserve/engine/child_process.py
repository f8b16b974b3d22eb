"""What a child of the supervisor does: take its orders from the command line, die with its parent, and say when it is ready.

Shared by the two children, `python -m jaxserve.engine` and `python -m jaxserve.serve`; neither is meant to be typed by a person.
Next: `jaxserve.serve.supervisor`, which starts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def read_orders(argv: Sequence[str]) -> dict[str, Any]:
    """The JSON object that the supervisor gave as the only argument; also ties this process to its parent and sets up logging."""
    if len(argv) != 2:
        raise SystemExit("this process is started by `jaxserve serve`")
    orders: dict[str, Any] = json.loads(argv[1])
    die_with_parent(orders["parent_pid"])
    set_up_logging()
    return orders


def set_up_logging() -> None:
    """Our lines from INFO on, everybody else's from WARNING on, all to stderr."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=LOG_FORMAT)
    logging.getLogger("jaxserve").setLevel(logging.INFO)


class Reports:
    """The pipe to the supervisor: stages as they end, then, once, that this process serves. One JSON object a line."""

    def __init__(self, fd: int) -> None:
        self._pipe = os.fdopen(fd, "w", buffering=1)

    def stage(self, name: str, seconds: float, detail: str = "") -> None:
        """A stage of start-up has ended."""
        self._write({"stage": [name, seconds, detail]})

    def ready(self, facts: Mapping[str, Any]) -> None:
        """This process serves; `facts` are what the supervisor prints of it."""
        self._write({"ready": facts})
        self._pipe.close()

    def _write(self, report: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # a supervisor that is gone takes this process with it
            self._pipe.write(json.dumps(report) + "\n")


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process when its parent ends, however that happens; elsewhere than on Linux, polls for it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_poll_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _poll_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
