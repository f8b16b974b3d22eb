#!/usr/bin/env python
"""Whether a long prompt in chunks gives what one pass gives: log-probabilities and greedy tokens of a real model in float32 on the CPU.

    python scripts/chunked_prompt.py checkpoints/smollm2-135m-instruct --tokens 8000 --chunks 512,2048

The prompt is drawn from the model's vocabulary with a fixed seed. Each run has the same compiled programs and an
empty cache; the limit on a step's tokens alone differs. Prints a line for each run and ends with 1 where one differs.
`tests/golden/test_chunked_prompt.py` runs it over the model's first layers. Next: `jaxserve.scheduler`, which cuts the chunks.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint import open_checkpoint
from jaxserve.config import SchedulerLimits
from jaxserve.core.buckets import Buckets
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.engine.info import EngineInfo
from jaxserve.models.load import load_model
from jaxserve.models.registry import resolve_spec
from jaxserve.runner.memory import group_limits
from jaxserve.runner.runner import ModelRunner, RunnerShape
from jaxserve.scheduler.scheduler import Scheduler

PAGE_SIZE = 32
NUM_GREEDY = 16
NUM_LOGPROBS = 20
TOLERANCE = 1e-3
"""Nats. Chunks are multiplied in other blocks than the whole, so the last bits differ."""


class Run(NamedTuple):
    """What one way of cutting the prompt gave: greedy tokens, and the most likely tokens of each with their log-probabilities."""

    token_ids: list[int]
    logprobs: list[dict[int, float]]
    num_steps: int
    seconds: float


class LongPrompt:
    """A model of `num_layers` first layers (None: all), compiled for one prompt of `num_tokens`, whole and in each size of `chunks`."""

    def __init__(self, directory: Path, num_tokens: int, chunks: tuple[int, ...], num_layers: int | None = None) -> None:
        checkpoint = open_checkpoint(directory)
        whole = resolve_spec(checkpoint.config)
        self.spec = replace(whole, layers=whole.layers[:num_layers])
        self.prompt = tuple(np.random.default_rng(0).integers(1000, self.spec.vocab_size, num_tokens).tolist())
        self.length = num_tokens + NUM_GREEDY
        device = jax.devices("cpu")[0]
        model = load_model(self.spec, checkpoint.read, jnp.float32, device=device, attention=None)
        shape = RunnerShape(
            buckets=Buckets(1, decode_rows=(2,), mixed_tokens=tuple(sorted({*chunks, num_tokens}))),
            num_pages=-(-self.length // PAGE_SIZE) * len(self.spec.kv_groups) + 1, page_size=PAGE_SIZE, max_model_len=self.length,
            max_penalty_slots=1,
        )  # fmt: skip
        self.runner = ModelRunner(model, self.spec, shape, kv_dtype=jnp.float32, device=device)
        self.runner.compile()

    def run(self, max_chunk: int) -> Run:
        """Serves the prompt alone from an empty cache, at most `max_chunk` tokens a step."""
        self.runner.reset()
        same = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": max_chunk,
            "max_model_len": self.length,
            "num_pages": self.runner.shape.num_pages,
            "page_size": PAGE_SIZE,
        }
        model = {"model_type": self.spec.model_type, "vocab_size": self.spec.vocab_size}
        info = EngineInfo(model_path="", model="long", dtype="float32", eos_token_ids=(), **model, **same)
        limits = SchedulerLimits(groups=group_limits(self.spec), rope_original_length=self.spec.rope_original_length, **same)
        engine = Engine(Scheduler(limits), self.runner, info, async_scheduling=False)
        params = SamplingParams(temperature=0.0, max_tokens=NUM_GREEDY, ignore_eos=True, logprobs=NUM_LOGPROBS)
        engine.add(Request(request_id="long", prompt_token_ids=self.prompt, params=params))
        began, num_steps, events = time.perf_counter(), 0, []
        while engine.has_work:
            events += engine.step()
            num_steps += 1
        entries = [entry for event in events for entry in event.logprobs or ()]
        return Run(
            [token_id for event in events for token_id in event.token_ids],
            [dict(zip(entry.top_ids, entry.top_logprobs, strict=True)) for entry in entries],
            num_steps,
            time.perf_counter() - began,
        )


def difference(one: Run, other: Run) -> float:
    """The largest difference of a log-probability that both report, in nats."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return max(abs(ours[token_id] - theirs[token_id]) for ours, theirs in pairs for token_id in ours.keys() & theirs.keys())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a converted checkpoint")
    parser.add_argument("--tokens", type=int, default=8000, help="length of the prompt")
    parser.add_argument("--chunks", default="512,2048", help="sizes to compare with one pass")
    parser.add_argument("--layers", type=int, help="only the first layers of the model")
    arguments = parser.parse_args()
    chunks = tuple(int(size) for size in arguments.chunks.split(","))
    prompt = LongPrompt(arguments.model, arguments.tokens, chunks, arguments.layers)
    whole = prompt.run(arguments.tokens)
    print(f"one pass: {whole.num_steps} steps, {whole.seconds:.1f} s")
    is_equal = True
    for size in chunks:
        cut = prompt.run(size)
        worst = difference(whole, cut)
        is_same = cut.token_ids == whole.token_ids and worst <= TOLERANCE
        is_equal &= is_same
        verdict = "equal" if is_same else "DIFFERENT"
        print(f"chunks of {size}: {cut.num_steps} steps, {cut.seconds:.1f} s, log-probabilities within {worst:.1e} nats: {verdict}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
