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
from jaxserve.engine.child_process import set_up_logging
from jaxserve.engine.info import EngineInfo
from jaxserve.errors import ConfigError
from jaxserve.serve.server import bind
from jaxserve.startup_report import changed_settings, curl_line, stage_line, summary

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 15.0
"""A child that has not ended this long after SIGTERM is killed."""


class Child:
    """One child process and the pipe on which it reports."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, reports_fd: int) -> None:
        self.name = name
        self.process = process
        self.ready = asyncio.create_task(self._read_reports(reports_fd))
        """Its facts once it serves; None when it ended before."""

    @classmethod
    async def start(cls, name: str, command: Sequence[str], orders: Mapping[str, Any]) -> Child:
        """Starts `command` with the orders as its last argument."""
        read_fd, write_fd = os.pipe()
        argument = json.dumps({**orders, "parent_pid": os.getpid(), "report_fd": write_fd})
        try:
            # Its own process group: Ctrl-C reaches this process only, which then ends the children in order.
            process = await asyncio.create_subprocess_exec(*command, argument, pass_fds=(write_fd,), process_group=0)
        finally:
            os.close(write_fd)
        return cls(name, process, read_fd)

    @staticmethod
    async def _read_reports(fd: int) -> dict[str, Any] | None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(fd, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            async for line in reader:
                report = json.loads(line)
                if "ready" in report:
                    facts: dict[str, Any] = report["ready"]
                    return facts
                _print(stage_line(*report["stage"]))
            return None
        finally:
            transport.close()

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


def serve(engine: EngineConfig, server: ServerConfig, origins: Mapping[str, str]) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit status.

    Args:
        engine, server: The settings.
        origins: Where each setting that is not a default came from, to be printed.

    Raises:
        ConfigError: A port is taken, or both are one; nothing was started.
    """
    set_up_logging()
    python = [sys.executable, "-m"]
    changes = changed_settings(engine, server, origins)
    return asyncio.run(supervise([*python, "jaxserve.engine"], asdict(engine), [*python, "jaxserve.serve"], server, changes))


async def supervise(
    engine_command: Sequence[str],
    engine_config: Mapping[str, Any],
    front_end_command: Sequence[str],
    server: ServerConfig,
    changes: Sequence[tuple[str, str, str]] = (),
) -> int:
    """Runs the two commands as described above; each gets its orders as one JSON argument. `changes` are printed at the end of start-up."""
    if server.port == server.grpc_port != 0 and not (server.grpc_only or server.http_only):
        raise ConfigError(f"--port and --grpc-port are both {server.port}; give HTTP and gRPC different ports.")
    for is_open, port, flag in ((not server.grpc_only, server.port, "--port"), (not server.http_only, server.grpc_port, "--grpc-port")):
        if is_open:
            bind(server.host, port, flag).close()
    directory = Path(tempfile.mkdtemp(prefix="jaxserve-"))
    address = f"unix:{directory}/engine.sock"
    children: list[Child] = []
    try:
        stopping = _Stopping(children)
        engine = await Child.start("the engine", engine_command, {"config": engine_config, "engine_address": address})
        children.append(engine)
        front_end = await Child.start("the front end", front_end_command, {"config": asdict(server), "engine_address": address})
        children.append(front_end)
        summary_task = asyncio.create_task(_print_summary(engine, front_end, server, changes))
        try:
            return await _wait_for_end(children, stopping)
        finally:
            summary_task.cancel()
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
        else:
            _print("Stopping; a second signal ends it at once.")
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


async def _wait_for_end(children: Sequence[Child], stopping: _Stopping) -> int:
    """Until a signal (0) or until a child has ended (its status)."""
    ends = {asyncio.create_task(child.process.wait()): child for child in children}
    stop = asyncio.create_task(stopping.wait())
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
        for task in (stop, *ends):
            task.cancel()


async def _print_summary(engine: Child, front_end: Child, server: ServerConfig, changes: Sequence[tuple[str, str, str]]) -> None:
    """Prints what is served and where, once both children serve."""
    facts, endpoints = await engine.ready, await front_end.ready
    if facts is None or endpoints is None:
        return
    info = EngineInfo(**facts)
    http = endpoints["http"]
    _print(summary(info, {name: address for name, address in (("HTTP", http), ("gRPC", endpoints["grpc"])) if address}, changes))
    if http:
        _print(f"\nReady. Try:\n\n  {curl_line(http, (*server.served_model_name, info.model)[0])}\n")
    else:
        _print("\nReady.")


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
