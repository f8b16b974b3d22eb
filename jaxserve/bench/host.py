"""Host time of a step: everything an engine process does for a token except the model's program, which only pretends to run.

`jaxserve bench host`. Scheduler, pages, prefix hashes, the packed array and its upload, the loop's thread and the messages to the front end
are the real ones. The program is replaced by a device that is busy for `--step-ms` (`testing.SerialDevice`) and by tokens made
in advance, so no model is needed. Sequences keep finishing and new ones keep arriving, a tenth of them with stop strings (which the
front end answers with an abort) and log-probabilities. Medians over the measured turns of the loop. Next: `bench.host_times`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import numpy as np

from jaxserve.bench.host_times import PARTS, HostTimes
from jaxserve.bench.report import print_report, processor_name
from jaxserve.config import SchedulerLimits
from jaxserve.core.buckets import Bucket, Buckets
from jaxserve.core.events import StepResult, TokenEvent
from jaxserve.core.plan import Plan
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine import link_codec
from jaxserve.engine.engine import Engine
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.interpreter import prompt_interpreter
from jaxserve.engine.link_server import encode_output
from jaxserve.engine.loop import EngineLoop, Output
from jaxserve.errors import ConfigError
from jaxserve.runner.layout import PAGE_WRITE_WORDS, UPDATE_PAGE_WRITES, StepLayout
from jaxserve.runner.pending_step import HostTokens, step_result
from jaxserve.runner.prepare import prepare
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.settings import Parser
from jaxserve.testing import SerialDevice

VOCAB_SIZE = 32_000
MAX_NUM_BATCHED_TOKENS = 2048
NUM_LOGPROBS, LOGPROBS_WIDTH = 5, 20
MEASURED_LOOPS = (("overlapped", True), ("plain", False))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark with command-line arguments."""
    parser = Parser(
        prog="jaxserve bench host", usage="jaxserve bench host [flags]", description="Host time of a step, with a pretended device."
    )
    options: list[tuple[str, int, str]] = [
        ("--num-seqs", 256, "Sequences that run at once"),
        ("--input-len", 128, "Prompt tokens of each request"),
        ("--output-len", 128, "Output tokens of each request"),
        ("--page-size", 16, "Positions of a KV page"),
        ("--steps", 300, "Measured steps of each loop"),
    ]
    for flag, default, text in options:
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default {default}).")
    parser.add_argument("--step-ms", type=float, default=5.0, metavar="MS", help="What the device pretends to take for a step (default 5).")
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be above 0.")
    setup = Setup(args.num_seqs, args.input_len, args.output_len, args.page_size, args.steps, args.step_ms / 1e3)
    rows = []
    for name, is_async in MEASURED_LOOPS:
        times = measure(setup, async_scheduling=is_async)
        rows.append((name, *(1e3 * times.median(part) for part in PARTS), 1e3 * times.median_host(), 1e3 * times.median_period()))
    facts = {
        "sequences": setup.num_seqs,
        "pretended step ms": args.step_ms,
        "lengths": f"{setup.input_len} in / {setup.output_len} out",
        "page size": setup.page_size,
        "measured steps": setup.num_steps,
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "unit": "milliseconds, medians; host is all parts but wait",
    }
    print_report("host", facts, ("loop", *PARTS, "host", "period"), rows)
    return 0


@dataclass(frozen=True)
class Setup:
    """The load: `num_seqs` sequences at once, and how many turns of the loop are measured."""

    num_seqs: int
    input_len: int
    output_len: int
    page_size: int
    num_steps: int
    step_s: float

    @property
    def max_model_len(self) -> int:
        """Room for a sequence that the front end aborts a few tokens late."""
        return self.input_len + self.output_len + 32

    @property
    def num_warm_up_turns(self) -> int:
        """Until all prompts are computed once, and some more."""
        return 50 + 2 * self.num_seqs * self.input_len // MAX_NUM_BATCHED_TOKENS

    def limits(self) -> SchedulerLimits:
        """Pages for all, without preemption, so that finished prefixes are evicted all the time."""
        per_sequence = -(-self.max_model_len // self.page_size)
        return SchedulerLimits(
            max_num_seqs=self.num_seqs,
            max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, self.num_seqs),
            max_model_len=self.max_model_len,
            num_pages=int(1.1 * self.num_seqs * per_sequence) + 2,
            page_size=self.page_size,
            eos_token_ids=frozenset({0}),
        )


