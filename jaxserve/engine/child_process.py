"""What a child of the supervisor does: take its orders from standard input, die with its parent, and say when it is ready.

Shared by the two kinds of children, `python -m jaxserve.engine` and `python -m jaxserve.serve`; neither is meant to be typed by a
person. Orders hold keys, so they are not on the command line, where everybody could read them. Next: `jaxserve.serve.child`, the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from jaxserve.logs import set_up_logging

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0
BEAT_S = 0.25
"""Several signs of life in the shortest `stall_timeout`, 1 s: one that comes late ends nobody."""
HURRY_SIGNAL = signal.SIGUSR2
"""Tells a front end to abort what is open and end. Not SIGTERM once more: of a signal sent twice a busy process may see one."""


def read_orders() -> dict[str, Any]:
    """The JSON object that the supervisor writes to standard input; also ties this process to its parent and sets up logging."""
    _ask_to_die_with_parent()
    try:
        orders: dict[str, Any] = json.loads("" if sys.stdin.isatty() else sys.stdin.read())
    except ValueError:
        raise SystemExit("this process is started by `jaxserve serve`") from None
    if os.getppid() != orders["parent_pid"]:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)
    set_up_logging(orders["log_format"], orders["part"])
    return orders


class Reports:
    """The pipe to the supervisor: stages as they end, once that this process serves, and signs of life. One JSON object a line."""

    def __init__(self, fd: int) -> None:
        self._pipe = os.fdopen(fd, "wb", buffering=0)

    def stage(self, name: str, seconds: float, detail: str = "") -> None:
        """A stage of start-up has ended."""
        self._write({"stage": [name, seconds, detail]})

    def ready(self, facts: Mapping[str, Any]) -> None:
        """This process serves; `facts` are what the supervisor prints of it."""
        self._write({"ready": facts})

    async def beat(self) -> None:
        """Until cancelled, tells the supervisor that this asyncio loop turns: it ends a process that stops telling so."""
        # What does not fit into the pipe is dropped: a supervisor that does not read, being stopped, must stop nobody else.
        os.set_blocking(self._pipe.fileno(), False)
        while True:
            self._write({"beat": True})
            await asyncio.sleep(BEAT_S)

    def _write(self, report: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # a supervisor that is gone takes this process with it
            self._pipe.write(json.dumps(report).encode() + b"\n")


def _ask_to_die_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends, however that happens; elsewhere than on Linux, polls for it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_poll_parent, args=(os.getppid(),), daemon=True).start()


def _poll_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
