"""`jaxserve serve`: starts the engine and the front end as children, says when they serve, and ends them together.

Both start at once: the front end waits for the engine's socket while the engine loads. When one dies, the other is ended and the
exit status says so; when this process dies, however, the kernel ends both (`engine.child_process`). Knows no JAX and no sockets
but to see early that a port is taken. Next: `engine.__main__`, `serve.__main__`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.child_process import LOG_FORMAT
from jaxserve.serve.server import bind

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 15.0
"""A child that has not ended this long after SIGTERM is killed."""


class Child:
    """One child process and the pipe on which it says that it is ready."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, ready: asyncio.Task[dict[str, Any] | None]) -> None:
        self.name = name
        self.process = process
        self.ready = ready
        """Its facts once it is ready; None when it ended before."""

    @classmethod
    async def start(cls, name: str, command: Sequence[str], orders: Mapping[str, Any]) -> Child:
        """Starts `command` with the orders as its last argument."""
        read_fd, write_fd = os.pipe()
        argument = json.dumps({**orders, "parent_pid": os.getpid(), "ready_fd": write_fd})
        try:
            # Its own process group: Ctrl-C reaches this process only, which then ends the children in order.
            process = await asyncio.create_subprocess_exec(*command, argument, pass_fds=(write_fd,), process_group=0)
        finally:
            os.close(write_fd)
        return cls(name, process, asyncio.create_task(_read_facts(read_fd)))

    async def stop(self) -> None:
        """Asks it to end, then makes it."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            logger.warning("%s did not end within %g s; killing it", self.name, STOP_TIMEOUT_S)
            self.kill()
            await self.process.wait()

    def kill(self) -> None:
        """Ends it now."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


async def _read_facts(read_fd: int) -> dict[str, Any] | None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", buffering=0))
    try:
        text = await reader.read()
    finally:
        transport.close()
    return json.loads(text) if text else None


def serve(engine: EngineConfig, server: ServerConfig, origins: Mapping[str, str]) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit status.

    Raises:
        ConfigError: A port is taken; nothing was started.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=LOG_FORMAT)
    python = [sys.executable, "-m"]
    return asyncio.run(supervise([*python, "jaxserve.engine"], asdict(engine), [*python, "jaxserve.serve"], server))


async def supervise(
    engine_command: Sequence[str], engine_config: Mapping[str, Any], front_end_command: Sequence[str], server: ServerConfig
) -> int:
    """Runs the two commands as described above; each gets its orders as one JSON argument."""
    for is_open, port, flag in ((not server.grpc_only, server.port, "--port"), (not server.http_only, server.grpc_port, "--grpc-port")):
        if is_open:
            bind(server.host, port, flag).close()
    directory = Path(tempfile.mkdtemp(prefix="jaxserve-"))
    address = f"unix:{directory}/engine.sock"
    children: list[Child] = []
    try:
        stopping = _Stopping(children)
        children.append(await Child.start("the engine", engine_command, {"config": engine_config, "engine_address": address}))
        children.append(await Child.start("the front end", front_end_command, {"config": asdict(server), "engine_address": address}))
        return await _run(children, stopping)
    finally:
        for child in reversed(children):  # the front end first: it still answers while the engine is there
            await child.stop()
        shutil.rmtree(directory, ignore_errors=True)


class _Stopping:
    """The first SIGTERM or SIGINT asks for an orderly end, the second one kills."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._event = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal)

    def _on_signal(self) -> None:
        if self._event.is_set():
            for child in self._children:
                child.kill()
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


async def _run(children: Sequence[Child], stopping: _Stopping) -> int:
    """Until a signal (0) or until a child has ended (its status)."""
    ends = {asyncio.create_task(child.process.wait()): child for child in children}
    stop = asyncio.create_task(stopping.wait())
    report = asyncio.create_task(_report(children))
    try:
        await asyncio.wait({*ends, stop}, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            return 0
        dead = next(child for end, child in ends.items() if end.done())
        status = dead.process.returncode or 0
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        logger.error("%s %s; ending the server", dead.name, how)
        return status if status > 0 else 1
    finally:
        for task in (stop, report, *ends):
            task.cancel()


async def _report(children: Sequence[Child]) -> None:
    """Prints where the server listens, once both children are ready."""
    facts = [await child.ready for child in children]
    if any(fact is None for fact in facts):
        return
    endpoints = {name: address for fact in facts if fact for name, address in fact.items() if address}
    for name, address in endpoints.items():
        print(f"jaxserve: {name} at {address}", file=sys.stderr, flush=True)
