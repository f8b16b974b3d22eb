"""The engine process's only door: EngineLink over gRPC, on a Unix socket in a private directory (or TCP on purpose).

Runs in asyncio beside the loop's thread: it turns commands into calls of `LoopClient` and each `Output` into one message, and sends
the engine's figures once a second, whatever that thread does. It never touches the engine itself. `run_engine_process` is the body of an
engine process. Next: `link_client`, the other end; `watchdog`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn

import grpc

from jaxserve.engine import link_codec, link_pb2, link_pb2_grpc
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.loop import EngineLoop, LoopClient, Output, StepEngine
from jaxserve.engine.profiler import Profiler
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.stats_log import log_stats
from jaxserve.engine.watchdog import wait_for_stall
from jaxserve.errors import EngineUnavailable, InvalidRequest

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 * 2**20
SPLIT_BYTES = MAX_MESSAGE_BYTES // 8
HEARTBEAT_S = 1.0
STOP_S = 10.0
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]

type _Outbox = asyncio.Queue[Output | EngineStats | None]
"""What a front end is still to be sent; None ends its stream."""


class LinkService(link_pb2_grpc.EngineLinkServicer):
    """EngineLink in front of one loop."""

    def __init__(self, loop: EngineLoop, info: EngineInfo, profiler: Profiler, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._loop = loop
        self._info_json = info.to_json()
        self._profiler = profiler
        self._heartbeat_s = heartbeat_s
        self._outboxes: set[_Outbox] = set()

    async def GetInfo(self, request: link_pb2.GetInfoRequest, context: grpc.aio.ServicerContext) -> link_pb2.GetInfoResponse:
        """The engine's facts."""
        return link_pb2.GetInfoResponse(info_json=self._info_json)

    async def GetStats(self, request: link_pb2.GetStatsRequest, context: grpc.aio.ServicerContext) -> link_pb2.EngineStats:
        """The engine's figures right now."""
        return link_codec.encode_stats(self._loop.stats())

    async def FlushCache(self, request: link_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext) -> link_pb2.FlushCacheResponse:
        """Forgets all known prefixes, between two steps."""
        try:
            is_flushed = await asyncio.wrap_future(self._loop.reset_prefix_cache())
        except EngineUnavailable as error:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, error)
        return link_pb2.FlushCacheResponse(is_flushed=is_flushed)

    async def StartProfile(self, request: link_pb2.StartProfileRequest, context: grpc.aio.ServicerContext) -> link_pb2.StartProfileResponse:
        """Starts a trace of this process."""
        try:
            await asyncio.to_thread(self._profiler.start, request.directory)
        except InvalidRequest as error:
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, error)
        return link_pb2.StartProfileResponse()

    async def StopProfile(self, request: link_pb2.StopProfileRequest, context: grpc.aio.ServicerContext) -> link_pb2.StopProfileResponse:
        """Ends the trace."""
        try:
            directory = await asyncio.to_thread(self._profiler.stop)
        except InvalidRequest as error:
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, error)
        return link_pb2.StopProfileResponse(directory=directory)

    def fail(self, reason: str) -> None:
        """Tells every front end that nothing more will come, in place of a loop whose thread hangs."""
        for outbox in self._outboxes:
            outbox.put_nowait(Output(failure=reason))

    async def Connect(
        self, request_iterator: AsyncIterator[link_pb2.ToEngine], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[link_pb2.FromEngine]:
        """One front end's stream; its end, however it comes, aborts the front end's requests."""
        aio_loop = asyncio.get_running_loop()
        outbox: _Outbox = asyncio.Queue()

        def deliver(output: Output) -> None:
            # The asyncio loop is gone only when the process is ending.
            with contextlib.suppress(RuntimeError):
                aio_loop.call_soon_threadsafe(outbox.put_nowait, output)

        client = self._loop.connect(deliver)
        tasks = [asyncio.create_task(self._read(request_iterator, client, outbox)), asyncio.create_task(self._beat(outbox))]
        self._outboxes.add(outbox)
        logger.info("a front end connected")
        try:
            while (output := await outbox.get()) is not None:
                if isinstance(output, EngineStats):
                    yield link_pb2.FromEngine(heartbeat=link_codec.encode_stats(output))
                    continue
                for message in encode_output(output):
                    yield message
                if output.failure is not None:
                    return
        finally:
            self._outboxes.discard(outbox)
            for task in tasks:
                task.cancel()
            client.close()
            logger.info("a front end disconnected")

    async def _read(self, request_iterator: AsyncIterator[link_pb2.ToEngine], client: LoopClient, outbox: _Outbox) -> None:
        try:
            async for message in request_iterator:
                for command in message.commands:
                    self._obey(client, command)
        finally:
            outbox.put_nowait(None)

    def _obey(self, client: LoopClient, command: link_pb2.Command) -> None:
        match command.WhichOneof("command"):
            case "add":
                _add(client, command.add)
            case "abort":
                client.abort(command.abort.request_id, command.abort.index if command.abort.HasField("index") else None)
            case "abort_label":
                self._loop.abort_label(command.abort_label.label)

    async def _beat(self, outbox: _Outbox) -> None:
        # The first at once: the front end may begin. A loop that has ended said so before.
        while True:
            if outbox.empty():  # a front end that reads nothing, such as a stopped one, must not pile them up
                outbox.put_nowait(self._loop.stats())
            await asyncio.sleep(self._heartbeat_s)


def _add(client: LoopClient, add: link_pb2.Add) -> None:
    try:
        client.add(link_codec.decode_add(add))
    except Exception as error:
        client.deliver(Output(rejections=[(add.request_id, error)]))


async def _refuse(context: grpc.aio.ServicerContext, code: grpc.StatusCode, error: Exception) -> NoReturn:
    await context.abort(code, str(error))


def encode_output(output: Output) -> Iterator[link_pb2.FromEngine]:
    """The output as one message, or as several where log-probabilities would make it too large for the link."""
    message, size = link_pb2.FromEngine(), 0
    for event in link_codec.fill_tokens(message.tokens, output.events):
        encoded = message.events.add()
        link_codec.fill_event(encoded, event)
        if event.logprobs or event.prompt_logprobs:
            size += encoded.ByteSize()
            if size > SPLIT_BYTES:
                yield message
                message, size = link_pb2.FromEngine(), 0
    message.rejections.extend(link_codec.encode_rejection(request_id, error) for request_id, error in output.rejections)
    message.failure = output.failure or ""
    yield message


async def start_link_server(
    loop: EngineLoop, info: EngineInfo, address: str, profiler: Profiler | None = None, *, heartbeat_s: float = HEARTBEAT_S
) -> grpc.aio.Server:
    """Opens the door at `unix:/path` (a missing directory is made, for this user only) or `host:port`; RuntimeError when it cannot."""
    return await _open_door(LinkService(loop, info, profiler or Profiler(), heartbeat_s), address)


async def _open_door(service: LinkService, address: str) -> grpc.aio.Server:
    if address.startswith("unix:"):
        socket_path = Path(address.removeprefix("unix:"))
        socket_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        socket_path.unlink(missing_ok=True)
    server = grpc.aio.server(options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
    link_pb2_grpc.add_EngineLinkServicer_to_server(service, server)
    server.add_insecure_port(address)
    await server.start()
    return server


def run_engine_process(
    engine: StepEngine,
    info: EngineInfo,
    address: str,
    on_ready: Callable[[], None],
    *,
    stall_timeout_s: float = 60.0,
    profiler: Profiler | None = None,
    beat: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> int:
    """Serves the engine until SIGTERM or SIGINT, then returns 0. Refuses requests beyond `info.max_waiting`.

    `beat` runs meanwhile and tells the supervisor that this process lives (`child_process.Reports.beat`).

    Where the engine cannot go on, or a step takes longer than `stall_timeout_s`, the process ends with status 1 as soon as the front
    ends know why.
    """
    return asyncio.run(_serve(engine, info, address, on_ready, stall_timeout_s, profiler or Profiler(), beat))


async def _serve(
    engine: StepEngine,
    info: EngineInfo,
    address: str,
    on_ready: Callable[[], None],
    stall_timeout_s: float,
    profiler: Profiler,
    beat: Callable[[], Coroutine[Any, Any, None]] | None,
) -> int:
    aio_loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = aio_loop.create_future()

    def end(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    for signum in (signal.SIGTERM, signal.SIGINT):
        aio_loop.add_signal_handler(signum, end, 0)

    def on_failure(error: BaseException) -> None:
        aio_loop.call_soon_threadsafe(end, 1)

    loop = EngineLoop(engine, max_waiting=info.max_waiting, on_failure=on_failure)
    loop.start()
    service = LinkService(loop, info, profiler)

    async def end_if_stalled() -> None:
        service.fail(await wait_for_stall(loop.stats, stall_timeout_s))
        end(1)

    server = await _open_door(service, address)
    logger.info("engine ready at %s (process %d)", address, os.getpid())
    on_ready()
    tasks = [asyncio.create_task(task) for task in (end_if_stalled(), log_stats(loop.stats), *([beat()] if beat else []))]
    status = await ended
    for task in tasks:
        task.cancel()
    has_stopped = await asyncio.to_thread(loop.stop, 0 if status else STOP_S)
    await server.stop(grace=1.0)
    if status or not has_stopped:
        os._exit(1)  # a broken or hung engine cannot be taken apart in order: it might keep the process for ever
    return status
