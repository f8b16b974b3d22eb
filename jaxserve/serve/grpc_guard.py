"""What every RPC of ours has in common: the API key, errors as statuses, `x-request-id`, times, and clients that stop reading.

`Guard` wraps the handlers, so a servicer just raises `jaxserve.errors`. Knows no messages. Next: `grpc_engine`, `grpc_inference`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from jaxserve.errors import AuthenticationFailed, InvalidRequest, JaxserveError, Overloaded, response_for
from jaxserve.logs import request_id
from jaxserve.serve.auth import KeyCheck
from jaxserve.serve.http_guards import choose_request_id
from jaxserve.serve.request_metrics import arrival_s
from jaxserve.serve.tracing import caller_headers

logger = logging.getLogger(__name__)

SLOW_READER_S = 60.0
"""A client that takes nothing for this long is not read to any more."""
OPEN_METHODS = ("/grpc.health.v1.Health/", "/vllm.grpc.engine.VllmEngine/HealthCheck")
"""Beginnings of the methods that need no API key: probes have none."""
OUR_METHODS = ("/vllm.grpc.engine.", "/jaxserve.")
"""Beginnings of the methods whose errors we say; health and reflection say their own."""

type _Handle = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]
type _Handler = grpc.RpcMethodHandler[Any, Any]


class SlowReader(Exception):
    """The client has taken nothing for SLOW_READER_S."""


class Guard(grpc.aio.ServerInterceptor):
    """Refuses calls without a key and answers what handlers raise.

    Args:
        keys: Who may call.
    """

    def __init__(self, keys: KeyCheck) -> None:
        self._keys = keys
        self._wrapped: dict[str, _Handler] = {}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]], details: grpc.HandlerCallDetails
    ) -> _Handler | None:
        """The handler of a call, wrapped; or one that refuses it, before anything of the request is read."""
        if not details.method.startswith(OPEN_METHODS):
            try:
                self._keys.check(_text(details.invocation_metadata, "authorization"))
            except AuthenticationFailed as error:
                return _refusal(error)
        if not details.method.startswith(OUR_METHODS):
            return await continuation(details)
        if details.method not in self._wrapped:
            handler = await continuation(details)
            if handler is None:  # an unknown method: gRPC answers
                return handler
            self._wrapped[details.method] = _wrap(handler)
        return self._wrapped[details.method]


async def write(context: grpc.aio.ServicerContext, message: Any) -> None:
    """Sends a message of a stream once the client has room for it; raises SlowReader.

    gRPC holds at most 64 KiB for a client that does not read; then this waits, and the caller makes nothing new.
    """
    try:
        async with asyncio.timeout(SLOW_READER_S):
            await context.write(message)
    except TimeoutError:
        raise SlowReader(f"the client has not read for {SLOW_READER_S:g} s; its call is over.") from None


def name_call(given: str) -> str:
    """What a call is called: by its message, else by `x-request-id`. Log lines name it so from now on."""
    if given:
        request_id.set(given)
    return request_id.get()


def _wrap(handler: _Handler) -> _Handler:
    kind: Any = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    handle: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary
    # The handler reads the message itself: what cannot be read is the client's fault, which gRPC would log as an error of ours.
    assert handler.request_deserializer is not None
    wrapped: _Handler = kind(_answering_errors(handle, handler.request_deserializer), None, handler.response_serializer)
    return wrapped


def _answering_errors(handle: _Handle, read: Callable[[bytes], Any]) -> _Handle:
    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> Any:
        failure: Exception
        _take_metadata(context)
        try:
            return await handle(read(request), context)
        except grpc.aio.AbortError:
            raise
        except DecodeError:
            failure = InvalidRequest("the request is not a message of this call's type.")
        except Exception as error:
            failure = error
        return await _abort(context, failure)

    return answer


def _take_metadata(context: grpc.aio.ServicerContext) -> None:
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    caller_headers.set(metadata)
    arrival_s.set(time.perf_counter())
    chosen = choose_request_id(metadata.get("x-request-id"))
    request_id.set(chosen)
    context.set_trailing_metadata((("x-request-id", chosen),))


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """Ends the call with the status that `errors.RESPONSES` gives."""
    if isinstance(error, SlowReader):
        # Said when the client reads again, or never; nothing of the call is left but this.
        await context.abort(grpc.StatusCode.ABORTED, str(error))
    if isinstance(error, Overloaded):
        context.set_trailing_metadata((*context.trailing_metadata(), ("retry-after", str(max(1, math.ceil(error.retry_after_s))))))
    status = grpc.StatusCode[response_for(error).grpc_status]
    if isinstance(error, JaxserveError):
        await context.abort(status, str(error))
    logger.error("a call failed unexpectedly", exc_info=error)
    await context.abort(status, f"internal error: {type(error).__name__}")


def _refusal(error: AuthenticationFailed) -> _Handler:
    async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
        with suppress(grpc.aio.AbortError):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))

    return grpc.stream_stream_rpc_method_handler(refuse)


def _text(metadata: Any, name: str) -> str | None:
    """A value of the metadata, decoded; binary ones have other names."""
    return next((value for key, value in metadata or () if key == name and isinstance(value, str)), None)
