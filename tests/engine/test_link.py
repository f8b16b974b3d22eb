"""EngineLink end to end over a Unix socket: codec, streams, aborts and the loss of either side."""

import asyncio
import math
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from jaxserve.core.events import Logprobs, TokenEvent
from jaxserve.core.pooling_params import PoolingParams
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.engine import link_codec, link_pb2, link_server
from jaxserve.engine.link_client import EngineClient
from jaxserve.engine.link_server import start_link_server
from jaxserve.engine.loop import EngineLoop, Output
from jaxserve.engine.stats import EngineStats
from jaxserve.errors import InvalidRequest


def request(request_id: str, *, prompt=(5,), **params) -> Request:
    return Request(request_id=request_id, prompt_token_ids=tuple(prompt), params=SamplingParams(**params))


@asynccontextmanager
async def link(engine, info) -> AsyncIterator[tuple[EngineClient, EngineLoop, str]]:
    with TemporaryDirectory() as directory:
        address = f"unix:{directory}/private/engine.sock"
        loop = EngineLoop(engine)
        loop.start()
        server = await start_link_server(loop, info, address)
        assert (Path(directory) / "private").stat().st_mode & 0o777 == 0o700
        client = await connect(address)
        try:
            yield client, loop, address
        finally:
            await client.close()
            await server.stop(None)
            await asyncio.to_thread(loop.stop)


async def connect(address: str) -> EngineClient:
    client = EngineClient(address)
    client.start()
    await asyncio.wait_for(client.wait_until_connected(), 30)
    return client


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_the_generated_module_is_what_the_proto_says(tmp_path):
    pytest.importorskip("grpc_tools")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", f"--python_out={tmp_path}", "jaxserve/engine/link.proto"]
    subprocess.run(command, check=True, cwd=root)
    generated = tmp_path / "jaxserve/engine/link_pb2.py"
    assert descriptor_line(generated) == descriptor_line(root / "jaxserve/engine/link_pb2.py")


def descriptor_line(file: Path) -> str:
    """The messages as the module holds them; the rest of the file depends on the generator's version."""
    return next(line for line in file.read_text().splitlines() if "AddSerializedFile" in line)


def test_requests_keep_every_field():
    params = SamplingParams(
        n=2, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=-1.5, frequency_penalty=0.3, repetition_penalty=1.1,
        seed=-7, stop_token_ids=(3, 4), ignore_eos=True, max_tokens=9, min_tokens=2, logprobs=-1, prompt_logprobs=0, logit_bias={7: -2.5},
        detokenize=False,
    )  # fmt: skip
    original = Request(request_id="r", prompt_token_ids=(1, 2), params=params, priority=-3, cache_salt="salt", label="mine")
    decoded = link_codec.decode_add(link_codec.encode_add(original).add)
    assert decoded.params == params
    assert (decoded.request_id, decoded.prompt_token_ids, decoded.priority, decoded.cache_salt) == ("r", (1, 2), -3, "salt")
    assert decoded.label == "mine"
    assert decoded.arrival_time_s > 0


def test_absent_fields_stay_absent():
    original = request("r", max_tokens=None)
    decoded = link_codec.decode_add(link_codec.encode_add(original).add)
    assert (decoded.params.max_tokens, decoded.params.seed, decoded.params.logprobs, decoded.cache_salt) == (None, None, None, None)


@pytest.mark.parametrize(
    "event",
    [
        TokenEvent(request_id="r", index=1, token_ids=[7, 8], num_prompt_tokens=3, num_cached_tokens=2),
        TokenEvent(request_id="r", index=0, token_ids=[7], num_prompt_tokens=3, num_cached_tokens=2, queue_s=0.25, prefill_s=0.0),
        TokenEvent(
            request_id="r", index=0, token_ids=[7], num_prompt_tokens=3, num_cached_tokens=2,
            finish_reason=FinishReason.STOP, stop_reason=7, logprobs=[Logprobs(7, -0.5, 1, [7, 9], [-0.5, -math.inf])],
            prompt_logprobs=[None, Logprobs(4, -1.5, 2, [], [])],
        ),
        TokenEvent(
            request_id="r", index=0, token_ids=[], num_prompt_tokens=1, num_cached_tokens=0, prompt_logprobs=[None], logprobs=[],
            finish_reason=FinishReason.ERROR, error="broken",
        ),
    ],
)  # fmt: skip
def test_events_keep_every_field(event):
    assert link_codec.decode_event(link_codec.encode_event(event)) == event


