"""A front end's side of EngineLink: one stream to one engine, many requests over it. asyncio; imports no JAX.

    client = EngineClient("unix:/run/jaxserve/engine.sock")
    client.start()
    await client.wait_until_connected()
    with client.generate(request) as stream:       # or several requests; leaving the block aborts what still runs
        async for event in stream: ...

Connects again for ever: when the engine goes away, every open request raises EngineUnavailable at once, and so do new ones until
it is back. Knows no text. Next: `event_stream`, what a caller reads; `replicas`, for several engines; `link_server`, the other end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import grpc

from jaxserve.core.request import Request
from jaxserve.engine import link_codec, link_pb2, link_pb2_grpc
from jaxserve.engine.event_stream import EventStream
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.routing import Load
from jaxserve.engine.stats import EngineStats
from jaxserve.errors import EngineUnavailable, InvalidRequest, Overloaded

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 * 2**20
RECONNECT_S = 0.1
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # The link is local; http_proxy in the environment would otherwise catch one over TCP.
    ("grpc.enable_http_proxy", 0),
    # Front ends wait for an engine that still loads, and should notice soon, all at about the same time.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
]
HEARTBEAT_TIMEOUT_S = 5.0
"""An engine that has sent nothing for this long counts as stalled."""
TICK_S = 0.25
STATS_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 60.0
"""Flushing waits for the step that runs, and a profile is written out before its answer."""


class EngineClient:
    """One front end's connection to one engine. Use from one asyncio loop only.

    Args:
        address: Of EngineLink, `unix:/path` or `host:port`.
        max_stall_s: Seconds without progress of the engine's loop, while it has work, from which on it counts as stalled.
        name: What clients and the log read of it.
        on_overloaded: Called with the id of a request that the engine has no room for; True when it is served elsewhere.

    Attributes:
        num_connections: Engines there have been: one that was started again is another one, with an empty cache.
        last_stats: What the engine said last of itself; None while there is no engine.
    """

    def __init__(
        self,
        address: str,
        *,
        max_stall_s: float = 30.0,
        name: str = "the engine",
        on_overloaded: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._address = address
        self._max_stall_s = max_stall_s
        self._name = name
        self._on_overloaded = on_overloaded
        self._info: EngineInfo | None = None
        self._connection: _Connection | None = None
        self._connected = asyncio.Event()
        self._lost_reason = ""
        self._listeners: list[Callable[[], None]] = []
        self._was_healthy = False
        self._num_silent_ticks = 0
        self._streams: dict[str, EventStream] = {}
        self._num_sequences: dict[str, int] = {}
        self._num_sequences_then = 0  # all of them when the last heartbeat came
        self._tasks: list[asyncio.Task[None]] = []
        self.num_connections = 0
        self.last_stats: EngineStats | None = None

    def start(self) -> None:
        """Begins to connect, and to watch; returns at once."""
        self._channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        self._stub = link_pb2_grpc.EngineLinkStub(self._channel)
        self._tasks = [asyncio.create_task(self._stay_connected()), asyncio.create_task(self._watch())]

    async def wait_until_connected(self) -> None:
        """Returns once there is an engine."""
        await self._connected.wait()

    async def close(self) -> None:
        """Ends the connection; the engine aborts what is open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose("this front end is shutting down")
        await self._channel.close()

    @property
    def info(self) -> EngineInfo:
        """What the engine, or the last one if it is gone, said of itself; raises EngineUnavailable before the first connection."""
        if self._info is None:
            raise EngineUnavailable(self.why)
        return self._info

    @property
    def is_connected(self) -> bool:
        """Whether there is an engine."""
        return self._connection is not None

    @property
    def is_healthy(self) -> bool:
        """Whether there is an engine that is heard of and makes progress."""
        return self.is_connected and not self._is_silent and not self._is_stalled

    @property
    def why(self) -> str:
        """Why the engine is not healthy, as a client may read it; empty when it is."""
        if self._connection is None:
            if self._info is None:
                return "the model is still loading; send the request again in a while."
            return f"{self._name} is restarting ({self._lost_reason}); send the request again in a while."
        if self._is_silent or self._is_stalled:
            return f"{self._name} is stalled: it makes no progress; send the request again in a while."
        return ""

    @property
    def load(self) -> Load:
        """What the engine has to do, as far as it is known here."""
        num_seats = 1 if self._info is None else self._info.max_num_seqs
        num_own = sum(self._num_sequences.values())
        stats = self.last_stats or EngineStats()
        return Load.estimate(stats, num_seats, num_own_then=self._num_sequences_then, num_own=num_own)

    @property
    def num_open(self) -> int:
        """Requests that this front end is waiting for."""
        return len(self._streams)

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Calls back, in the asyncio loop, whenever `is_healthy` has changed."""
        self._listeners.append(callback)

    def generate(self, *requests: Request) -> EventStream:
        """Sends requests; their ids must be unused. Raises EngineUnavailable when there is no engine."""
        if self._connection is None:
            raise EngineUnavailable(self.why)
        stream = EventStream(self, requests)
        for request in requests:
            self.send(request, stream)
        return stream

    def send(self, request: Request, stream: EventStream) -> None:
        """Sends a request whose events the stream is waiting for; there must be an engine."""
        assert request.request_id not in self._streams, f"request id {request.request_id} is in use"
        self._streams[request.request_id] = stream
        self._num_sequences[request.request_id] = request.params.n
        self._command(link_codec.encode_add(request))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request or one of its sequences; a stream still open gets its events with finish_reason abort."""
        self._command(link_codec.encode_abort(request_id, index))

    def abort_label(self, label: str) -> None:
        """Ends every request with this label, whichever front end it came from, as `abort` does."""
        self._command(link_codec.encode_abort_label(label))

    def abort_all(self) -> None:
        """Ends every open request of this front end with finish_reason abort, without waiting for the engine."""
        for stream in set(self._streams.values()):
            stream.end()

    def forget(self, request_id: str) -> None:
        """Called by a stream that wants no more events."""
        self._streams.pop(request_id, None)
        self._num_sequences.pop(request_id, None)

    async def stats(self) -> EngineStats:
        """The engine's figures right now; raises EngineUnavailable when it does not answer, and before the first connection, as `info`."""
        if self._info is None:
            raise EngineUnavailable(self.why)
        return link_codec.decode_stats(await self._ask(self._stub.GetStats(link_pb2.GetStatsRequest(), timeout=STATS_TIMEOUT_S)))

    async def flush_cache(self) -> bool:
        """Makes the engine forget all known prefixes; False when it refuses, as pages are in use."""
        answer = await self._ask(self._stub.FlushCache(link_pb2.FlushCacheRequest(), timeout=CONTROL_TIMEOUT_S))
        return bool(answer.is_flushed)

    async def start_profile(self, directory: str) -> None:
        """Starts a trace of the engine process into a directory; raises InvalidRequest when one runs already."""
        await self._ask(self._stub.StartProfile(link_pb2.StartProfileRequest(directory=directory), timeout=CONTROL_TIMEOUT_S))

    async def stop_profile(self) -> str:
        """Ends the trace and returns its directory; raises InvalidRequest when none runs."""
        answer = await self._ask(self._stub.StopProfile(link_pb2.StopProfileRequest(), timeout=CONTROL_TIMEOUT_S))
        return str(answer.directory)

    async def _ask[T](self, call: Awaitable[T]) -> T:
        """The answer to one RPC, or the exception that a client should see."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
                raise InvalidRequest(error.details() or "refused by the engine") from None
            raise EngineUnavailable(self.why or f"{self._name} does not answer: {error.details()}") from None

    def _command(self, command: link_pb2.Command) -> None:
        if self._connection is not None:
            self._connection.send(command)

    @property
    def _is_silent(self) -> bool:
        return self._num_silent_ticks * TICK_S > HEARTBEAT_TIMEOUT_S

    @property
    def _is_stalled(self) -> bool:
        return self.last_stats is not None and self.last_stats.seconds_since_progress > self._max_stall_s

    async def _stay_connected(self) -> None:
        while True:
            try:
                response = await self._stub.GetInfo(link_pb2.GetInfoRequest(), wait_for_ready=True)
                connection = _Connection(self._stub, self._name)
            except grpc.aio.AioRpcError as error:
                logger.debug("%s is not at %s: %s", self._name, self._address, error.details())
            else:
                info = EngineInfo.from_json(response.info_json)
                try:
                    reason = await connection.receive(partial(self._on_message, connection, info))
                finally:
                    connection.close()
                if self.is_connected:
                    logger.error("%s; %d open requests fail", reason, len(self._streams))
                    self._lose(reason)
            await asyncio.sleep(RECONNECT_S)

    def _begin(self, connection: _Connection, info: EngineInfo) -> None:
        logger.info("connected to %s at %s", self._name, self._address)
        self._connection, self._info = connection, info
        self.num_connections += 1
        self._connected.set()

    def _on_message(self, connection: _Connection, info: EngineInfo, message: link_pb2.FromEngine) -> None:
        self._num_silent_ticks = 0
        if message.HasField("heartbeat"):
            self.last_stats = link_codec.decode_stats(message.heartbeat)
            self._num_sequences_then = sum(self._num_sequences.values())
        if not self.is_connected and not message.failure:  # an engine that is about to end still answers, but only that
            self._begin(connection, info)
        self._tell()
        for token in link_codec.decode_tokens(message.tokens):
            if (stream := self._streams.get(token.request_id)) is not None:
                stream.put(token)
        for event in message.events:
            if (stream := self._streams.get(event.request_id)) is not None:
                stream.put(event)
        for rejection in message.rejections:
            error = link_codec.decode_rejection(rejection)
            if isinstance(error, Overloaded) and self._on_overloaded(rejection.request_id):
                continue
            if (stream := self._streams.get(rejection.request_id)) is not None:
                stream.fail(rejection.request_id, error)

    def _lose(self, reason: str) -> None:
        """The engine is gone: every open request fails."""
        self._connection = self.last_stats = None
        self._lost_reason = reason
        self._connected.clear()
        for request_id, stream in self._streams.items():
            stream.fail(request_id, EngineUnavailable(f"{reason}; the request is lost, send it again."))
        # Whoever does not read the failure yet is no load of the next engine.
        self._streams.clear()
        self._num_sequences.clear()
        self._tell()

    async def _watch(self) -> None:
        """Counts time in which this process could have heard something: a busy or stopped front end blames no engine."""
        while True:
            await asyncio.sleep(TICK_S)
            self._num_silent_ticks += 1
            self._tell()

    def _tell(self) -> None:
        if self.is_healthy == self._was_healthy:
            return
        self._was_healthy = self.is_healthy
        if self.is_connected and not self.is_healthy:
            logger.error("%s", self.why)
        for callback in self._listeners:
            callback()


class _Connection:
    """One `Connect` stream: commands out in order, messages in, until it breaks."""

    def __init__(self, stub: link_pb2_grpc.EngineLinkStub, engine_name: str) -> None:
        self._call = stub.Connect()
        self._engine_name = engine_name
        self._commands: asyncio.Queue[link_pb2.Command] = asyncio.Queue()
        self._writer = asyncio.create_task(self._write())

    def send(self, command: link_pb2.Command) -> None:
        self._commands.put_nowait(command)

    async def receive(self, on_message: Callable[[link_pb2.FromEngine], None]) -> str:
        """Hands on each message; returns why there are no more."""
        reason = f"{self._engine_name} closed its connection"
        try:
            async for message in self._call:
                on_message(message)
                reason = message.failure or reason
        except grpc.aio.AioRpcError as error:
            logger.warning("the connection to %s broke: %s", self._engine_name, error.details())
            reason = f"{self._engine_name} has gone away"
        except Exception:
            logger.exception("a message of %s could not be taken in", self._engine_name)
            reason = f"this front end could not read an answer of {self._engine_name}"
        return reason

    def close(self) -> None:
        self._writer.cancel()
        self._call.cancel()

    async def _write(self) -> None:
        """Writes commands, all that wait in one message."""
        while True:
            commands = [await self._commands.get()]
            while not self._commands.empty():
                commands.append(self._commands.get_nowait())
            try:
                await self._call.write(link_pb2.ToEngine(commands=commands))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the receiving side reports why
