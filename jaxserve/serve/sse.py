"""Answers over a connection that may break: server-sent events, and giving up work when the client is gone.

Knows ASGI and nothing of models. A client that reads slowly holds back only its own answer: `send` waits for its socket, and
`http_connection` cuts it when it waits too long.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

# Within JSON these can only be inside strings. SSE lines end at CR and LF alone, but Python's splitlines, which common clients use, ends
# them here too.
_LINE_ENDS = {text.encode(): json.dumps(text).strip('"').encode() for text in ("\u0085", "\u2028", "\u2029")}


def to_json(value: Any) -> bytes:
    """Compact UTF-8 JSON; NaN and infinities are our bug and raise ValueError."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


class ServerSentEvents(Response):
    """`data: {json}` lines, then `data: [DONE]`. When the client leaves, the generator is closed.

    Args:
        first: Sent first; None when there is nothing at all to send.
        chunks: What follows; already begun, so that closing it ends what it runs. It reports its own errors as chunks.
    """

    def __init__(self, first: dict[str, Any] | None, chunks: AsyncGenerator[dict[str, Any]]) -> None:
        self._first = first
        self._chunks = chunks
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        async with aclosing(self._chunks):
            await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        if self._first is not None:
            await self._send_event(send, self._first)
            async for chunk in self._chunks:
                await self._send_event(send, chunk)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    @staticmethod
    async def _send_event(send: Send, chunk: dict[str, Any]) -> None:
        line = to_json(chunk)
        for character, escape in _LINE_ENDS.items():
            line = line.replace(character, escape)
        await send({"type": "http.response.body", "body": b"data: " + line + b"\n\n", "more_body": True})


async def until_disconnect[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Runs `work`, cancelling it when the client disconnects; then the result is None. The body must have been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        logger.info("a client disconnected before its answer was complete")
        return None
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