def test_figures_keep_every_field():
    stats = EngineStats(
        has_work=True, seconds_since_progress=1.5, **{name: i for i, name in enumerate(COUNTS, 1)}, step_token_counts=(1, 2)
    )
    assert link_codec.decode_stats(link_codec.encode_stats(stats)) == stats


COUNTS = [spec.name for spec in fields(EngineStats) if spec.name.startswith("num_")]


def test_a_large_output_is_several_messages(monkeypatch):
    monkeypatch.setattr(link_server, "SPLIT_BYTES", 100)
    wide = [Logprobs(1, -1.0, 1, list(range(21)), [-1.0] * 21)]
    counts = {"num_prompt_tokens": 1, "num_cached_tokens": 0}
    events = [TokenEvent(request_id=f"{i}", index=0, token_ids=[i], logprobs=wide if i % 2 else None, **counts) for i in range(6)]
    output = Output(events=events, rejections=[("a", InvalidRequest("no"))], failure="gone")
    messages = list(link_server.encode_output(output))
    assert list(link_codec.decode_tokens(messages[0].tokens)) == events[0::2]
    assert not any(message.tokens.request_ids for message in messages[1:])
    assert [link_codec.decode_event(event) for message in messages for event in message.events] == events[1::2]
    assert [len(message.events) for message in messages] == [1, 1, 1, 0]
    assert [(len(message.rejections), message.failure) for message in messages] == [(0, "")] * 3 + [(1, "gone")]


def test_tokens_travel_in_columns_and_whatever_has_more_to_tell_as_it_is():
    few = list(range(20))
    plain = [
        TokenEvent("a", 2, [7], 3, 1),
        TokenEvent("b", 2, [0], 3, 1, logprobs=[Logprobs(0, -0.5, 3, [4, 5], [-0.25, -0.375])]),
        TokenEvent("c", 0, [9], 5, 0),
        TokenEvent("b", 1, [8], 3, 1, logprobs=[Logprobs(8, -0.5, 1, [], [])]),
        TokenEvent("b", 0, [6], 3, 1, logprobs=[Logprobs(6, -math.inf, 30, few, [-1.0] * 20)]),
    ]
    others = [
        TokenEvent("d", 2, [1, 2], 3, 1),
        TokenEvent("e", 2, [], 3, 1),
        TokenEvent("f", 2, [7], 3, 1, logprobs=[Logprobs(7, -0.5, 1, [*few, 20], [-0.5] * 21)]),
        TokenEvent("g", 2, [7], 3, 1, prompt_logprobs=[None]),
        TokenEvent("h", 2, [7], 3, 1, queue_s=0.0, prefill_s=1.0),
        TokenEvent("i", 2, [7], 3, 1, finish_reason=FinishReason.LENGTH),
    ]
    message = link_pb2.Tokens()
    assert link_codec.fill_tokens(message, [others[0], *plain, *others[1:]]) == others
    assert list(link_codec.decode_tokens(link_pb2.Tokens.FromString(message.SerializeToString()))) == plain


def test_generate_yields_all_events_of_all_sequences(engine, engine_info):
    async def main() -> None:
        async with link(engine, engine_info) as (client, _, _):
            assert client.info == engine_info
            tokens: dict[int, list[int]] = {0: [], 1: []}
            with client.generate(request("a", n=2, max_tokens=3)) as stream:
                async for event in stream:
                    tokens[event.index] += event.token_ids
            assert tokens == {0: [5, 6, 7], 1: [6, 7, 8]}
            assert client.num_open == 0

    asyncio.run(main())


def test_one_stream_for_several_requests(engine, engine_info):
    async def main() -> None:
        async with link(engine, engine_info) as (client, _, _):
            tokens: dict[str, list[int]] = {"a": [], "b": []}
            with client.generate(request("a", max_tokens=3), request("b", prompt=(20,), max_tokens=2)) as stream:
                async for event in stream:
                    tokens[event.request_id] += event.token_ids
            assert tokens == {"a": [5, 6, 7], "b": [20, 21]}

    asyncio.run(main())


