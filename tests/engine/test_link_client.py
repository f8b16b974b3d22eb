"""A front end's link when the engine is not there yet, goes away, comes back, falls silent or hangs; and what it is asked."""

import asyncio
import time
from dataclasses import replace
from unittest.mock import Mock

import grpc
import pytest

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine import link_client, link_server
from jaxserve.engine.link_client import EngineClient
from jaxserve.engine.link_server import HEARTBEAT_S, start_link_server
from jaxserve.engine.loop import EngineLoop
from jaxserve.errors import EngineUnavailable, InvalidRequest


def request(request_id: str, **params) -> Request:
    return Request(request_id=request_id, prompt_token_ids=(5,), params=SamplingParams(**params), label="label")


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


class Fixture:
    """A client, and an engine's side that the test starts and ends."""

    def __init__(self, engine, info, directory) -> None:
        self.engine, self.info = engine, info
        self.address = f"unix:{directory}/engine.sock"
        self.client = EngineClient(self.address, max_stall_s=0.2)
        self.changes: list[bool] = []
        self.client.add_listener(lambda: self.changes.append(self.client.is_healthy))

    async def start_engine(self, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.loop = EngineLoop(self.engine)
        self.loop.start()
        self.server: grpc.aio.Server = await start_link_server(self.loop, self.info, self.address, heartbeat_s=heartbeat_s)

    async def stop_engine(self) -> None:
        await self.server.stop(None)
        self.engine.gate.set()
        await asyncio.to_thread(self.loop.stop)

    async def run(self, scenario) -> None:
        self.client.start()
        try:
            await scenario(self.client)
        finally:
            await self.client.close()
            await self.stop_engine()


@pytest.fixture
def link(engine, engine_info, tmp_path) -> Fixture:
    return Fixture(engine, engine_info, tmp_path)


def test_requests_before_the_first_engine_say_that_it_loads(link):
    async def scenario(client: EngineClient) -> None:
        with pytest.raises(EngineUnavailable, match="still loading"):
            client.generate(request("a"))
        with pytest.raises(EngineUnavailable, match="still loading"):
            _ = client.info
        with pytest.raises(EngineUnavailable, match="still loading"):
            await client.stats()
        assert (client.is_connected, client.is_healthy, client.last_stats, link.changes) == (False, False, None, [])
        await link.start_engine()
        await asyncio.wait_for(client.wait_until_connected(), 30)
        assert client.info == link.info
        assert (client.is_healthy, client.why, link.changes) == (True, "", [True])

    asyncio.run(link.run(scenario))


def test_an_engine_whose_facts_are_not_known_yet_has_no_figures_either(link, monkeypatch):
    asked = asyncio.Event()

    async def get_info(service, request, context) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(link_server.LinkService, "GetInfo", get_info)

    async def scenario(client: EngineClient) -> None:
        await link.start_engine()
        await asyncio.wait_for(asked.wait(), 30)
        with pytest.raises(EngineUnavailable, match="still loading"):
            await client.stats()

    asyncio.run(link.run(scenario))


def test_a_lost_engine_fails_open_requests_and_comes_back_with_other_facts(link):
    async def scenario(client: EngineClient) -> None:
        await link.start_engine()
        await asyncio.wait_for(client.wait_until_connected(), 30)
        streams = [client.generate(request(name, max_tokens=None)) for name in "ab"]
        unread = client.generate(request("c", max_tokens=None))
        for stream in streams:
            await anext(stream)
        await link.stop_engine()
        for stream in (*streams, unread):
            with pytest.raises(EngineUnavailable, match="send it again"):
                async for _ in stream:
                    pass
        assert (client.num_open, client.is_connected, client.last_stats, link.changes) == (0, False, None, [True, False])
        with pytest.raises(EngineUnavailable, match="restarting"):
            client.generate(request("d"))
        assert client.info == link.info
        client.abort("a")  # goes nowhere, now and later
        link.info = replace(link.info, max_model_len=99)
        link.engine.open.clear()
        await link.start_engine()
        await asyncio.wait_for(client.wait_until_connected(), 30)
        assert (client.info.max_model_len, link.changes) == (99, [True, False, True])
        tokens = [token_id async for event in client.generate(request("a", max_tokens=3)) for token_id in event.token_ids]
        assert tokens == [5, 6, 7]

    asyncio.run(link.run(scenario))


def test_a_failed_engine_says_why_and_is_not_taken_for_a_new_one(link):
    async def scenario(client: EngineClient) -> None:
        await link.start_engine()
        await asyncio.wait_for(client.wait_until_connected(), 30)
        link.engine.step_error = ValueError("device lost")
        with client.generate(request("a")) as stream, pytest.raises(EngineUnavailable, match="device lost"):
            await anext(stream)
        # Its process still answers for a while.
        answers = 0

        async def get_info(*arguments, **options):
            nonlocal answers
            answers += 1
            return await ask(*arguments, **options)

        ask, client._stub.GetInfo = client._stub.GetInfo, get_info
        await until(lambda: answers >= 3)
        assert (client.is_connected, link.changes) == (False, [True, False])

    asyncio.run(link.run(scenario))


def test_a_silent_engine_is_not_healthy_until_it_is_heard_again(link, monkeypatch):
    monkeypatch.setattr(link_client, "TICK_S", 0.01)
    monkeypatch.setattr(link_client, "HEARTBEAT_TIMEOUT_S", 0.1)

    async def scenario(client: EngineClient) -> None:
        await link.start_engine(heartbeat_s=1000)
        await until(lambda: link.changes == [True, False])
        assert client.is_connected and "stalled" in client.why
        assert [event async for event in client.generate(request("a", max_tokens=1))]
        assert link.changes == [True, False, True]

    asyncio.run(link.run(scenario))


def test_an_engine_whose_step_hangs_is_not_healthy_until_it_goes_on(link, monkeypatch):
    async def scenario(client: EngineClient) -> None:
        await link.start_engine(heartbeat_s=0.02)
        await asyncio.wait_for(client.wait_until_connected(), 30)
        link.engine.gate.clear()
        stream = client.generate(request("a", max_tokens=2))
        await until(lambda: link.changes == [True, False])
        assert client.is_connected and "stalled" in client.why
        link.engine.gate.set()
        assert sum([len(event.token_ids) async for event in stream]) == 2
        await until(lambda: link.changes == [True, False, True])

    asyncio.run(link.run(scenario))


def test_a_busy_front_end_blames_no_engine(link, monkeypatch):
    monkeypatch.setattr(link_client, "TICK_S", 0.01)
    monkeypatch.setattr(link_client, "HEARTBEAT_TIMEOUT_S", 0.1)
    now = time.monotonic

    async def scenario(client: EngineClient) -> None:
        await link.start_engine(heartbeat_s=0.02)
        await asyncio.wait_for(client.wait_until_connected(), 30)
        end = now() + 0.3
        while now() < end:  # holds the loop, as tokenizing a long text might
            pass
        for _ in range(5):
            await asyncio.sleep(0.02)
        assert link.changes == [True]

    asyncio.run(link.run(scenario))


def test_figures_flushing_and_profiles(link):
    async def scenario(client: EngineClient) -> None:
        await link.start_engine()
        await asyncio.wait_for(client.wait_until_connected(), 30)
        assert client.last_stats is not None
        assert await client.flush_cache()
        stream = client.generate(request("a", max_tokens=None))
        await anext(stream)
        stats = await client.stats()
        assert stats.has_work and stats.num_running == 1 and stats.num_steps > 0
        assert not await client.flush_cache()
        stream.close()
        with pytest.raises(InvalidRequest, match="no trace is running"):
            await client.stop_profile()
        with pytest.raises(InvalidRequest, match="no directory"):
            await client.start_profile("")

    asyncio.run(link.run(scenario))


def test_the_load_is_what_others_have_by_the_heartbeat_and_what_is_open_here(link, monkeypatch):
    async def scenario(client: EngineClient) -> None:
        await link.start_engine(heartbeat_s=0.02)
        await asyncio.wait_for(client.wait_until_connected(), 30)
        other = EngineClient(link.address)
        other.start()
        await asyncio.wait_for(other.wait_until_connected(), 30)
        stream, others = client.generate(request("a", n=2, max_tokens=None)), other.generate(request("b", n=3, max_tokens=None))
        await until(lambda: client.last_stats.num_running == 5)
        assert (client.load.num_running, client.load.num_seats) == (5, link.info.max_num_seqs)
        monkeypatch.setattr(link_client, "HEARTBEAT_TIMEOUT_S", 60)
        monkeypatch.setattr(link.loop, "stats", Mock(side_effect=asyncio.CancelledError))  # ends the beats
        await asyncio.sleep(0.1)
        more = client.generate(request("c", max_tokens=None))
        assert client.load.num_running == 6
        stream.close()
        assert client.load.num_running == 4
        more.close()
        others.close()
        await other.close()

    asyncio.run(link.run(scenario))


def test_an_abort_by_label_reaches_every_front_end(link):
    async def scenario(client: EngineClient) -> None:
        await link.start_engine()
        await asyncio.wait_for(client.wait_until_connected(), 30)
        other = EngineClient(link.address)
        other.start()
        await asyncio.wait_for(other.wait_until_connected(), 30)
        stream = client.generate(request("a", max_tokens=None))
        await anext(stream)
        other.abort_label("another")
        other.abort_label("label")
        *_, last = [event async for event in stream]
        assert last.finish_reason is not None and last.finish_reason.value == "abort"
        await other.close()

    asyncio.run(link.run(scenario))


def test_abort_all_needs_no_engine_that_steps(link):
    async def scenario(client: EngineClient) -> None:
        await link.start_engine()
        await asyncio.wait_for(client.wait_until_connected(), 30)
        link.engine.gate.clear()
        stream = client.generate(request("a", n=2), request("b"))
        client.abort_all()
        ended = {(event.request_id, event.index): event.finish_reason.value async for event in stream}
        assert ended == {("a", 0): "abort", ("a", 1): "abort", ("b", 0): "abort"}
        link.engine.gate.set()
        await until(lambda: not link.engine.open)

    asyncio.run(link.run(scenario))
