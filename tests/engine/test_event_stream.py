"""What a reader gets who does not keep up: merged events, bounded memory, and an end to what is too much."""

import asyncio

import pytest

from jaxserve.core.events import Logprobs, TokenEvent
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.engine import event_stream, link_codec
from jaxserve.engine.event_stream import EventStream
from jaxserve.errors import EngineUnavailable


class Owner:
    def __init__(self) -> None:
        self.aborted: list[tuple[str, int | None]] = []
        self.forgotten: list[str] = []

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


@pytest.fixture
def owner() -> Owner:
    return Owner()


def request(request_id: str = "r", **params) -> Request:
    return Request(request_id=request_id, prompt_token_ids=(1, 2, 3), params=SamplingParams(**params))


def event(token_ids, *, request_id: str = "r", index: int = 0, num_cached_tokens: int = 2, **rest):
    counts = {"num_prompt_tokens": 3, "num_cached_tokens": num_cached_tokens}
    return link_codec.encode_event(TokenEvent(request_id=request_id, index=index, token_ids=list(token_ids), **counts, **rest))


def read(stream: EventStream) -> list[TokenEvent]:
    async def main() -> list[TokenEvent]:
        return [item async for item in stream]

    return asyncio.run(main())


def wide(token_id: int, num_top: int) -> list[Logprobs]:
    return [Logprobs(token_id, -1.0, 1, list(range(num_top)), [-1.0] * num_top)]


def test_events_that_wait_come_as_one_for_each_sequence(owner):
    stream = EventStream(owner, [request(n=2, logprobs=1)])
    first = wide(7, 1)
    stream.put(event([7], prompt_logprobs=[None, *wide(2, 1)], logprobs=first))
    stream.put(event([8], index=1, logprobs=wide(8, 1)))
    stream.put(event([9], logprobs=wide(9, 1)))
    stream.put(event([10], logprobs=wide(10, 1), finish_reason=FinishReason.STOP, stop_reason=10))
    stream.put(event([11], index=1, logprobs=wide(11, 1), finish_reason=FinishReason.LENGTH))
    one, two = read(stream)
    assert (one.index, one.token_ids, one.finish_reason, one.stop_reason) == (0, [7, 9, 10], FinishReason.STOP, 10)
    assert one.logprobs == wide(7, 1) + wide(9, 1) + wide(10, 1)
    assert one.prompt_logprobs == [None, *wide(2, 1)]
    assert (two.index, two.token_ids, two.finish_reason, two.prompt_logprobs) == (1, [8, 11], FinishReason.LENGTH, None)
    assert (one.num_prompt_tokens, one.num_cached_tokens) == (3, 2)
    assert (owner.aborted, owner.forgotten) == ([], ["r"])


def test_tokens_that_came_by_columns_wait_with_whole_events(owner):
    stream = EventStream(owner, [request(n=4)])
    stream.put(TokenEvent("r", 3, [5], 3, 2, logprobs=wide(5, 2)))
    stream.put(TokenEvent("r", 3, [6], 3, 2, logprobs=wide(6, 1)))
    stream.put(TokenEvent("r", 0, [7], 3, 2))
    stream.put(event([8], index=1, queue_s=0.5, prefill_s=1.0))
    for token_id in (9, 10):
        stream.put(TokenEvent("r", 0, [token_id], 3, 2))
        stream.put(TokenEvent("r", 1, [token_id], 3, 2))
    stream.put(event([11], finish_reason=FinishReason.STOP))
    stream.put(TokenEvent("r", 2, [12], 3, 2))
    stream.end()
    assert read(stream) == [
        TokenEvent("r", 3, [5, 6], 3, 2, logprobs=wide(5, 2) + wide(6, 1), finish_reason=FinishReason.ABORT),
        TokenEvent("r", 0, [7, 9, 10, 11], 3, 2, finish_reason=FinishReason.STOP),
        TokenEvent("r", 1, [8, 9, 10], 3, 2, queue_s=0.5, prefill_s=1.0, finish_reason=FinishReason.ABORT),
        TokenEvent("r", 2, [12], 3, 2, finish_reason=FinishReason.ABORT),
    ]


def test_a_long_stream_that_nobody_reads_costs_its_tokens_alone(owner):
    stream = EventStream(owner, [request(max_tokens=None)])
    for start in range(0, 120_000, 4):
        stream.put(event(range(start, start + 4)))
    assert not owner.aborted
    assert stream._num_pending_bytes < event_stream.MAX_PENDING_BYTES
    stream.put(event([1], finish_reason=FinishReason.LENGTH))
    [whole] = read(stream)
    assert whole.token_ids == [*range(120_000), 1]


