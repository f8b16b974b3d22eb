"""Both host loops over the CountingRunner: the same tokens whatever is in flight, and what becomes of steps that fail."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from jaxserve.config import SchedulerLimits
from jaxserve.core.buckets import Buckets
from jaxserve.core.events import StepResult, TokenEvent
from jaxserve.core.plan import Plan
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.engine.engine import MAX_IDLE_TURNS, Engine
from jaxserve.engine.info import EngineInfo
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.testing import CountingRunner, solo_output

VOCAB, CONTEXT, EOS = 50, 53, frozenset({7})
LIMITS = SchedulerLimits(
    max_num_seqs=4, max_num_batched_tokens=24, max_model_len=CONTEXT, num_pages=33, page_size=4, max_penalty_slots=2, eos_token_ids=EOS
)
LOOPS = pytest.mark.parametrize("async_scheduling", [False, True], ids=["plain", "overlapped"])


class Recorder(CountingRunner):
    """Knows which steps are dispatched and not waited for, and refuses to be given pages that one of them may still write."""

    num_resets = -1  # the constructor resets once

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.log: list[tuple[str, int]] = []
        self.in_flight: dict[int, frozenset[int]] = {}

    def reset(self) -> None:
        super().reset()
        self.num_resets += 1
        self.in_flight = {}

    def run(self, plan: Plan):
        for written in self.in_flight.values():
            taken = {write.page for write in plan.page_writes} & written
            assert not taken, f"pages {taken} are handed out while a dispatched step writes them"
        pending = super().run(plan)
        self.log.append(("run", plan.step_id))
        self.in_flight[plan.step_id] = frozenset(pending.written_pages)
        return _Waited(self, plan.step_id, pending)


@dataclass
class _Waited:
    runner: Recorder
    step_id: int
    pending: object

    def wait(self) -> StepResult:
        self.runner.log.append(("wait", self.step_id))
        self.runner.in_flight.pop(self.step_id, None)
        return self.pending.wait()  # type: ignore[attr-defined]


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def end(self) -> TokenEvent:
        return self.events[-1]


class Turner:
    """Turns an engine, keeps its events by sequence, and checks it after every turn."""

    def __init__(
        self, *, async_scheduling: bool, limits: SchedulerLimits = LIMITS, buckets: Buckets | None = None, **runner: object
    ) -> None:
        sizes = {"num_pages": limits.num_pages, "page_size": limits.page_size, "max_num_seqs": limits.max_num_seqs}
        self.runner = Recorder(**sizes, vocab_size=VOCAB, **runner)
        info = EngineInfo(
            model_path="", model="counting", model_type="llama", dtype="float32", max_model_len=limits.max_model_len, vocab_size=VOCAB,
            eos_token_ids=tuple(EOS), num_pages=limits.num_pages, page_size=limits.page_size, max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )  # fmt: skip
        self.engine = Engine(Scheduler(limits, buckets), self.runner, info, async_scheduling=async_scheduling)
        self.outputs: defaultdict[tuple[str, int], Output] = defaultdict(Output)
        self.on_event: Callable[[TokenEvent], None] = lambda event: None

    def add(self, request_id: str, prompt: list[int], **params: object) -> Request:
        request = Request(
            request_id=request_id, prompt_token_ids=tuple(prompt), params=SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]
        )  # fmt: skip
        self.engine.add(request)
        return request

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.take(self.engine.abort(request_id, index))

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            output = self.outputs[event.request_id, event.index]
            assert not output.events or output.end.finish_reason is None, "an event after the end"
            output.tokens += event.token_ids
            output.logprobs += event.logprobs or []
            output.events.append(event)
            self.on_event(event)

    def turn(self) -> None:
        self.take(self.engine.step())
        self.engine.scheduler.check_integrity()

    def run(self, max_turns: int = 5000) -> None:
        for _ in range(max_turns):
            if not self.engine.has_work:
                break
            self.turn()
        assert not self.engine.has_work, "the work does not end"
        assert self.engine.stats().num_used_pages == 0
        assert not self.runner.in_flight


def test_the_overlapped_loop_dispatches_a_step_before_it_waits_for_the_last() -> None:
    loop = Turner(async_scheduling=True)
    loop.add("a", [5], max_tokens=3)
    loop.turn()
    assert not loop.outputs, "the first step has only been dispatched"
    loop.run()
    assert loop.runner.log == [("run", 0), ("run", 1), ("wait", 0), ("run", 2), ("wait", 1), ("wait", 2)]
    assert loop.outputs["a", 0].tokens == [6, 13, 27]


def test_the_plain_loop_waits_for_each_step() -> None:
    loop = Turner(async_scheduling=False)
    loop.add("a", [5], max_tokens=2)
    loop.turn()
    assert loop.outputs["a", 0].tokens == [6]
    loop.run()
    assert loop.runner.log == [("run", 0), ("wait", 0), ("run", 1), ("wait", 1)]


def test_an_engine_has_work_until_the_step_in_flight_is_committed() -> None:
    loop = Turner(async_scheduling=True)
    loop.add("a", [3, 2], max_tokens=9)  # (3 + 2 + 2) is the end token
    loop.turn()
    loop.turn()
    assert loop.outputs["a", 0].end.finish_reason is FinishReason.STOP
    assert loop.engine.has_work
    assert loop.engine.stats().num_used_pages == 1, "the step in flight still writes it"
    loop.turn()
    assert not loop.engine.has_work
    assert loop.engine.stats().num_used_pages == 0


def test_a_stop_string_found_while_the_next_step_runs() -> None:
    """Whoever reads the text aborts the sequence one step late: its token on the way is dropped, the others' are not."""
    loop = Turner(async_scheduling=True)

    def stop_at_third(event: TokenEvent) -> None:
        if event.request_id == "a" and len(loop.outputs["a", 0].tokens) == 3 and event.finish_reason is None:
            loop.abort("a", 0)

    loop.on_event = stop_at_third
    loop.add("a", [5], ignore_eos=True, max_tokens=20)
    other = loop.add("b", [9, 9, 9, 9, 9], ignore_eos=True, max_tokens=20)
    loop.run()
    assert loop.outputs["a", 0].tokens == [6, 13, 27]
    assert loop.outputs["b", 0].tokens == solo_output(other.prompt_token_ids, other.params, max_length=CONTEXT, vocab_size=VOCAB)[0]


