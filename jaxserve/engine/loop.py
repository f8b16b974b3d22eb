"""The thread that owns the Engine: it takes commands from any thread, turns the engine while there is work, hands out events.

A *client* here is whoever sends requests and owns them (one front end over EngineLink, or a caller in this process). Everything
that touches the engine happens in the one thread; clients only put commands into its inbox. A client that disconnects has all of
its requests aborted before the next step. Figures can be read from any thread, also while a step runs or hangs. Knows no sockets and
no text. Next: `engine.engine` (one turn), `waiting_limit`, `link_server`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Protocol

from jaxserve.core.events import TokenEvent
from jaxserve.core.request import Request
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.waiting_limit import WaitingLimit
from jaxserve.errors import EngineUnavailable

logger = logging.getLogger(__name__)


class StepEngine(Protocol):
    """The part of `engine.Engine` that the loop turns."""

    info: EngineInfo

    def add(self, request: Request) -> None:
        """Queues a request; raises for one that can never run."""

    def abort(self, request_id: str, index: int | None = None) -> list[TokenEvent]:
        """Ends a request or one of its sequences."""

    @property
    def has_work(self) -> bool:
        """True while any sequence waits or runs."""

    def step(self) -> list[TokenEvent]:
        """Advances the scheduled sequences; raises when the engine cannot go on."""

    def stats(self) -> EngineStats:
        """Figures right now, and totals since the engine started."""

    def reset_prefix_cache(self) -> bool:
        """Forgets all known prefixes; refused (False) while any page is in use."""


@dataclass(slots=True)
class Output:
    """What one turn of the loop produced for one client.

    Attributes:
        events: In order; of several requests.
        rejections: Requests that the engine refused, with the reason.
        failure: Set on the last output a client ever gets: the engine ends, and why.
    """

    events: list[TokenEvent] = field(default_factory=list)
    rejections: list[tuple[str, Exception]] = field(default_factory=list)
    failure: str | None = None


class LoopClient:
    """One owner of requests. Its methods may be called from any thread and never block."""

    def __init__(self, inbox: SimpleQueue[Callable[[], None]], loop: EngineLoop, deliver: Callable[[Output], None]) -> None:
        self._inbox = inbox
        self._loop = loop
        self.deliver = deliver
        self.request_ids: set[str] = set()  # touched by the loop's thread only

    def add(self, request: Request) -> None:
        """Queues the request; what the engine refuses comes back as an Output. Raises Overloaded at once where too many wait."""
        self._loop._limit.take(request.params.n, self._loop._figures)
        self._inbox.put(lambda: self._loop._add(self, request))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request of this client; the events with `abort` come back as an Output."""
        self._inbox.put(lambda: self._loop._abort(self, request_id, index))

    def close(self) -> None:
        """Aborts everything of this client and delivers nothing more."""
        self._inbox.put(lambda: self._loop._disconnect(self))


@dataclass(slots=True)
class _Open:
    client: LoopClient
    label: str
    num_unfinished: int


