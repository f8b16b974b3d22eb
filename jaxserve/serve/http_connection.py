"""uvicorn as we want it: bounded headers, uploads and write buffers, and nobody may hold a connection by doing nothing.

A client that does not read has its answer wait in `send`; after SLOW_READER_S its connection is cut, and with it the call ends as if the
client had left. Knows ASGI and sockets, nothing of models.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxserve.config import ServerConfig
from jaxserve.serve import tls
from jaxserve.serve.http_errors import make_body
from jaxserve.serve.http_guards import choose_request_id
from jaxserve.serve.sse import to_json

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 60
SLOW_READER_S = 60.0
"""A connection whose write buffer stays full this long is cut."""
HEADERS_S = 30.0
"""Time for a request's headers, and for the rest of a body that was refused."""
UPLOAD_S = 30.0
MIN_UPLOAD_BYTES_PER_S = 64 * 1024
"""A body has UPLOAD_S, and more time for what has arrived at this rate."""
MAX_HEADER_BYTES = 32 * 1024
WRITE_BUFFER_BYTES = 64 * 1024
SEND_BUFFER_BYTES = 256 * 1024
"""In the kernel, which would otherwise let it grow to megabytes for each client that does not read; it takes about twice this."""


def uvicorn_config(app: Any, config: ServerConfig, *, flush_s: int) -> uvicorn.Config:
    """How uvicorn serves the app; raises ConfigError when the certificates cannot be used.

    Args:
        app: ASGI.
        config: The server's.
        flush_s: Seconds that clients have, when the server stops, to read what was sent.
    """
    # Its warnings are about what strangers sent, and advise to install what is left out on purpose.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=flush_s,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        **tls.uvicorn_options(config),
    )


class HttpConnection(H11Protocol):
    """One connection."""

    _reader_timer: asyncio.TimerHandle | None = None
    _upload_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Bounds the buffers; the first request is owed from here on."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._watch_upload()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers."""
        self._stop_upload_timer()
        self._stop_reader_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes what the client sent."""
        # h11 measures headers while they are not complete: what comes at once must not get past its limit.
        for start in range(0, len(data), MAX_HEADER_BYTES):
            if not self.transport.is_closing():
                super().data_received(data[start : start + MAX_HEADER_BYTES])
        self._watch_upload()

    def on_response_complete(self) -> None:
        """Begins to wait for the next request."""
        super().on_response_complete()
        self._watch_upload()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        super().pause_writing()
        self._stop_reader_timer()
        self._reader_timer = self.loop.call_later(SLOW_READER_S, self._cut, f"its client has read too little for {SLOW_READER_S:g} s")

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._stop_reader_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection ends, and one whose client has not even read its last answer."""
        if self.transport.get_write_buffer_size():
            self._cut("its client has not read its answer")
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, or has too long headers."""
        message = f"the request is not valid HTTP/1.1, or its headers are larger than {MAX_HEADER_BYTES} bytes."
        body = to_json(make_body(message, "BadRequestError", 400))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        headers.append(("x-request-id", choose_request_id(None)))
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_upload(self) -> None:
        """Whether headers have begun, or a body goes on that is not wanted any more, the client has HEADERS_S to get to the end."""
        states = self.conn.states
        is_before_first = self.cycle is None
        has_part_of_headers = states[h11.CLIENT] is h11.IDLE and bool(self.conn.trailing_data[0])
        is_refused = self.cycle is not None and self.cycle.response_complete and states[h11.CLIENT] is h11.SEND_BODY
        if not (is_before_first or has_part_of_headers or is_refused):
            self._stop_upload_timer()
        elif self._upload_timer is None:
            self._upload_timer = self.loop.call_later(HEADERS_S, self._cut, f"its client has not sent a whole request in {HEADERS_S:g} s")

    def _cut(self, reason: str) -> None:
        """Ends the connection at once, with what is still unsent."""
        logger.info("a connection is cut: %s", reason)
        self.transport.abort()

    def _stop_upload_timer(self) -> None:
        if self._upload_timer is not None:
            self._upload_timer.cancel()
            self._upload_timer = None

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body; raises HTTPException 413 as soon as it is larger than allowed, and 408 when it comes too slowly."""
    too_large = HTTPException(413, f"the body is larger than {max_bytes} bytes; shorten it, or start the server with --max-request-bytes.")
    if int(request.headers.get("content-length") or 0) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    start = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(UPLOAD_S) as timer:
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise too_large
                parts.append(part)
                timer.reschedule(start + UPLOAD_S + size / MIN_UPLOAD_BYTES_PER_S)
    except TimeoutError:
        message = f"only {size} bytes of the body came within {UPLOAD_S:g} s; a body must come at {MIN_UPLOAD_BYTES_PER_S} bytes a second."
        raise HTTPException(408, message, headers={"Connection": "close"}) from None
    return b"".join(parts)
