"""A front end's side of EngineLink: one stream to one engine, many requests over it. asyncio; imports no JAX.

    client = await EngineClient.connect("unix:/run/jaxserve/engine.sock")
    with client.generate(request) as stream:       # or several requests; leaving the block aborts what still runs
        async for event in stream: ...

Knows no text. When the engine goes away, every open request raises EngineUnavailable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

import grpc

from jaxserve.core.events import TokenEvent
from jaxserve.core.request import Request
from jaxserve.engine import link_codec, link_pb2, link_pb2_grpc
from jaxserve.engine.info import EngineInfo
from jaxserve.errors import EngineUnavailable, JaxserveError

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 * 2**20
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # The link is local; http_proxy in the environment would otherwise catch one over TCP.
    ("grpc.enable_http_proxy", 0),
    # A front end waits for an engine that still loads, and should notice soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


class EventStream:
    """The events of some requests, in the order they arrive, until each of their sequences has finished.

    Iterating raises InvalidRequest or Overloaded when the engine refuses a request and EngineUnavailable when it goes away.
    """

    def __init__(self, client: EngineClient, requests: Sequence[Request]) -> None:
        self._client = client
        self._unfinished = {request.request_id: set(range(request.params.n)) for request in requests}
        self._queue: asyncio.Queue[TokenEvent | JaxserveError] = asyncio.Queue()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        while self._unfinished:
            item = await self._queue.get()
            if isinstance(item, JaxserveError):
                self.close()
                raise item
            if item.index not in self._unfinished.get(item.request_id, ()):
                continue
            if item.finish_reason is not None:
                self._finish(item.request_id, item.index)
            return item
        raise StopAsyncIteration

    def put(self, item: TokenEvent | JaxserveError) -> None:
        """Called by the client when something arrives."""
        self._queue.put_nowait(item)

    def drop(self, request_id: str, index: int) -> None:
        """Aborts one sequence and yields no more events of it (its text hit a stop string)."""
        if index in self._unfinished.get(request_id, ()):
            self._finish(request_id, index)
            self._client.abort(request_id, index)

    def close(self) -> None:
        """Aborts whatever still runs; nothing more is yielded."""
        for request_id in self._unfinished:
            self._client.abort(request_id)
            self._client.forget(request_id)
        self._unfinished.clear()

    def _finish(self, request_id: str, index: int) -> None:
        indices = self._unfinished[request_id]
        indices.discard(index)
        if not indices:
            del self._unfinished[request_id]
            self._client.forget(request_id)


class EngineClient:
    """One front end's connection to one engine. Use from one asyncio loop only."""

    def __init__(self, channel: grpc.aio.Channel, stub: link_pb2_grpc.EngineLinkStub, info: EngineInfo) -> None:
        self._channel = channel
        self.info = info
        self._streams: dict[str, EventStream] = {}
        self._commands: asyncio.Queue[link_pb2.Command] = asyncio.Queue()
        self._failure: str | None = None
        self.closed = asyncio.Event()
        """Set when the engine is gone."""
        self._call = stub.Connect()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._send())]

    @classmethod
    async def connect(cls, address: str, *, timeout_s: float | None = None) -> EngineClient:
        """Connects to `unix:/path` or `host:port`; raises EngineUnavailable when nothing answers in time (None: waits)."""
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        stub = link_pb2_grpc.EngineLinkStub(channel)
        try:
            response = await stub.GetInfo(link_pb2.GetInfoRequest(), wait_for_ready=True, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            await channel.close()
            raise EngineUnavailable(f"no engine answers at {address} within {timeout_s} s: {error.details()}") from None
        return cls(channel, stub, EngineInfo.from_json(response.info_json))

    @property
    def is_alive(self) -> bool:
        """False once the engine is gone."""
        return self._failure is None

    @property
    def num_open(self) -> int:
        """Requests that this front end is waiting for."""
        return len(self._streams)

    def generate(self, *requests: Request) -> EventStream:
        """Sends requests; their ids must be unused. Raises EngineUnavailable when the engine is gone."""
        if self._failure is not None:
            raise EngineUnavailable(self._failure)
        stream = EventStream(self, requests)
        for request in requests:
            assert request.request_id not in self._streams, f"request id {request.request_id} is in use"
            self._streams[request.request_id] = stream
            self._commands.put_nowait(link_codec.encode_add(request))
        return stream

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request or one of its sequences; a stream still open gets its events with finish_reason abort."""
        if self._failure is None:
            self._commands.put_nowait(link_codec.encode_abort(request_id, index))

    def abort_all(self) -> None:
        """Ends every open request, as `abort` does."""
        for request_id in self._streams:
            self.abort(request_id)

    def forget(self, request_id: str) -> None:
        """Called by a stream that wants no more events."""
        self._streams.pop(request_id, None)

    async def close(self) -> None:
        """Ends the connection; the engine aborts what is open."""
        self._fail("this front end is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _receive(self) -> None:
        reason = "the engine closed its connection"
        try:
            async for message in self._call:
                for event in message.events:
                    if (stream := self._streams.get(event.request_id)) is not None:
                        stream.put(link_codec.decode_event(event))
                for rejection in message.rejections:
                    if (stream := self._streams.get(rejection.request_id)) is not None:
                        stream.put(link_codec.decode_rejection(rejection))
                reason = message.failure or reason
        except grpc.aio.AioRpcError as error:
            reason = f"the connection to the engine broke: {error.details()}"
        finally:
            self._fail(reason)

    async def _send(self) -> None:
        """Writes commands in order, all that wait in one message."""
        while True:
            commands = [await self._commands.get()]
            while not self._commands.empty():
                commands.append(self._commands.get_nowait())
            try:
                await self._call.write(link_pb2.ToEngine(commands=commands))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the receiving side reports why

    def _fail(self, reason: str) -> None:
        if self._failure is not None:
            return
        self._failure = reason
        if self._streams:
            logger.error("%s; %d open requests fail", reason, len(self._streams))
        for stream in set(self._streams.values()):
            stream.put(EngineUnavailable(reason))
        self.closed.set()
