"""Many mixed requests at once over both doors, each equal to what it gives alone, and nothing left behind."""

import asyncio
import random
from dataclasses import dataclass

import grpc
import openai
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

NUM_REQUESTS = 64


@dataclass
class Case:
    prompt: list[int]
    max_tokens: int
    seed: int
    n: int
    is_stream: bool
    leaves_early: bool

    def expected(self, server) -> list[list[int]]:
        return [server.output_ids(self.prompt, self.max_tokens, seed=self.seed + i) for i in range(self.n)]


def cases() -> list[Case]:
    rng = random.Random(7)
    return [
        Case(
            prompt=[rng.randrange(3, 320) for _ in range(rng.choice([1, 5, 40, 120]))],
            max_tokens=rng.randint(1, 60),
            seed=rng.randrange(1000),
            n=rng.choice([1, 1, 1, 3]),
            is_stream=i % 2 == 0,
            leaves_early=i % 5 == 4,
        )
        for i in range(NUM_REQUESTS)
    ]


async def over_http(client: openai.AsyncOpenAI, case: Case) -> list[list[int]] | None:
    call = client.completions.create(
        model="counting", prompt=case.prompt, max_tokens=case.max_tokens, seed=case.seed, n=case.n, stream=case.is_stream,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    if case.leaves_early and not case.is_stream:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call, 0.01)
        return None
    answer = await call
    if not case.is_stream:
        return [choice.token_ids for choice in answer.choices]
    outputs: list[list[int]] = [[] for _ in range(case.n)]
    async with answer:
        async for chunk in answer:
            outputs[chunk.choices[0].index] += chunk.choices[0].token_ids
            if case.leaves_early:
                return None
    return outputs


async def over_grpc(stub: VllmEngineStub, case: Case) -> list[list[int]] | None:
    params = pb.SamplingParams(max_tokens=case.max_tokens, seed=case.seed, n=case.n, ignore_eos=True)
    call = stub.Generate(
        pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=case.prompt), sampling_params=params, stream=case.is_stream)
    )
    outputs: list[list[int]] = [[] for _ in range(case.n)]
    if case.leaves_early:
        await asyncio.sleep(0.01)
        call.cancel()
        return None
    async for response in call:
        if response.HasField("chunk"):
            outputs[response.chunk.index] += response.chunk.token_ids
        elif not case.is_stream:
            outputs[response.complete.index] += response.complete.output_ids
    return outputs


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_64_at_once_equal_their_solo_runs(server, door):
    async def main() -> list[list[list[int]] | None]:
        if door == "http":
            async with openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0) as client:
                return await asyncio.gather(*(over_http(client, case) for case in cases()))
        async with grpc.aio.insecure_channel(server.grpc) as channel:
            return await asyncio.gather(*(over_grpc(VllmEngineStub(channel), case) for case in cases()))

    results = asyncio.run(main())
    for case, result in zip(cases(), results, strict=True):
        assert result is None if case.leaves_early else result == case.expected(server)
    server.wait_until_idle()
