"""One child of the supervisor: started, watched, started again when it dies, and ended. Knows nothing of what it does.

Orders go to its standard input, reports come back on a pipe of their own, both JSON. Next: `supervisor`; the other end is
`engine.child_process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.engine.child_process import HURRY_SIGNAL

logger = logging.getLogger(__name__)

RESTART_WINDOW_S = 600.0
"""`max_restarts` counts within this time; restarts of a child that has not served since count however long they took."""
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0
"""A child waits this long for its first restart in the window, twice as long for each one after it, up to the second bound."""
BAD_SETTINGS_STATUS = 2
"""A child ends with it when it cannot start as told: starting it again would not help."""
TICK_S = 1.0
STACKS_S = 1.0
"""A child that hangs has this long to write down what its threads do."""


@dataclass(frozen=True)
class Part:
    """What is to be run.

    Attributes:
        name: For the log, such as "the engine".
        command: The program and its arguments.
        orders: What it is to do; may hold secrets.
        environment: Variables beside those of this process.
        max_silence_s: Seconds after which one that gives signs of life, and then no more, is ended; None waits for ever.
    """

    name: str
    command: Sequence[str]
    orders: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    max_silence_s: float | None = None


class Child:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process, reports_fd: int, on_report: Callable[[Mapping[str, Any]], None]) -> None:
        self.process = process
        self._reading = asyncio.create_task(self._read_reports(reports_fd, on_report))

    @classmethod
    async def start(cls, part: Part, on_report: Callable[[Mapping[str, Any]], None]) -> Child:
        """Starts the program and gives it its orders."""
        read_fd, write_fd = os.pipe()
        orders = json.dumps({**part.orders, "parent_pid": os.getpid(), "report_fd": write_fd})
        try:
            process = await asyncio.create_subprocess_exec(
                *part.command,
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(write_fd,),
                # Ctrl-C reaches this process only, which then ends the children in order.
                process_group=0,
                env={**os.environ, **part.environment},
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        assert process.stdin is not None
        process.stdin.write(orders.encode())
        process.stdin.close()
        return cls(process, read_fd, on_report)

    @staticmethod
    async def _read_reports(fd: int, on_report: Callable[[Mapping[str, Any]], None]) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(fd, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            async for line in reader:
                on_report(json.loads(line))
        finally:
            transport.close()

    async def stop(self, name: str, timeout_s: float) -> None:
        """Asks it to end, then makes it."""
        if self.process.returncode is None:
            self.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), timeout_s)
            except TimeoutError:
                logger.warning("%s did not end within %g s; killing it", name, timeout_s)
                self.kill()
                await self.process.wait()
        self._reading.cancel()

    def terminate(self) -> None:
        """Asks it to end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def hurry(self) -> None:
        """Asks it to end at once, whether it was asked to end before or not; one that does not know HURRY_SIGNAL is ended by it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(HURRY_SIGNAL)

    def ask_for_stacks(self) -> None:
        """Makes it write down what its threads do, where it has asked for the signal."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Ends it now."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class Keeper:
    """Keeps a part running.

    Args:
        part: What.
        max_restarts: In RESTART_WINDOW_S; then it gives up.
        on_stage: Called with what the child reports of its first start.
    """

    def __init__(self, part: Part, max_restarts: int, on_stage: Callable[[str, float, str], None]) -> None:
        self.part = part
        self._max_restarts = max_restarts
        self._on_stage = on_stage
        self._restarts: list[float] = []
        self._child: Child | None = None
        self._has_served = False  # the present child
        self._num_silent_ticks: int | None = None  # of the present child, once it has given a sign of life
        self.first_ready: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        """What the child says of itself when it serves for the first time."""

    async def run(self) -> int:
        """Returns the exit status for the whole server when the child cannot be kept running."""
        while True:
            self._has_served, self._num_silent_ticks = False, None
            self._child = await Child.start(self.part, self._on_report)
            status = await self._wait_for_end(self._child)
            how = _how_it_ended(status)
            if status == BAD_SETTINGS_STATUS and not self.first_ready.done():
                logger.error("%s %s; ending the server", self.part.name, how)
                return status
            now = time.monotonic()
            if self._has_served:
                self._restarts = [then for then in self._restarts if now - then < RESTART_WINDOW_S]
            number = len(self._restarts) + 1
            if number > self._max_restarts:
                logger.error(
                    "%s %s after %d restarts in %g minutes (--max-restarts %d); ending the server",
                    self.part.name, how, number - 1, RESTART_WINDOW_S / 60, self._max_restarts,
                )  # fmt: skip
                return 1
            delay = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (number - 1))
            logger.error("%s %s; restart %d of at most %d follows in %g s", self.part.name, how, number, self._max_restarts, delay)
            self._restarts.append(now)
            await asyncio.sleep(delay)

    async def _wait_for_end(self, child: Child) -> int:
        """The child's exit status; brings its end about where it hangs."""
        ended = asyncio.create_task(child.process.wait())
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=TICK_S)
                if self._is_silent():
                    logger.error("%s hangs: it has given no sign of life for %g s; ending it", self.part.name, self.part.max_silence_s)
                    child.ask_for_stacks()
                    await asyncio.wait({ended}, timeout=STACKS_S)
                    child.kill()
                    return await ended
            return ended.result()
        finally:
            ended.cancel()

    def _is_silent(self) -> bool:
        # Counts time in which this process could have heard something: one that was stopped itself blames nobody.
        if self._num_silent_ticks is None or self.part.max_silence_s is None:
            return False
        self._num_silent_ticks += 1
        return self._num_silent_ticks * TICK_S > self.part.max_silence_s

    async def stop(self, timeout_s: float) -> None:
        """Ends the child; `run` must have been cancelled."""
        if self._child is not None:
            await self._child.stop(self.part.name, timeout_s)

    def hurry(self) -> None:
        """Asks the child to end at once, without waiting for it."""
        if self._child is not None:
            self._child.hurry()

    def kill(self) -> None:
        """Ends the child now."""
        if self._child is not None:
            self._child.kill()

    def _on_report(self, report: Mapping[str, Any]) -> None:
        if "beat" in report:
            self._num_silent_ticks = 0
            return
        if "ready" not in report:
            if not self._restarts:
                self._on_stage(*report["stage"])
            return
        self._has_served = True
        if not self.first_ready.done():
            self.first_ready.set_result(report["ready"])
        else:
            logger.info("%s serves again", self.part.name)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