def measure(setup: Setup, *, async_scheduling: bool) -> HostTimes:
    """Times of `setup.num_steps` turns of one loop, in a steady state."""
    limits = setup.limits()
    buckets = Buckets.build(max_num_seqs=limits.max_num_seqs, max_num_tokens=limits.max_num_batched_tokens)
    times = HostTimes(setup.num_warm_up_turns)
    info = EngineInfo(
        model_path="", model="host", model_type="", dtype="", max_model_len=limits.max_model_len, vocab_size=VOCAB_SIZE,
        eos_token_ids=(0,), num_pages=limits.num_pages, page_size=limits.page_size, max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )  # fmt: skip
    runner = PretendedRunner(buckets, setup.page_size, setup.step_s, times)
    engine = _TimedEngine(_TimedScheduler(limits, buckets, times), runner, info, times, async_scheduling=async_scheduling)
    loop = EngineLoop(engine)
    load = _Load(setup, loop, times)
    load.start()  # before the loop: the stopwatch belongs to its thread
    with prompt_interpreter():  # as in an engine process
        loop.start()
        try:
            load.is_done.wait()
        finally:
            loop.stop()
    if load.failure is not None:
        raise RuntimeError(load.failure)
    return times


class PretendedRunner:
    """`ModelRunner` without a model: packs and uploads each plan as that does, then waits for a device that only keeps time."""

    num_late_compiles = 0

    def __init__(self, buckets: Buckets, page_size: int, step_s: float, times: HostTimes) -> None:
        self._buckets, self._page_size, self._times = buckets, page_size, times
        self._clock = SerialDevice(step_s)
        self._layouts = {bucket: StepLayout(bucket, 1, page_size) for bucket in buckets.all()}
        self._uploads = {bucket: _compile_upload(layout.size) for bucket, layout in self._layouts.items()}
        self._upload_updates = _compile_upload(UPDATE_PAGE_WRITES, PAGE_WRITE_WORDS)
        rng, count = np.random.default_rng(0), buckets.max_num_seqs + 1
        self._tokens = [
            HostTokens(
                rng.integers(1, VOCAB_SIZE, count, np.int32), np.full(count, -1.0, np.float32), np.ones(count, np.int32),
                rng.integers(1, VOCAB_SIZE, (count, LOGPROBS_WIDTH), np.int32), -np.sort(rng.random((count, LOGPROBS_WIDTH), np.float32)),
            )
            for _ in range(16)
        ]  # fmt: skip

    def run(self, plan: Plan) -> _PretendedStep:
        """Packs and uploads the plan."""
        with self._times.part("prepare"):
            bucket = self._buckets.choose(plan)
            prepared = prepare(plan, self._layouts[bucket], null_slot=self._buckets.max_num_seqs, null_penalty_slot=0)
            for writes in prepared.updates:
                self._upload_updates(writes)
            self._uploads[bucket](prepared.packed)
        tokens = self._tokens[plan.step_id % len(self._tokens)]
        return _PretendedStep(plan, bucket, tokens, prepared.wants_logprobs, self._clock.dispatch(), self._times)

    def reset(self) -> None:
        """There is no state."""

    def close(self) -> None:
        """There is nothing to free."""


@cache
def _compile_upload(*shape: int) -> Callable[[np.ndarray], jax.Array]:
    """A program that takes an array from the host, as the step does, and reads one word of it."""
    return jax.jit(lambda array: array.ravel()[0]).lower(jax.ShapeDtypeStruct(shape, np.int32)).compile()


