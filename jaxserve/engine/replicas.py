"""A front end's side of all engines of its server: one link to each, and requests spread over them. asyncio; imports no JAX.

Looks like one `EngineClient`, and with one engine is little more. A request goes to one engine with all its sequences; the requests of a
call may go to several. It serves while one engine does. What was sent to an engine that goes away fails, as some of it may have been
answered; what an engine has no room for is sent to the next one, and refused when all have said so. Next: `routing`, which chooses;
`link_client`, which sends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from jaxserve.core.request import Request
from jaxserve.engine.event_stream import EventStream
from jaxserve.engine.info import EngineInfo, engine_name, smallest
from jaxserve.engine.link_client import EngineClient
from jaxserve.engine.routing import Router, fingerprints
from jaxserve.engine.stats import EngineStats
from jaxserve.errors import EngineUnavailable, InvalidRequest, JaxserveError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sent:
    """A request that has not ended."""

    request: Request
    stream: EventStream
    chain: list[int]
    engine: int
    full: set[int] = field(default_factory=set)
    """Engines that had no room for it."""
    is_pinned: bool = False
    is_aborted: bool = False
    """By its label: an engine that it is sent to after that knows nothing of it."""


class Replicas:
    """The engines of one server as one front end sees them. Use from one asyncio loop only.

    Args:
        addresses: Of EngineLink of each; its place here is an engine's number.
        max_stall_s: As for `EngineClient`.

    Attributes:
        engines: The link to each.
    """

    def __init__(self, addresses: Sequence[str], *, max_stall_s: float = 30.0) -> None:
        self.engines = [
            EngineClient(
                address, max_stall_s=max_stall_s, name=engine_name(i, len(addresses)), on_overloaded=partial(self._on_overloaded, i)
            )
            for i, address in enumerate(addresses)
        ]
        self._router = Router(len(addresses))
        self._num_connections = [0] * len(addresses)
        self._sent: dict[str, _Sent] = {}
        self._listeners: list[Callable[[], None]] = []
        for i, engine in enumerate(self.engines):
            engine.add_listener(partial(self._on_change, i))

    def start(self) -> None:
        """Begins to connect to all; returns at once."""
        for engine in self.engines:
            engine.start()

    async def wait_until_connected(self) -> None:
        """Returns once there is an engine."""
        waiting = [asyncio.create_task(engine.wait_until_connected()) for engine in self.engines]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    async def close(self) -> None:
        """Ends the connections; the engines abort what is open."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    @property
    def info(self) -> EngineInfo:
        """The facts of the engine that takes least, so that what fits it fits all; EngineUnavailable before the first connection."""
        known = [engine.info for engine in self.engines if engine.num_connections]
        if not known:
            raise EngineUnavailable(self.why)
        return smallest(known)

    @property
    def is_healthy(self) -> bool:
        """Whether there is an engine that is heard of and makes progress."""
        return any(engine.is_healthy for engine in self.engines)

    @property
    def why(self) -> str:
        """Why no engine is healthy, as a client may read it; empty when one is."""
        if self.is_healthy:
            return ""
        # One that was there before tells more than those that still load.
        return next((engine.why for engine in self.engines if engine.num_connections), self.engines[0].why)

    @property
    def num_open(self) -> int:
        """Requests that this front end is waiting for."""
        return len(self._sent)

    @property
    def num_sequences(self) -> int:
        """Sequences that run or wait in all engines, of every front end, as of the last heartbeats."""
        return sum(stats.num_running + stats.num_waiting for engine in self.engines if (stats := engine.last_stats) is not None)

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Calls back, in the asyncio loop, whenever the health of an engine has changed."""
        self._listeners.append(callback)

    def generate(self, *requests: Request, engine: int | None = None) -> EventStream:
        """Sends requests; their ids must be unused.

        Args:
            requests: What is to be computed.
            engine: The number of the one that is to do it; None chooses.

        Raises:
            EngineUnavailable: No engine is there, or not that one.
        """
        if engine is not None and not self.engines[engine].is_connected:
            raise EngineUnavailable(self.engines[engine].why)
        if not any(each.is_connected for each in self.engines):
            raise EngineUnavailable(self.why)
        stream = EventStream(self, requests)
        for request in requests:
            chain = fingerprints(request, self.info.page_size) if len(self.engines) > 1 else []
            if engine is None:
                chosen = self._choose(chain)
            else:
                self._router.remember(chain, chosen := engine)
            self._send(_Sent(request, stream, chain, chosen, is_pinned=engine is not None))
        return stream

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request or one of its sequences; a stream still open gets its events with finish_reason abort."""
        if (sent := self._sent.get(request_id)) is not None:
            self.engines[sent.engine].abort(request_id, index)

    def forget(self, request_id: str) -> None:
        """Called by a stream that wants no more events."""
        if (sent := self._sent.pop(request_id, None)) is not None:
            self.engines[sent.engine].forget(request_id)

    def abort_label(self, label: str) -> None:
        """Ends every request with this label, whichever front end it came from and wherever it runs."""
        for sent in self._sent.values():
            sent.is_aborted = sent.is_aborted or (bool(label) and sent.request.label == label)
        for engine in self.engines:
            engine.abort_label(label)

    def abort_all(self) -> None:
        """Ends every open request of this front end with finish_reason abort, without waiting for the engines."""
        for stream in {sent.stream for sent in self._sent.values()}:
            stream.end()

    async def stats(self) -> dict[int, EngineStats]:
        """The figures right now of the engines that answer, by their numbers; EngineUnavailable when none does."""
        answers = await self._ask(lambda _, engine: engine.stats())
        return {i: answer for i, answer in answers.items() if isinstance(answer, EngineStats)}

    async def flush_cache(self) -> bool:
        """Makes all engines forget all known prefixes; False when one refuses, as pages are in use, or is too busy to answer."""
        answers = await self._ask(lambda _, engine: engine.flush_cache())
        for i, is_flushed in answers.items():
            if is_flushed is True:
                self._router.forget(i)
        return all(answer is True for answer in answers.values())

    async def start_profile(self, directory: str) -> None:
        """Starts a trace of every engine, into a directory of its own in this one where there are several.

        Raises InvalidRequest when one runs already, and EngineUnavailable when an engine that is there does not answer; then none is
        started.
        """
        answers = await self._ask(lambda i, engine: engine.start_profile(self._profile_directory(directory, i)))
        errors = [answer for answer in answers.values() if answer is not None]
        if errors:
            started = [self.engines[i].stop_profile() for i, answer in answers.items() if answer is None]
            await asyncio.gather(*started, return_exceptions=True)
            raise errors[0]

    async def stop_profile(self) -> str:
        """Ends the traces and returns the directory; raises InvalidRequest when no engine that answers has one."""
        answers = await self._ask(lambda _, engine: engine.stop_profile())
        directories = [answer for answer in answers.values() if isinstance(answer, str)]
        if not directories:
            raise next(answer for answer in answers.values() if isinstance(answer, InvalidRequest))
        return directories[0] if len(self.engines) == 1 else str(Path(directories[0]).parent)

    def _profile_directory(self, directory: str, engine: int) -> str:
        return directory if len(self.engines) == 1 else str(Path(directory) / f"engine-{engine}")

    async def _ask[T](self, question: Callable[[int, EngineClient], Awaitable[T]]) -> dict[int, T | JaxserveError]:
        """What each engine answers that is there, or why it does not; raises EngineUnavailable when none answers."""

        async def ask(i: int, engine: EngineClient) -> T | JaxserveError:
            try:
                return await question(i, engine)
            except JaxserveError as error:
                return error

        answers = await asyncio.gather(*(ask(i, engine) for i, engine in enumerate(self.engines)))
        silent = [answer for answer in answers if isinstance(answer, EngineUnavailable)]
        if len(silent) == len(answers):
            raise silent[0]
        return {i: answer for i, answer in enumerate(answers) if self.engines[i].is_connected or not isinstance(answer, EngineUnavailable)}

    def _choose(self, chain: list[int], full: Set[int] = frozenset()) -> int:
        """The engine for a request, among those that are not full; there must be one that is connected."""
        left = {i: engine for i, engine in enumerate(self.engines) if i not in full and engine.is_connected}
        healthy = {i: engine.load for i, engine in left.items() if engine.is_healthy}
        return self._router.choose(chain, healthy or {i: engine.load for i, engine in left.items()})

    def _send(self, sent: _Sent) -> None:
        self._sent[sent.request.request_id] = sent
        sent.stream.engine_ids[sent.request.request_id] = sent.engine
        self.engines[sent.engine].send(sent.request, sent.stream)

    def _on_overloaded(self, engine: int, request_id: str) -> bool:
        """The engine has no room for a request: another one may have. Returns whether it was sent there."""
        sent = self._sent.get(request_id)
        if sent is None or sent.stream.is_ended:
            return False
        if sent.is_aborted:
            sent.stream.end()  # a label is that of a whole call
            return True
        if sent.is_pinned:
            return False
        sent.full.add(engine)
        if not any(other.is_healthy for i, other in enumerate(self.engines) if i not in sent.full):
            return False
        self.engines[engine].forget(request_id)
        sent.engine = self._choose(sent.chain, sent.full)
        self._send(sent)
        return True

    def _on_change(self, engine: int) -> None:
        if self._num_connections[engine] != (number := self.engines[engine].num_connections):
            self._num_connections[engine] = number
            self._router.forget(engine)
        for callback in self._listeners:
            callback()
