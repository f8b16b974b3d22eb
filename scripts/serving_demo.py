#!/usr/bin/env python
"""Shows continuous batching through both doors of a whole server: many mixed requests at once against the same ones alone.

    python scripts/serving_demo.py MODEL [--requests 64] [--dtype float32]

Engine, EngineLink, front end, HTTP and gRPC run in this process, so that each step's statistics can be read. Every request is sent
alone first, then all at once over HTTP (the `openai` package, half of them streaming), then all at once over gRPC. Printed: how many
answers are equal and where others part (matrix products differ by bucket in their last bits, which decides near-ties), the wall time
against the sum of the solo runs, and what the steps held. Ends with 1 when an answer differs by more. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import openai
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.core.events import StepStats, TokenEvent
from jaxserve.engine.build import build_engine
from jaxserve.engine.engine import Engine
from jaxserve.engine.link_server import start_link_server
from jaxserve.engine.loop import EngineLoop
from jaxserve.serve.server import FrontEnd
from jaxserve.startup_report import stage_line

NEAR_TIE = 1e-3
"""In logits."""

type Tokens = list[list[int]]
"""The token ids of each of a request's sequences."""


class RecordingEngine(Engine):
    """Keeps every step's statistics."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.scheduler, engine.runner, engine.info)
        self.steps: list[StepStats] = []

    def step(self) -> list[TokenEvent]:
        """One step."""
        events = super().step()
        stats = self.last_stats
        if stats is not None and stats.step_id not in [step.step_id for step in self.steps[-1:]]:
            self.steps.append(stats)
        return events


@dataclass
class Case:
    """One request, in the words both protocols share."""

    prompt: list[int]
    max_tokens: int
    is_stream: bool
    params: dict[str, Any]

    @property
    def n(self) -> int:
        """Sequences asked for."""
        return int(self.params.get("n", 1))


def make_cases(num: int, vocab_size: int) -> list[Case]:
    """Short and long prompts; greedy, seeded, several sequences, penalties, filters, log-probabilities."""
    rng = random.Random(0)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "seed": 2, "n": 2, "top_p": 0.9},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.7, "seed": 3, "top_k": 40, "presence_penalty": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1.2},
    ]
    return [
        Case(
            prompt=[rng.randrange(100, vocab_size - 100) for _ in range(rng.choice([4, 12, 40, 150]))],
            max_tokens=rng.choice([16, 32, 48]),
            is_stream=i % 2 == 0,
            params=kinds[i % len(kinds)],
        )
        for i in range(num)
    ]


async def over_http(client: openai.AsyncOpenAI, case: Case) -> Tokens:
    """The case through the `openai` package."""
    known = ("temperature", "seed", "n", "top_p", "presence_penalty", "logprobs")
    extra = {name: value for name, value in case.params.items() if name not in known} | {"return_token_ids": True, "ignore_eos": True}
    params = {name: value for name, value in case.params.items() if name in known}
    answer: Any = await client.completions.create(
        model="demo", prompt=case.prompt, max_tokens=case.max_tokens, stream=case.is_stream, extra_body=extra, **params
    )
    if not case.is_stream:
        return [choice.token_ids for choice in answer.choices]
    tokens: Tokens = [[] for _ in range(case.n)]
    async for chunk in answer:
        tokens[chunk.choices[0].index] += chunk.choices[0].token_ids
    return tokens


async def over_grpc(stub: VllmEngineStub, case: Case) -> Tokens:
    """The case through `vllm.grpc.engine.VllmEngine`."""
    params = pb.SamplingParams(max_tokens=case.max_tokens, ignore_eos=True, **case.params)
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=case.prompt), sampling_params=params, stream=case.is_stream)
    tokens: Tokens = [[] for _ in range(case.n)]
    async for response in stub.Generate(request):
        if response.HasField("chunk"):
            tokens[response.chunk.index] += response.chunk.token_ids
        elif not case.is_stream:
            tokens[response.complete.index] += response.complete.output_ids
    return tokens


@dataclass
class Report:
    """What is printed of one door."""

    name: str
    solo_s: float
    wall_s: float
    results: list[Tokens]
    stats: list[StepStats] = field(default_factory=list)

    def text(self, expected: list[Tokens]) -> str:
        """The figures, in lines."""
        num_equal = sum(result == solo for result, solo in zip(self.results, expected, strict=True))
        decode_rows = max(step.num_decode_rows for step in self.stats)
        mixing = [step for step in self.stats if step.num_decode_rows and step.num_prefill_rows]
        mixed = max(mixing, key=lambda step: step.num_decode_rows, default=None)
        lines = [
            f"{self.name}: {num_equal} of {len(expected)} equal to their solo runs",
            f"  wall {self.wall_s:.2f} s, solo runs together {self.solo_s:.2f} s: {self.wall_s / self.solo_s:.2f} of it",
            f"  {len(self.stats)} steps, the largest with {decode_rows} decode rows",
        ]
        if mixed is not None:
            lines.append(f"  {len(mixing)} steps mixed both, one {mixed.num_decode_rows} decode and {mixed.num_prefill_rows} prefill rows")
        return "\n".join(lines)


@asynccontextmanager
async def serving(engine: RecordingEngine) -> AsyncIterator[tuple[str, str]]:
    """A whole server around the engine; gives the addresses of HTTP and gRPC."""
    loop = EngineLoop(engine)
    loop.start()
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/engine.sock"
        link = await start_link_server(loop, engine.info, address)
        front_end = FrontEnd(ServerConfig(port=0, grpc_port=0, served_model_name=("demo",)), address)
        endpoints = await front_end.start()
        assert endpoints.http is not None and endpoints.grpc is not None
        try:
            yield endpoints.http, endpoints.grpc
        finally:
            await front_end.stop()
            await asyncio.to_thread(loop.stop)
            await link.stop(None)


async def run_demo(engine: RecordingEngine, num_requests: int) -> bool:
    """Runs and prints everything; True when all answers are equal but for near-ties."""
    cases = make_cases(num_requests, engine.info.vocab_size)
    async with (
        serving(engine) as (http, grpc_address),
        openai.AsyncOpenAI(base_url=f"{http}/v1", api_key="none", max_retries=0, timeout=600) as client,
        grpc.aio.insecure_channel(grpc_address) as channel,
    ):
        send_http = lambda case: over_http(client, case)  # noqa: E731
        started = time.perf_counter()
        expected = [await send_http(case) for case in cases]
        solo_s = time.perf_counter() - started
        reports = [
            await at_once("HTTP", engine, cases, send_http, solo_s),
            await at_once("gRPC", engine, cases, lambda case: over_grpc(VllmEngineStub(channel), case), solo_s),
        ]
        is_equal = True
        for report in reports:
            print(report.text(expected))
            for case, solo, result in zip(cases, expected, report.results, strict=True):
                if result != solo:
                    is_equal &= await is_near_tie(client, case, solo, result)
    return is_equal


async def is_near_tie(client: openai.AsyncOpenAI, case: Case, solo: Tokens, result: Tokens) -> bool:
    """Prints where two answers part and says whether rounding explains it: whether a nudge of NEAR_TIE decides between the two tokens.

    The step is run again from the prompt and what both answers share: greedy or drawn, it gives the same token, as random numbers hang
    on seed and position alone. Once each of the two tokens gets the nudge; a near-tie goes to the nudged one both times.
    """
    index = next(i for i in range(case.n) if solo[i] != result[i])
    at = next(i for i, (one, other) in enumerate(zip(solo[index], result[index], strict=True)) if one != other)
    shared, tokens = solo[index][:at], (solo[index][at], result[index][at])
    params = case.params | {"n": 1}
    if "seed" in params:
        params["seed"] += index
    # The shared output is part of the prompt now, which presence_penalty does not count.
    penalty = params.pop("presence_penalty", 0.0)
    chosen = []
    for winner, loser in (tokens, tokens[::-1]):
        bias = dict.fromkeys(shared, -penalty)
        bias[winner] = bias.get(winner, 0.0) + NEAR_TIE
        bias[loser] = bias.get(loser, 0.0) - NEAR_TIE
        again = Case(case.prompt + shared, max_tokens=1, is_stream=False, params=params | {"logit_bias": bias})
        [[token]] = await over_http(client, again)
        chosen.append(token)
    is_tie = chosen == list(tokens)
    print(f"  {case.params}: sequence {index} differs from token {at} on: {'a' if is_tie else 'NOT a'} near-tie of {tokens}")
    return is_tie


async def at_once(
    name: str, engine: RecordingEngine, cases: list[Case], send: Callable[[Case], Awaitable[Tokens]], solo_s: float
) -> Report:
    """All cases together; prompts are not in the prefix cache, as they were not when they ran alone."""
    engine.scheduler.reset_prefix_cache()
    first = len(engine.steps)
    started = time.perf_counter()
    results = list(await asyncio.gather(*(send(case) for case in cases)))
    return Report(name, solo_s, time.perf_counter() - started, results, engine.steps[first:])


def main() -> int:
    """Returns 0 when every answer equals its solo run, near-ties aside."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    config = EngineConfig(model=arguments.model, dtype=arguments.dtype)
    engine = RecordingEngine(build_engine(config, lambda *stage: print(stage_line(*stage), file=sys.stderr)))
    try:
        return 0 if asyncio.run(run_demo(engine, arguments.requests)) else 1
    finally:
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