class EngineLoop:
    """Turns an engine in a thread of its own.

    Args:
        engine: Owned by the loop from `start` on; nobody else may call it.
        max_waiting: Most sequences that may wait; 0 is no limit.
        on_failure: Called once from the loop's thread when the engine cannot go on.
    """

    def __init__(self, engine: StepEngine, *, max_waiting: int = 0, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._engine = engine
        self._limit = WaitingLimit(max_waiting, engine.info.max_num_seqs if max_waiting else 0)
        self._on_failure = on_failure
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open: dict[str, _Open] = {}
        self._clients: set[LoopClient] = set()
        self._outputs: dict[LoopClient, Output] = {}
        self._figures = EngineStats()  # of the engine after the latest turn; replaced as a whole, so any thread may read it
        self._working_since_s: float | None = None  # the start of the turn that has not ended yet; None without work
        self._failure: str | None = None
        self._ending_lock = threading.Lock()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the thread after the step it is in; open requests get a final Output that says so. False when it did not end in time."""

        def stop() -> None:
            self._is_stopping = True

        self._inbox.put(stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def connect(self, deliver: Callable[[Output], None]) -> LoopClient:
        """A new client. `deliver` is called from the loop's thread, at most once a turn, and must not block."""
        client = LoopClient(self._inbox, self, deliver)
        with self._ending_lock:
            if self._failure is None:
                self._inbox.put(lambda: self._connect(client))
            else:
                deliver(Output(failure=self._failure))
        return client

    def abort_label(self, label: str) -> None:
        """Ends every request of every client that bears the label; the events come to the clients as Outputs. "" is no label."""
        if label:
            self._inbox.put(lambda: self._abort_label(label))

    def call[T](self, function: Callable[[], T]) -> Future[T]:
        """Runs a function in the loop's thread between two steps. The result is EngineUnavailable once the loop has ended."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():  # whoever asked has gone away meanwhile
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        with self._ending_lock:
            if self._failure is None:
                self._inbox.put(run)
            else:
                future.set_exception(EngineUnavailable(self._failure))
        return future

    def reset_prefix_cache(self) -> Future[bool]:
        """Makes the engine forget all known prefixes; refused (False) while any page is in use."""
        return self.call(self._engine.reset_prefix_cache)

    def stats(self) -> EngineStats:
        """Figures as of the latest turn, from any thread, without waiting for the loop's. What is in the inbox counts as waiting."""
        figures, since_s = self._figures, self._working_since_s
        return replace(
            figures,
            has_work=since_s is not None,
            seconds_since_progress=0.0 if since_s is None else time.monotonic() - since_s,
            num_waiting=max(figures.num_waiting, self._limit.num_open - figures.num_running),
        )

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._take_commands()
                if self._engine.has_work and not self._is_stopping:
                    self._emit(self._engine.step())
                self._note_progress()
                self._deliver()
            self._end("the engine is shutting down")
        except BaseException as error:
            logger.critical("the engine cannot go on", exc_info=error)
            self._end(f"the engine failed: {type(error).__name__}: {error}")
            if self._on_failure is not None:
                self._on_failure(error)

    def _take_commands(self) -> None:
        """Runs every command in the inbox; waits for one when there is nothing else to do."""
        is_idle = not self._engine.has_work
        while True:
            try:
                command = self._inbox.get(block=is_idle)
            except Empty:
                break
            if is_idle:
                self._working_since_s, is_idle = time.monotonic(), False
            command()
        if self._outputs:  # refusals and aborts need not wait for the step that follows
            self._note_progress()
            self._deliver()

    def _note_progress(self) -> None:
        self._figures = self._engine.stats()
        self._working_since_s = time.monotonic() if self._figures.has_work else None

    def _connect(self, client: LoopClient) -> None:
        self._clients.add(client)

    def _disconnect(self, client: LoopClient) -> None:
        self._clients.discard(client)
        self._outputs.pop(client, None)
        for request_id in client.request_ids:
            self._engine.abort(request_id)
            self._limit.give_back(self._open.pop(request_id).num_unfinished)
        if client.request_ids:
            logger.info("a client disconnected; aborted its %d open requests", len(client.request_ids))
        client.request_ids.clear()

    def _add(self, client: LoopClient, request: Request) -> None:
        if client not in self._clients:
            self._limit.give_back(request.params.n)
            return
        assert request.request_id not in self._open, f"request id {request.request_id} is in use"
        try:
            self._engine.add(request)
        except Exception as error:
            self._limit.give_back(request.params.n)
            self._output(client).rejections.append((request.request_id, error))
            return
        self._open[request.request_id] = _Open(client, request.label, request.params.n)
        client.request_ids.add(request.request_id)

    def _abort(self, client: LoopClient, request_id: str, index: int | None) -> None:
        if request_id in client.request_ids:
            self._emit(self._engine.abort(request_id, index))

    def _abort_label(self, label: str) -> None:
        for request_id in [request_id for request_id, request in self._open.items() if request.label == label]:
            self._emit(self._engine.abort(request_id))

    def _emit(self, events: list[TokenEvent]) -> None:
        """Sorts events into the outputs of the clients that own them."""
        client = None
        for event in events:
            request = self._open.get(event.request_id)
            if request is None:
                continue
            if request.client is not client:
                client = request.client
                own_events = self._output(client).events
            own_events.append(event)
            if event.finish_reason is None:
                continue
            request.num_unfinished -= 1
            self._limit.give_back(1)
            if not request.num_unfinished:
                del self._open[event.request_id]
                request.client.request_ids.discard(event.request_id)

    def _output(self, client: LoopClient) -> Output:
        output = self._outputs.get(client)
        if output is None:
            output = self._outputs[client] = Output()
        return output

    def _deliver(self) -> None:
        for client, output in self._outputs.items():
            client.deliver(output)
        self._outputs.clear()

    def _end(self, reason: str) -> None:
        """Tells every client, also one whose connect is still in the inbox, that nothing more will come."""
        with self._ending_lock:
            self._failure = reason
        while not self._inbox.empty():
            with contextlib.suppress(Exception):  # an engine that has failed may fail at anything
                self._inbox.get_nowait()()
        for client in self._clients:
            output = self._output(client)
            output.failure = reason
            with contextlib.suppress(Exception):  # the others must hear of it all the same
                client.deliver(output)
        self._clients.clear()
        self._working_since_s = None
