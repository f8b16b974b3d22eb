"""The engine process's only door: EngineLink over gRPC, on a Unix socket in a private directory (or TCP on purpose).

Runs in asyncio beside the loop's thread: it turns commands into calls of `LoopClient` and each `Output` into one message. It
never touches the engine itself. `run_engine_process` is the body of an engine process. Next: `link_client`, the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc

from jaxserve.engine import link_codec, link_pb2, link_pb2_grpc
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.loop import EngineLoop, LoopClient, Output, StepEngine

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 * 2**20
SPLIT_BYTES = MAX_MESSAGE_BYTES // 8
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]


class LinkService(link_pb2_grpc.EngineLinkServicer):
    """EngineLink in front of one loop."""

    def __init__(self, loop: EngineLoop, info: EngineInfo) -> None:
        self._loop = loop
        self._info_json = info.to_json()

    async def GetInfo(self, request: link_pb2.GetInfoRequest, context: grpc.aio.ServicerContext) -> link_pb2.GetInfoResponse:
        """The engine's facts."""
        return link_pb2.GetInfoResponse(info_json=self._info_json)

    async def Connect(
        self, request_iterator: AsyncIterator[link_pb2.ToEngine], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[link_pb2.FromEngine]:
        """One front end's stream; its end, however it comes, aborts the front end's requests."""
        aio_loop = asyncio.get_running_loop()
        outbox: asyncio.Queue[Output | None] = asyncio.Queue()

        def deliver(output: Output) -> None:
            # The asyncio loop is gone only when the process is ending.
            with contextlib.suppress(RuntimeError):
                aio_loop.call_soon_threadsafe(outbox.put_nowait, output)

        client = self._loop.connect(deliver)
        reader = asyncio.create_task(self._read(request_iterator, client, outbox))
        logger.info("a front end connected")
        try:
            while (output := await outbox.get()) is not None:
                for message in _messages(output):
                    yield message
                if output.failure is not None:
                    return
        finally:
            reader.cancel()
            client.close()
            logger.info("a front end disconnected")

    @staticmethod
    async def _read(request_iterator: AsyncIterator[link_pb2.ToEngine], client: LoopClient, outbox: asyncio.Queue[Output | None]) -> None:
        try:
            async for message in request_iterator:
                for command in message.commands:
                    if command.HasField("add"):
                        _add(client, command.add)
                    else:
                        abort = command.abort
                        client.abort(abort.request_id, abort.index if abort.HasField("index") else None)
        finally:
            outbox.put_nowait(None)


def _add(client: LoopClient, add: link_pb2.Add) -> None:
    try:
        request = link_codec.decode_add(add)
    except Exception as error:
        client.deliver(Output(rejections=[(add.request_id, error)]))
    else:
        client.add(request)


def _messages(output: Output) -> Iterator[link_pb2.FromEngine]:
    """The output as one message, or as several where log-probabilities would make it too large for the link."""
    message, size = link_pb2.FromEngine(), 0
    for event in output.events:
        encoded = link_codec.encode_event(event)
        message.events.append(encoded)
        size += encoded.ByteSize() if event.logprobs or event.prompt_logprobs else 0
        if size > SPLIT_BYTES:
            yield message
            message, size = link_pb2.FromEngine(), 0
    message.rejections.extend(link_codec.encode_rejection(request_id, error) for request_id, error in output.rejections)
    message.failure = output.failure or ""
    yield message


async def start_link_server(loop: EngineLoop, info: EngineInfo, address: str) -> grpc.aio.Server:
    """Opens the door at `unix:/path` (a missing directory is made, for this user only) or `host:port`; RuntimeError when it cannot."""
    if address.startswith("unix:"):
        socket_path = Path(address.removeprefix("unix:"))
        socket_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        socket_path.unlink(missing_ok=True)
    server = grpc.aio.server(options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
    link_pb2_grpc.add_EngineLinkServicer_to_server(LinkService(loop, info), server)
    server.add_insecure_port(address)
    await server.start()
    return server


def run_engine_process(engine: StepEngine, info: EngineInfo, address: str, on_ready: Callable[[], None]) -> int:
    """Serves the engine until SIGTERM or SIGINT (returns 0) or until the engine cannot go on (returns 1)."""
    return asyncio.run(_serve(engine, info, address, on_ready))


async def _serve(engine: StepEngine, info: EngineInfo, address: str, on_ready: Callable[[], None]) -> int:
    aio_loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = aio_loop.create_future()

    def end(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    for signum in (signal.SIGTERM, signal.SIGINT):
        aio_loop.add_signal_handler(signum, end, 0)

    def on_failure(error: BaseException) -> None:
        aio_loop.call_soon_threadsafe(end, 1)

    loop = EngineLoop(engine, on_failure=on_failure)
    loop.start()
    server = await start_link_server(loop, info, address)
    logger.info("engine ready at %s (process %d)", address, os.getpid())
    on_ready()
    status = await ended
    await asyncio.to_thread(loop.stop)
    await server.stop(grace=1.0)
    return status
