"""What a front end does with a request that one of two engines has no room for, or loses; the links are taken by hand, without sockets."""

import asyncio

import pytest

from jaxserve.core.events import TokenEvent
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.engine import link_codec, link_pb2
from jaxserve.engine.event_stream import EventStream
from jaxserve.engine.replicas import Replicas
from jaxserve.errors import EngineUnavailable, Overloaded


class Connection:
    """Keeps what is sent to an engine."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []

    def send(self, command: link_pb2.Command) -> None:
        match command.WhichOneof("command"):
            case "add":
                self.sent.append(("add", command.add.request_id))
            case "abort":
                self.sent.append(("abort", command.abort.request_id))
            case "abort_label":
                self.sent.append(("abort_label", command.abort_label.label))


class Pair:
    """A front end, and both engines' ends of its links."""

    def __init__(self, info) -> None:
        self.info = info
        self.replicas = Replicas(["unix:0", "unix:1"])
        self.connections = [Connection(), Connection()]
        for engine in (0, 1):
            self.says(engine)

    def says(self, engine: int, **message) -> None:
        self.replicas.engines[engine]._on_message(self.connections[engine], self.info, link_pb2.FromEngine(**message))

    def is_full(self, engine: int, request_id: str) -> None:
        self.says(engine, rejections=[link_codec.encode_rejection(request_id, Overloaded(f"engine {engine} is full"))])

    def ends(self, engine: int, request_id: str, token_id: int) -> None:
        event = TokenEvent(request_id, 0, [token_id], 1, 0, finish_reason=FinishReason.STOP)
        self.says(engine, events=[link_codec.encode_event(event)])

    @property
    def sent(self) -> list[list[tuple[str, str]]]:
        return [connection.sent for connection in self.connections]

    def is_idle(self) -> bool:
        return not any((self.replicas.num_open, *(engine.num_open + engine.load.num_running for engine in self.replicas.engines)))


@pytest.fixture
def pair(engine_info) -> Pair:
    return Pair(engine_info)


def request(request_id: str, label: str = "") -> Request:
    return Request(request_id=request_id, prompt_token_ids=(5,), params=SamplingParams(), label=label)


def read(stream: EventStream) -> list[tuple[str, list[int], str | None]]:
    async def main() -> list[tuple[str, list[int], str | None]]:
        return [(event.request_id, event.token_ids, event.finish_reason and event.finish_reason.value) async for event in stream]

    return asyncio.run(main())


def test_one_that_is_full_passes_the_request_on_and_the_last_one_refuses_it(pair):
    served, refused = pair.replicas.generate(request("a")), pair.replicas.generate(request("b"))
    assert pair.sent == [[("add", "a")], [("add", "b")]]
    pair.is_full(0, "a")
    assert (pair.sent[1][1:], served.engine_ids) == ([("add", "a")], {"a": 1})
    pair.is_full(1, "b")
    pair.is_full(0, "b")
    with pytest.raises(Overloaded, match="engine 0 is full"):
        read(refused)
    pair.ends(1, "a", 7)
    assert read(served) == [("a", [7], "stop")]
    assert pair.is_idle()


def test_a_reader_that_leaves_meanwhile_ends_it_where_it_is(pair):
    for leaves_first in (True, False):
        with pair.replicas.generate(request("a")) as stream:
            first = stream.engine_ids["a"]
            if not leaves_first:
                pair.is_full(first, "a")
        if leaves_first:
            pair.is_full(first, "a")
        assert pair.sent[stream.engine_ids["a"]] == [("add", "a"), ("abort", "a")]
        assert (stream.engine_ids["a"] == first) is leaves_first
        assert pair.is_idle()
        for connection in pair.connections:
            connection.sent.clear()


def test_an_abort_by_label_holds_when_the_request_would_go_on_to_the_next(pair):
    aborted, other = pair.replicas.generate(request("a", "mine")), pair.replicas.generate(request("b", "another"))
    pair.replicas.abort_label("")
    pair.replicas.abort_label("mine")
    pair.is_full(0, "a")
    pair.is_full(1, "b")
    assert ("add", "a") not in pair.sent[1]
    assert ("add", "b") in pair.sent[0]
    assert read(aborted) == [("a", [], "abort")]
    other.close()
    assert pair.is_idle()


def test_a_lost_engine_does_not_fail_what_it_has_answered(pair):
    async def main() -> list[list[int]]:
        stream = pair.replicas.generate(request("a"), request("b"))
        assert stream.engine_ids == {"a": 0, "b": 1}
        pair.ends(0, "a", 7)
        pair.replicas.engines[0]._lose("engine 0 has gone away")
        asyncio.get_running_loop().call_soon(pair.ends, 1, "b", 8)
        return [event.token_ids async for event in stream]

    assert asyncio.run(main()) == [[7], [8]]
    assert pair.is_idle()


def test_what_was_lost_is_no_load_of_the_next_engine_though_nobody_has_read_that_yet(pair):
    stream = pair.replicas.generate(request("a"))
    pair.replicas.engines[0]._lose("engine 0 has gone away")
    pair.says(0)
    assert pair.replicas.engines[0].load.num_running == 0
    with pytest.raises(EngineUnavailable, match="engine 0 has gone away; the request is lost"):
        read(stream)
    assert pair.is_idle()
