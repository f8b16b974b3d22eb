"""The events of one call on a front end, from the link to whoever reads them: merged while nobody does, and bounded.

What has to wait for the reader waits in the link's own compact messages, one for each sequence, so a client that does not read costs
the memory of its tokens alone. Knows no sockets and no text. Next: `link_client`, which fills it; `serve.service`, which reads it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Protocol

from jaxserve.core.events import TokenEvent
from jaxserve.core.request import Request
from jaxserve.core.sequence import FinishReason
from jaxserve.engine import link_codec, link_pb2
from jaxserve.errors import JaxserveError

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 2**20
"""What may wait for a reader; a call that has more is ended."""
MAX_WIDE_PENDING_BYTES = 64 * 2**20
"""The same for calls that ask for more than link_codec.FEW_LOGPROBS: one of their tokens may have a megabyte."""
TOKEN_BYTES = 8
"""Memory of a token that waits: four bytes, in an array that doubles as it grows."""
MEMORY_PER_WIRE_BYTE = 2
"""Log-probabilities take about twice the memory that they take on the wire."""


type ArrivedEvent = TokenEvent | link_pb2.Event
"""As `link_codec.decode_tokens` gives them, one token each, or as they came."""


class EventOwner(Protocol):
    """What a stream asks of the connection that it belongs to."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one of its sequences, in the engine."""

    def forget(self, request_id: str) -> None:
        """Wants no more events of the request."""


class _Pending:
    """What of one sequence waits to be read."""

    __slots__ = ("event", "is_own", "num_bytes")

    def __init__(self, event: ArrivedEvent) -> None:
        self.event = event
        self.is_own = False
        self.num_bytes = 0  # of what came on top of the first event

    def merge(self, event: ArrivedEvent) -> int:
        """Appends tokens and takes over the finish; returns the memory that this adds, in bytes."""
        own = self._own_message()
        num_bytes = TOKEN_BYTES * len(event.token_ids)
        if isinstance(event, TokenEvent) and event.logprobs is not None:
            event = link_codec.encode_event(event)
        if isinstance(event, TokenEvent):
            own.token_ids.extend(event.token_ids)
        else:
            event.ClearField("request_id")  # it would be stored again each time
            own.MergeFrom(event)
            if event.has_logprobs:
                num_bytes += MEMORY_PER_WIRE_BYTE * event.ByteSize()
        self.num_bytes += num_bytes
        return num_bytes

    def read(self) -> TokenEvent:
        """All of it as one event."""
        return self.event if isinstance(self.event, TokenEvent) else link_codec.decode_event(self.event)

    def _own_message(self) -> link_pb2.Event:
        if isinstance(self.event, TokenEvent):
            self.event, self.is_own = link_codec.encode_event(self.event), True
        elif not self.is_own:  # it keeps the whole message alive in which it came, with the events of all other sequences
            own = link_pb2.Event()
            own.CopyFrom(self.event)
            self.event, self.is_own = own, True
        return self.event


class EventStream:
    """The events of some requests, sequence by sequence in the order they arrive, until each sequence has finished.

    Events of a sequence that arrive before the reader asks for them come as one. Iterating raises InvalidRequest or Overloaded when
    the engine refuses a request and EngineUnavailable when it goes away, after what came before. Use from one asyncio loop only.

    Attributes:
        engine_ids: Of each request, by its id, the number of the engine that it was sent to; empty where there is but one.
    """

    def __init__(self, owner: EventOwner, requests: Sequence[Request]) -> None:
        self._owner = owner
        self._unfinished = {request.request_id: set(range(request.params.n)) for request in requests}
        self._num_prompt_tokens = {request.request_id: len(request.prompt_token_ids) for request in requests}
        self._num_cached_tokens: dict[str, int] = {}
        is_wide = any(not 0 <= (request.params.logprobs or 0) <= link_codec.FEW_LOGPROBS for request in requests)
        self._max_pending_bytes = MAX_WIDE_PENDING_BYTES if is_wide else MAX_PENDING_BYTES
        self._pending: dict[tuple[str, int], _Pending] = {}
        self._num_pending_bytes = 0
        self._error: JaxserveError | None = None
        self._is_ended = False
        self.engine_ids: dict[str, int] = {}
        self._arrival: asyncio.Future[None] | None = None  # what the reader waits for

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def is_ended(self) -> bool:
        """Whether what still ran was aborted, by `end`."""
        return self._is_ended

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        while self._unfinished:
            if self._pending:
                return self._take()
            if self._error is not None:
                self.close()
                raise self._error
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        raise StopAsyncIteration

    def put(self, event: ArrivedEvent) -> None:
        """Called by the client when an event arrives."""
        if self._is_ended or event.index not in self._unfinished.get(event.request_id, ()):
            return
        key = (event.request_id, event.index)
        if (pending := self._pending.get(key)) is None:
            self._pending[key] = _Pending(event)
        else:
            self._num_pending_bytes += pending.merge(event)
            if self._num_pending_bytes > self._max_pending_bytes:
                logger.warning("nobody reads request %s: more than %d bytes wait; ending it", key[0], self._max_pending_bytes)
                self.end()
        self._wake()

    def fail(self, request_id: str, error: JaxserveError) -> None:
        """Called by the client when a request was refused or its engine is gone; a request that has arrived whole cannot fail any more."""
        waiting = [self._pending.get((request_id, index)) for index in self._unfinished.get(request_id, ())]
        if any(pending is None or not pending.event.finish_reason for pending in waiting):
            self._error = error
            self._wake()

    def drop(self, request_id: str, index: int) -> None:
        """Aborts one sequence and yields no more events of it (its text hit a stop string)."""
        if index in self._unfinished.get(request_id, ()):
            self._forget_pending((request_id, index))
            self._finish(request_id, index)
            self._owner.abort(request_id, index)

    def end(self) -> None:
        """Aborts what still runs; its sequences yield what has arrived, and end with finish_reason abort."""
        if self._is_ended:
            return
        self._is_ended = True
        for request_id, indices in self._unfinished.items():
            self._owner.abort(request_id)
            for index in indices:
                self._end_sequence(request_id, index)
        self._wake()

    def close(self) -> None:
        """Aborts whatever still runs; nothing more is yielded."""
        for request_id in self._unfinished:
            if not self._is_ended:
                self._owner.abort(request_id)
            self._owner.forget(request_id)
        self._unfinished.clear()
        self._pending.clear()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _end_sequence(self, request_id: str, index: int) -> None:
        last = link_pb2.Event(
            request_id=request_id,
            index=index,
            num_prompt_tokens=self._num_prompt_tokens[request_id],
            num_cached_tokens=self._num_cached_tokens.get(request_id, 0),
            finish_reason=FinishReason.ABORT.value,
        )
        pending = self._pending.get((request_id, index))
        if pending is None:
            self._pending[request_id, index] = _Pending(last)
        elif not pending.event.finish_reason:
            pending.merge(last)

    def _take(self) -> TokenEvent:
        """The oldest event that waits."""
        key, pending = next(iter(self._pending.items()))
        self._forget_pending(key)
        event = pending.read()
        self._num_cached_tokens[event.request_id] = event.num_cached_tokens
        if event.finish_reason is not None:
            self._finish(*key)
        return event

    def _forget_pending(self, key: tuple[str, int]) -> None:
        if (pending := self._pending.pop(key, None)) is not None:
            self._num_pending_bytes -= pending.num_bytes

    def _finish(self, request_id: str, index: int) -> None:
        indices = self._unfinished[request_id]
        indices.discard(index)
        if not indices:
            del self._unfinished[request_id]
            self._owner.forget(request_id)