def test_a_call_with_too_much_unread_ends_and_others_go_on(owner):
    stream, other = (EventStream(owner, [request(name, logprobs=20)]) for name in ("r", "other"))
    num_sent = 0
    while not owner.aborted:
        stream.put(event([num_sent], logprobs=wide(num_sent, 20)))
        num_sent += 1
    other.put(event([1], request_id="other", finish_reason=FinishReason.LENGTH))
    # About 350 bytes a token; what the engine sends before it hears of the abort is dropped.
    assert 2**20 / 700 < num_sent < 2**20 / 175
    for _ in range(3):
        stream.put(event([5], logprobs=wide(5, 20)))
    stream.put(event([6], logprobs=wide(6, 20), finish_reason=FinishReason.LENGTH))
    [whole] = read(stream)
    assert (whole.token_ids, whole.finish_reason) == (list(range(num_sent)), FinishReason.ABORT)
    assert whole.logprobs is not None and len(whole.logprobs) == num_sent
    assert (owner.aborted, owner.forgotten) == ([("r", None)], ["r"])
    assert [item.token_ids for item in read(other)] == [[1]]


def test_one_event_may_be_larger_than_what_may_wait(owner, monkeypatch):
    monkeypatch.setattr(event_stream, "MAX_PENDING_BYTES", 1000)
    stream = EventStream(owner, [request(prompt_logprobs=20)])
    stream.put(event([7], prompt_logprobs=[None, *wide(2, 20) * 100]))
    stream.put(event([8]))
    assert not owner.aborted


def test_calls_for_whole_vocabularies_may_have_more_waiting(owner):
    stream = EventStream(owner, [request(logprobs=-1)])
    for token_id in range(4):
        stream.put(event([token_id], logprobs=wide(token_id, 100_000)))
    assert not owner.aborted


def test_what_was_read_makes_room(owner):
    async def main() -> None:
        stream = EventStream(owner, [request(logprobs=20)])
        for token_id in range(20_000):
            stream.put(event([token_id], logprobs=wide(token_id, 20)))
            if token_id % 1000 == 999:
                await anext(stream)

    asyncio.run(main())
    assert not owner.aborted


def test_end_keeps_what_has_arrived(owner):
    async def main() -> list[TokenEvent]:
        stream = EventStream(owner, [request("a", n=2), request("b")])
        stream.put(event([7], request_id="a"))
        assert (await anext(stream)).token_ids == [7]
        stream.put(event([8], request_id="a"))
        stream.put(event([9], request_id="b", finish_reason=FinishReason.STOP))
        stream.end()
        stream.end()
        stream.put(event([10], request_id="a", finish_reason=FinishReason.ABORT))
        return [item async for item in stream]

    ended = {(item.request_id, item.index): item for item in asyncio.run(main())}
    assert {key: (item.token_ids, item.finish_reason) for key, item in ended.items()} == {
        ("a", 0): ([8], FinishReason.ABORT),
        ("a", 1): ([], FinishReason.ABORT),
        ("b", 0): ([9], FinishReason.STOP),
    }
    assert [(item.num_prompt_tokens, item.num_cached_tokens) for item in ended.values()] == [(3, 2)] * 3
    assert owner.aborted == [("a", None), ("b", None)]


def test_an_error_comes_after_what_arrived_before_it(owner):
    async def main() -> list[int]:
        stream = EventStream(owner, [request()])
        stream.put(event([7]))
        stream.fail("r", EngineUnavailable("gone"))
        token_ids = (await anext(stream)).token_ids
        with pytest.raises(EngineUnavailable, match="gone"):
            await anext(stream)
        return token_ids

    assert asyncio.run(main()) == [7]
    assert owner.forgotten == ["r"]


def test_what_has_arrived_whole_does_not_fail_the_rest_of_its_call(owner):
    async def main() -> list[list[int]]:
        stream = EventStream(owner, [request("a", n=2), request("b")])
        stream.put(event([7], request_id="a", finish_reason=FinishReason.STOP))
        stream.put(event([8], request_id="a", index=1, finish_reason=FinishReason.LENGTH))
        stream.fail("a", EngineUnavailable("gone"))
        asyncio.get_running_loop().call_soon(stream.put, event([9], request_id="b", finish_reason=FinishReason.STOP))
        return [item.token_ids async for item in stream]

    assert asyncio.run(main()) == [[7], [8], [9]]

    stream = EventStream(owner, [request("a", n=2)])
    stream.put(event([7], request_id="a", finish_reason=FinishReason.STOP))
    stream.fail("a", EngineUnavailable("gone"))
    with pytest.raises(EngineUnavailable, match="gone"):
        read(stream)


def test_a_dropped_sequence_yields_nothing_more(owner):
    stream = EventStream(owner, [request(n=2)])
    stream.put(event([7], index=1))
    stream.drop("r", 1)
    stream.put(event([8], index=1))
    stream.put(event([9], finish_reason=FinishReason.STOP))
    assert [(item.index, item.token_ids) for item in read(stream)] == [(0, [9])]
    assert owner.aborted == [("r", 1)]