def random_request(rng: random.Random, prefixes: list[list[int]]) -> tuple[list[int], dict[str, object]]:
    prompt = [*rng.choice(prefixes), *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 12)))]
    params: dict[str, object] = {"max_tokens": rng.choice([1, 2, 5, 11, 20]), "ignore_eos": rng.random() < 0.3}
    if rng.random() < 0.6:
        params |= {"temperature": 1.0, "seed": rng.randrange(1000), "n": rng.choice([1, 1, 2, 3])}
    if rng.random() < 0.4:
        params["stop_token_ids"] = [rng.randrange(VOCAB) for _ in range(3)]
    if rng.random() < 0.3:
        params |= {"presence_penalty": 0.5, "min_tokens": rng.randint(0, 1)}
    if rng.random() < 0.3:
        params["logprobs"] = rng.choice([0, 2, -1])
    if rng.random() < 0.2:
        params["prompt_logprobs"] = 1
    return prompt, params


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_pages", [18, 33])
@pytest.mark.parametrize("seed", range(4))
@LOOPS
def test_every_sequence_has_its_solo_tokens(async_scheduling: bool, seed: int, num_pages: int, policy: str) -> None:
    """Arrivals and aborts between turns, stop ids, n, penalties, log-probabilities, shared prefixes, and pages for few of them."""
    rng = random.Random(seed)
    limits = replace(LIMITS, num_pages=num_pages, scheduling_policy=policy, max_num_batched_tokens=rng.choice([7, 24]))
    loop = Turner(async_scheduling=async_scheduling, limits=limits)
    prefixes = [[], [1] * 8, [rng.randrange(VOCAB) for _ in range(9)]]
    requests: dict[str, Request] = {}
    aborted: set[tuple[str, int]] = set()
    while len(requests) < 60 or loop.engine.has_work:
        while len(requests) < 60 and rng.random() < 0.4:
            prompt, params = random_request(rng, prefixes)
            requests[str(len(requests))] = loop.add(str(len(requests)), prompt, **params)
        if requests and rng.random() < 0.05:
            request_id = rng.choice(list(requests))
            index = rng.randrange(requests[request_id].params.n)
            aborted.add((request_id, index))
            loop.abort(request_id, index)
        loop.turn()
    stats = loop.engine.stats()
    assert stats.num_used_pages == 0
    assert stats.num_preemptions > 0 or num_pages > 18
    assert stats.num_cache_hits > 0
    for request_id, request in requests.items():
        for index in range(request.params.n):
            output = loop.outputs[request_id, index]
            tokens, reason, stop_reason = solo_output(
                request.prompt_token_ids, request.params, max_length=CONTEXT, eos=EOS, vocab_size=VOCAB, index=index
            )
            if (request_id, index) in aborted and output.end.finish_reason is FinishReason.ABORT:
                assert output.tokens == tokens[: len(output.tokens)]
                continue
            assert (output.tokens, output.end.finish_reason, output.end.stop_reason) == (tokens, reason, stop_reason)
            assert [entry.token_id for entry in output.logprobs] == ([] if request.params.logprobs is None else tokens)
            has_prompt_logprobs = output.events[0].prompt_logprobs is not None
            assert has_prompt_logprobs == (request.params.prompt_logprobs is not None)


@LOOPS
def test_logits_that_are_not_finite_end_their_own_sequence(async_scheduling: bool) -> None:
    loop = Turner(async_scheduling=async_scheduling, poison_token_id=30)
    loop.add("bad", [29], ignore_eos=True, max_tokens=9)  # 29 + 1 = 30: the token after it cannot be sampled
    good = loop.add("good", [2], ignore_eos=True, max_tokens=3)
    loop.run()
    end = loop.outputs["bad", 0].end
    assert (loop.outputs["bad", 0].tokens, end.finish_reason, end.error) == ([30], FinishReason.ERROR, "logits were not finite")
    assert loop.outputs["good", 0].tokens == solo_output([2], good.params, max_length=CONTEXT, vocab_size=VOCAB)[0]
    assert loop.engine.stats().num_corrupted_sequences == 1


