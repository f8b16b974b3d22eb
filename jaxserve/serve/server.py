"""A front-end process: HTTP and gRPC in one asyncio loop in front of one engine. `supervisor` starts it; `__main__` is its entry.

Never imports JAX. When the engine goes away, health drops and open requests fail; the process ends soon after, if the supervisor has
not ended it before.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from jaxserve.config import ServerConfig
from jaxserve.engine.link_client import EngineClient
from jaxserve.errors import ConfigError
from jaxserve.serve.grpc_server import GrpcServer
from jaxserve.serve.http import HttpApi
from jaxserve.serve.service import Service
from jaxserve.serve.tracing import Tracer
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""Open calls have this long to end when the server stops; the rest is aborted."""
FLUSH_S = 1
"""Then clients have this long to read what was sent."""
LOST_ENGINE_S = 10.0
"""A front end without engine answers 503 this long: time for the supervisor to see what happened and to end it."""
KEEP_ALIVE_S = 60


@dataclass(frozen=True)
class Endpoints:
    """Where a front end listens; None for a door that is not open."""

    http: str | None
    grpc: str | None


class FrontEnd:
    """The doors of one front end.

    Args:
        config: Which doors, where, and the model's names.
        engine_address: Of EngineLink, `unix:/path` or `host:port`.
    """

    def __init__(self, config: ServerConfig, engine_address: str) -> None:
        self._config = config
        self._engine_address = engine_address
        self._grpc: GrpcServer | None = None
        self._http: uvicorn.Server | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._watch_task: asyncio.Task[None] | None = None

    async def start(self) -> Endpoints:
        """Connects to the engine, reads the tokenizer and opens the doors.

        Raises:
            EngineUnavailable: The engine does not answer.
            ConfigError: A port is taken.
        """
        config = self._config
        self._tracer = None if config.otlp_traces_endpoint is None else Tracer(config.otlp_traces_endpoint)
        sock = None if config.grpc_only else bind(config.host, config.port, "--port")
        self._client = await EngineClient.connect(self._engine_address)
        tokenizer = await asyncio.to_thread(Tokenizer.from_directory, self._client.info.model_path)
        self._service = Service(self._client, tokenizer, config.served_model_name, self._tracer)
        await self._service.warm_up()
        http = grpc = None
        if not config.http_only:
            self._grpc = GrpcServer(self._service, config.host, config.grpc_port)
            await self._grpc.start()
            grpc = _join(config.host, self._grpc.port)
        if sock is not None:
            http = f"http://{_join(config.host, sock.getsockname()[1])}"
            await self._start_http(sock)
        self._watch_task = asyncio.create_task(self._watch_engine())
        return Endpoints(http, grpc)

    async def stop(self) -> None:
        """Refuses new calls, drains the open ones (see `Service.drain`), then closes the doors and the link."""
        if self._grpc is not None:
            await self._grpc.set_serving(False)
        await self._service.drain(STOP_GRACE_S)
        if self._http is not None:
            self._http.should_exit = True
        if self._grpc is not None:
            await self._grpc.stop(FLUSH_S)
        if self._http_task is not None:
            await self._http_task
        await self._client.close()
        if self._watch_task is not None:
            await self._watch_task
        self._service.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def _start_http(self, sock: socket.socket) -> None:
        config = uvicorn.Config(
            HttpApi(self._service).app(),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=FLUSH_S,
        )
        self._http = _Uvicorn(config)
        self._http_task = asyncio.create_task(self._http.serve(sockets=[sock]))
        while not self._http.started:
            if self._http_task.done():  # another process began to listen since `bind`
                sock.close()
                raise ConfigError(f"--port {self._config.port} cannot be used: {self._http_task.exception()}; choose another port.")
            await asyncio.sleep(0.005)

    async def wait_until_lost(self) -> None:
        """Returns when the engine is gone."""
        await self._client.closed.wait()

    async def _watch_engine(self) -> None:
        await self._client.closed.wait()
        if self._grpc is not None:
            await self._grpc.set_serving(False)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield


def bind(host: str, port: int, flag: str) -> socket.socket:
    """A listening-ready TCP socket; raises ConfigError naming the flag when the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"{flag} {port} on {host} cannot be used: {error.strerror}; choose another {flag} or --host.") from None
    return sock


async def run_front_end(config: ServerConfig, engine_address: str, on_ready: Callable[[Endpoints], None]) -> int:
    """Serves until SIGTERM or SIGINT (0), also while it still waits for the engine, or until the engine is lost (1)."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    front_end = FrontEnd(config, engine_address)
    starting = asyncio.create_task(front_end.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        return 0
    on_ready(starting.result())
    lost = asyncio.create_task(front_end.wait_until_lost())
    await asyncio.wait({lost, stopping}, return_when=asyncio.FIRST_COMPLETED)
    is_lost = not stopping.done()
    if is_lost:
        await asyncio.wait({stopping}, timeout=LOST_ENGINE_S)
    lost.cancel()
    stopping.cancel()
    await front_end.stop()
    return 1 if is_lost else 0


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