def test_leaving_the_stream_or_cancelling_aborts(engine, engine_info):
    async def consume(client: EngineClient, request_id: str) -> None:
        with client.generate(request(request_id, max_tokens=None)) as stream:
            async for _ in stream:
                pass

    async def main() -> None:
        async with link(engine, engine_info) as (client, _, _):
            with client.generate(request("a", max_tokens=None)) as stream:
                async for _ in stream:
                    break
            task = asyncio.create_task(consume(client, "b"))
            await until(lambda: any(key[0] == "b" for key in engine.open))
            task.cancel()
            await until(lambda: not engine.open)

    asyncio.run(main())


def test_drop_ends_one_sequence_and_abort_reports(engine, engine_info):
    async def main() -> None:
        async with link(engine, engine_info) as (client, _, _):
            finished = []
            with client.generate(request("a", n=3, max_tokens=None)) as stream:
                async for event in stream:
                    stream.drop("a", 1)
                    if event.index == 0 and not event.finish_reason:
                        client.abort("a")
                    if event.finish_reason:
                        finished.append((event.index, event.finish_reason))
            assert sorted(finished, key=str) == [(0, FinishReason.ABORT), (2, FinishReason.ABORT)]
            assert not engine.open

    asyncio.run(main())


def test_a_refused_request_raises(engine, engine_info):
    async def main() -> None:
        async with link(engine, engine_info) as (client, _, _):
            with client.generate(request("a", prompt=[1] * 101)) as stream, pytest.raises(InvalidRequest, match="never fit") as caught:
                await anext(stream)
            assert caught.value.param == "prompt"

    asyncio.run(main())


def test_a_closed_front_end_frees_its_requests_and_others_go_on(engine, engine_info):
    async def main() -> None:
        async with link(engine, engine_info) as (client, _, address):
            other = await connect(address)
            client.generate(request("a", max_tokens=None))
            stream = other.generate(request("b", max_tokens=300))
            await until(lambda: len(engine.open) == 2)
            await client.close()
            await until(lambda: ("a", 0) not in engine.open)
            assert sum([len(event.token_ids) async for event in stream]) == 300
            await other.close()

    asyncio.run(main())


FRONT_END = """
import asyncio, sys
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.link_client import EngineClient

async def main():
    client = EngineClient(sys.argv[1])
    client.start()
    await client.wait_until_connected()
    params = SamplingParams(max_tokens=None)
    async for _ in client.generate(*(Request(request_id=name, prompt_token_ids=(5,), params=params) for name in "xyz")):
        pass

asyncio.run(main())
"""


def test_a_killed_front_end_frees_its_requests_within_a_second(engine, engine_info):
    async def main() -> None:
        async with link(engine, engine_info) as (client, _, address):
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", FRONT_END, address, env=environment)
            stream = client.generate(request("mine", max_tokens=None))
            async with asyncio.timeout(30):
                while len(engine.open) < 4:
                    await anext(stream)
            process.kill()
            killed_s = time.monotonic()
            await until(lambda: list(engine.open) == [("mine", 0)])
            assert time.monotonic() - killed_s < 1
            await process.wait()
            await anext(stream)

    asyncio.run(main())


def test_an_embedding_travels() -> None:
    asked = Request(request_id="a", prompt_token_ids=(5, 6), pooling=PoolingParams(pooling="mean", normalize=False, dimensions=2))
    received = link_codec.decode_add(link_codec.encode_add(asked).add)
    assert received.pooling == PoolingParams(pooling="mean")  # what becomes of the vector is the front end's
    assert (received.params.n, received.params.max_tokens) == (1, 1)
    assert link_codec.decode_add(link_codec.encode_add(request("b")).add).pooling is None
    event = TokenEvent("a", 0, [], 2, 0, embedding=[0.5, -1.25], finish_reason=FinishReason.STOP, queue_s=0.5, prefill_s=0.25)
    assert link_codec.decode_event(link_codec.encode_event(event)) == event