@LOOPS
def test_a_failed_step_ends_what_ran_and_the_engine_goes_on(async_scheduling: bool) -> None:
    loop = Turner(async_scheduling=async_scheduling, failures={3: RuntimeError("the device\nslipped")})
    for i in range(6):  # two wait: there are four slots
        loop.add(str(i), [i + 1], ignore_eos=True, max_tokens=8)
    loop.run()
    for i in range(4):
        output = loop.outputs[str(i), 0]
        assert len(output.tokens) == 2
        assert (output.end.finish_reason, output.end.error) == (FinishReason.ERROR, "the step failed: RuntimeError: the device slipped")
    for i in (4, 5):
        assert loop.outputs[str(i), 0].tokens == solo_output(
            [i + 1], SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8), max_length=CONTEXT, vocab_size=VOCAB
        )[0]  # fmt: skip
    assert loop.runner.num_resets == 1


@LOOPS
def test_a_step_that_cannot_be_dispatched_is_a_failed_step(async_scheduling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Turner(async_scheduling=async_scheduling)
    loop.add("a", [1], ignore_eos=True, max_tokens=8)
    loop.turn()
    with monkeypatch.context() as patch:
        patch.setattr(loop.runner, "run", _raise)
        loop.turn()
    assert loop.outputs["a", 0].end.finish_reason is FinishReason.ERROR
    assert not loop.engine.has_work
    loop.add("b", [5], max_tokens=3)
    loop.run()
    assert loop.outputs["b", 0].tokens == [6, 13, 27]


def _raise(plan: Plan) -> None:
    raise ValueError("no memory")


@LOOPS
def test_two_failures_in_a_row_are_raised(async_scheduling: bool) -> None:
    loop = Turner(async_scheduling=async_scheduling, failures={number: RuntimeError(f"failure {number}") for number in (3, 4, 5)})
    for i in range(6):
        loop.add(str(i), [i + 1], ignore_eos=True, max_tokens=8)
    with pytest.raises(RuntimeError, match="failure"):
        loop.run()


@LOOPS
def test_failures_apart_are_not_in_a_row(async_scheduling: bool) -> None:
    loop = Turner(async_scheduling=async_scheduling, failures={2: RuntimeError("one"), 8: RuntimeError("two")})
    for i in range(9):
        loop.add(str(i), [i + 1], ignore_eos=True, max_tokens=4)
    loop.run()
    assert loop.runner.num_resets == 2


@LOOPS
def test_work_that_is_never_scheduled_is_noticed(async_scheduling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Turner(async_scheduling=async_scheduling)
    loop.add("a", [1], max_tokens=8)
    monkeypatch.setattr(loop.engine.scheduler, "schedule", lambda: Plan(step_id=0, rows=()))
    with pytest.raises(AssertionError, match="0 sequences run and 1 wait, but nothing is scheduled"):
        loop.run(MAX_IDLE_TURNS + 1)


@LOOPS
def test_figures(async_scheduling: bool) -> None:
    loop = Turner(async_scheduling=async_scheduling)
    assert (loop.engine.stats().num_steps, loop.engine.stats().has_work) == (0, False)
    loop.add("a", [1] * 20, ignore_eos=True, max_tokens=3)
    loop.add("b", [2] * 10, ignore_eos=True, max_tokens=2, n=2, temperature=1.0, seed=3)
    assert loop.engine.stats().num_waiting == 3
    loop.run()
    stats = loop.engine.stats()
    assert (stats.num_generated_tokens, stats.num_prompt_tokens) == (3 + 2 * 2, 20 + 2 * 10)
    assert stats.num_steps == sum(stats.step_token_counts) == len(loop.runner.log) // 2
    assert stats.num_step_tokens >= 20 + 10 + 2 + 1 + 1
    assert stats.step_token_counts[3] == 1, "the first step: 24 tokens, above 16 and not above 32"
    assert (stats.num_pages, stats.num_compiles, stats.num_running, stats.num_waiting) == (LIMITS.num_pages, 0, 0, 0)


@LOOPS
def test_the_first_token_tells_how_long_the_sequence_waited(async_scheduling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    for module in ("roster", "token_events"):
        monkeypatch.setattr(f"jaxserve.scheduler.{module}.monotonic", lambda: float(next(now)))
    loop = Turner(async_scheduling=async_scheduling)
    request = Request(request_id="a", prompt_token_ids=(5,), params=SamplingParams(temperature=0.0, max_tokens=3), arrival_time_s=-7.5)
    loop.engine.add(request)
    loop.run()
    assert [(event.queue_s, event.prefill_s) for event in loop.outputs["a", 0].events] == [(7.5, 1.0), (None, None), (None, None)]


def test_closing_waits_for_the_step_in_flight() -> None:
    loop = Turner(async_scheduling=True)
    loop.add("a", [5], max_tokens=3)
    loop.turn()
    loop.engine.close()
    assert loop.runner.log == [("run", 0), ("wait", 0)]