@dataclass(frozen=True, slots=True)
class _PretendedStep:
    plan: Plan
    bucket: Bucket
    tokens: HostTokens
    wants_logprobs: bool
    ready_s: float
    times: HostTimes

    def wait(self) -> StepResult:
        with self.times.part("wait"):
            time.sleep(max(0.0, self.ready_s - time.perf_counter()))
        with self.times.part("read"):
            return step_result(self.plan, self.bucket, self.tokens.token_id, self.tokens if self.wants_logprobs else None, None)


class _TimedScheduler(Scheduler):
    def __init__(self, limits: SchedulerLimits, buckets: Buckets, times: HostTimes) -> None:
        super().__init__(limits, buckets)
        self._times = times

    def schedule(self) -> Plan:
        with self._times.part("schedule"):
            return super().schedule()

    def commit(self, plan: Plan, result: StepResult) -> list[TokenEvent]:
        with self._times.part("commit"):
            return super().commit(plan, result)


class _TimedEngine(Engine):
    """What a turn takes beyond the scheduler's and the runner's own parts: sorting events, arrivals and aborts, the rest."""

    def __init__(
        self, scheduler: Scheduler, runner: PretendedRunner, info: EngineInfo, times: HostTimes, *, async_scheduling: bool
    ) -> None:
        super().__init__(scheduler, runner, info, async_scheduling=async_scheduling)
        self._times = times

    def add(self, request: Request) -> None:
        with self._times.part("arrive"):
            super().add(request)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenEvent]:
        with self._times.part("arrive"):
            return super().abort(request_id, index)

    def step(self) -> list[TokenEvent]:
        self._times.end_turn()
        with self._times.part("rest"):
            return super().step()


class _Load:
    """The front end: turns each output into bytes, as the link does, and keeps a few more requests open than may run."""

    def __init__(self, setup: Setup, loop: EngineLoop, times: HostTimes) -> None:
        self._setup, self._times = setup, times
        self._rng = np.random.default_rng(0)
        self._num_added = 0
        self._num_left: dict[str, int] = {}  # tokens until the stop string, of requests that have one
        self.num_bytes = 0
        self.failure: str | None = None
        self.is_done = threading.Event()
        self._client = loop.connect(self._deliver)

    def start(self) -> None:
        """The first sequences have lengths of all sizes, so that later ones finish evenly."""
        count = self._setup.num_seqs + max(1, self._setup.num_seqs // 32)
        for i in range(count):
            self._add(1 + i * self._setup.output_len // count)

    def _add(self, output_len: int) -> None:
        """Sends a request over the link's messages; every tenth has stop strings and log-probabilities."""
        request_id = f"{self._num_added:032x}"
        prompt = tuple(self._rng.integers(1, VOCAB_SIZE, self._setup.input_len).tolist())
        if self._num_added % 10 == 0:
            self._num_left[request_id] = output_len
            params = SamplingParams(max_tokens=None, stop=("\n\n", "END"), logprobs=NUM_LOGPROBS)
        else:
            params = SamplingParams(max_tokens=output_len)
        self._num_added += 1
        command = link_codec.encode_add(Request(request_id=request_id, prompt_token_ids=prompt, params=params))
        with self._times.part("arrive"):
            request = link_codec.decode_add(command.add)
            self._client.add(request)

    def _deliver(self, output: Output) -> None:
        """Runs in the loop's thread."""
        with self._times.part("emit"):
            self.num_bytes += sum(len(message.SerializeToString()) for message in encode_output(output))
        with self._times.part("client"):
            self._answer(output)

    def _answer(self, output: Output) -> None:
        if self._times.num_turns >= self._setup.num_steps or output.failure is not None:
            if not self.is_done.is_set():
                self.failure = output.failure
            self.is_done.set()
            return
        for event in output.events:
            if event.finish_reason is not None:
                self._num_left.pop(event.request_id, None)
                self._add(self._setup.output_len)
            elif event.request_id in self._num_left:
                self._num_left[event.request_id] -= 1
                if self._num_left[event.request_id] == 0:
                    self._client.abort(event.request_id)


if __name__ == "__main__":
    raise SystemExit(main())
