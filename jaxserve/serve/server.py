"""A front-end process: HTTP and gRPC in one asyncio loop in front of the engines. `supervisor` starts it; `__main__` is its entry.

The doors open at once: while no engine has loaded, and while all that were lost are started again, calls are refused and health says so.
Never imports JAX. Next: `http`, `grpc_server`, and `service` below both.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from jaxserve.config import ServerConfig
from jaxserve.engine.child_process import HURRY_SIGNAL
from jaxserve.engine.replicas import Replicas
from jaxserve.errors import ConfigError
from jaxserve.serve.grpc_server import GrpcServer
from jaxserve.serve.http import HttpApi
from jaxserve.serve.http_connection import uvicorn_config
from jaxserve.serve.ports import bind
from jaxserve.serve.service import Service
from jaxserve.serve.tracing import Tracer

logger = logging.getLogger(__name__)

FLUSH_S = 1
"""Clients of calls that were aborted have this long to read what was sent."""


@dataclass(frozen=True)
class Endpoints:
    """Where a front end listens; None for a door that is not open."""

    http: str | None
    grpc: str | None


class FrontEnd:
    """The doors of one front end.

    Args:
        config: Which doors, where, and what is allowed.
        engine_addresses: Of EngineLink of each engine, `unix:/path` or `host:port`.
        share_ports: Other front ends may listen at the same ports.

    Attributes:
        service, client: What the doors lead to, from `start` on.
    """

    def __init__(self, config: ServerConfig, *engine_addresses: str, share_ports: bool = False) -> None:
        self._config = config
        self._engine_addresses = engine_addresses
        self._share_ports = share_ports
        self._grpc: GrpcServer | None = None
        self._http: uvicorn.Server | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._health_changed = asyncio.Event()

    async def start(self) -> Endpoints:
        """Opens the doors, whether an engine is there or not, and begins to connect to all.

        Raises:
            ConfigError: A port is taken, or keys or certificates cannot be used.
        """
        config = self._config
        sock = None if config.grpc_only else bind(config.host, config.port, "--port", is_shared=self._share_ports)
        # Half of the time after which a hung engine is ended: health drops first.
        self.client = Replicas(self._engine_addresses, max_stall_s=config.stall_timeout / 2)
        self._tracer = None if config.otlp_traces_endpoint is None else Tracer(config.otlp_traces_endpoint)
        self.service = Service(self.client, config, self._tracer)
        http = grpc = None
        try:
            if not config.http_only:
                self._grpc = GrpcServer(self.service, config, is_shared=self._share_ports)
                await self._grpc.start()
                grpc = _join(config.host, self._grpc.port)
            if sock is not None:
                scheme = "https" if config.ssl_certfile else "http"
                http = f"{scheme}://{_join(config.host, sock.getsockname()[1])}"
                await self._start_http(sock)
        except BaseException:
            if sock is not None:
                sock.close()
            if self._grpc is not None:
                await self._grpc.stop(0)
            raise
        self.service.add_listener(self._health_changed.set)
        self._health_task = asyncio.create_task(self._follow_health())
        self.client.start()
        self._loading = asyncio.create_task(self.service.load())
        return Endpoints(http, grpc)

    async def wait_until_ready(self) -> None:
        """Returns once calls are served for the first time; raises CheckpointError when the tokenizer cannot be read."""
        await self._loading

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Refuses new calls, drains the open ones (see `Service.drain`), then closes the doors and the link.

        Until `shutdown_timeout` is over, or `hurry` is set, open calls may go on and clients read what they were sent.
        """
        hurry = hurry or asyncio.Event()
        end_s = time.monotonic() + self._config.shutdown_timeout
        self._loading.cancel()
        await self.service.drain(self._config.shutdown_timeout, hurry)
        flush_s = max(FLUSH_S, end_s - time.monotonic())
        await self._close_doors(flush_s, hurry)
        self._health_task.cancel()
        await self.client.close()
        self.service.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def _close_doors(self, flush_s: float, hurry: asyncio.Event) -> None:
        closing: set[asyncio.Task[None]] = set()
        if self._http is not None and self._http_task is not None:
            self._http.config.timeout_graceful_shutdown = math.ceil(flush_s)
            self._http.should_exit = True
            closing.add(self._http_task)
        if self._grpc is not None:
            closing.add(asyncio.create_task(self._grpc.stop(flush_s)))
        hurrying = asyncio.create_task(self._hurry(hurry))
        await asyncio.wait(closing)
        hurrying.cancel()

    async def _hurry(self, hurry: asyncio.Event) -> None:
        """Cuts short what `_close_doors` waits for, once asked to."""
        await hurry.wait()
        await asyncio.sleep(FLUSH_S)
        if self._http is not None:
            for connection in list(self._http.server_state.connections):
                connection.transport.abort()
        if self._grpc is not None:
            await self._grpc.stop(0)

    async def _start_http(self, sock: socket.socket) -> None:
        self._http = _Uvicorn(uvicorn_config(HttpApi(self.service).app(), self._config, flush_s=FLUSH_S))
        self._http_task = asyncio.create_task(self._http.serve(sockets=[sock]))
        while not self._http.started:
            if self._http_task.done():  # another process began to listen since `bind`
                raise ConfigError(f"--port {self._config.port} cannot be used: {self._http_task.exception()}; choose another port.")
            await asyncio.sleep(0.005)

    async def _follow_health(self) -> None:
        """Makes gRPC's health what the service says, as HTTP's is."""
        while self._grpc is not None:
            await self._grpc.set_serving(self.service.is_ready)
            await self._health_changed.wait()
            self._health_changed.clear()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield


async def run_front_end(
    config: ServerConfig, engine_addresses: Sequence[str], on_ready: Callable[[Endpoints], None], *, share_ports: bool = False
) -> int:
    """Serves until SIGTERM or SIGINT, then drains (HURRY_SIGNAL cuts that short) and returns 0.

    `on_ready` is called when an engine has come up for the first time.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_hurry() -> None:
        hurry.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    loop.add_signal_handler(HURRY_SIGNAL, on_hurry)
    front_end = FrontEnd(config, *engine_addresses, share_ports=share_ports)
    endpoints = await front_end.start()
    getting_ready = asyncio.create_task(front_end.wait_until_ready())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({getting_ready, stopping}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if not stopping.done():
            getting_ready.result()
            on_ready(endpoints)
            await stopping
    finally:
        getting_ready.cancel()
        stopping.cancel()
        await front_end.stop(hurry)
    return 0


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
