"""Random requests, steps, aborts, failures and cache resets against the counting device: nothing leaked, shared or starved.

The device checks every page access; the machine checks integrity after each rule, progress at each step, and at the end that every
sequence produced exactly the tokens that it produces alone. At least 10,000 scheduler steps in all.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from jaxserve.config import GroupLimits, SchedulerLimits
from jaxserve.core.buckets import Buckets
from jaxserve.core.plan import Plan
from jaxserve.core.request import Request
from jaxserve.core.sequence import FinishReason
from jaxserve.scheduler.arrival import longest_sequence
from jaxserve.testing import CountingLoop, Output, hidden_state, logprobs_of, solo_output

VOCAB = 40
EOS = frozenset({7})
MAX_IN_FLIGHT = 2
POISON = VOCAB - 1

FULL = GroupLimits()
GROUPS = [
    (FULL,),
    (FULL,),
    (FULL, FULL),
    (FULL, GroupLimits(window=5)),
    (GroupLimits(window=1),),
    (GroupLimits(window=4),),
    (FULL, GroupLimits(chunk=6)),
    (GroupLimits(window=3), GroupLimits(window=8)),
    (GroupLimits(chunk=8), GroupLimits(window=6), FULL),
]

num_steps = 0

limits_strategy = st.builds(
    SchedulerLimits,
    max_num_seqs=st.sampled_from([1, 2, 4, 9]),
    max_num_batched_tokens=st.sampled_from([1, 7, 21, 64]),
    max_model_len=st.sampled_from([24, 48]),
    num_pages=st.integers(7, 32),
    page_size=st.sampled_from([1, 2, 2, 4]),
    groups=st.sampled_from(GROUPS),
    max_penalty_slots=st.sampled_from([1, 2]),
    enable_prefix_caching=st.booleans(),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
    long_prefill_token_threshold=st.sampled_from([0, 0, 3]),
    eos_token_ids=st.just(EOS),
    rope_original_length=st.sampled_from([None, None, 12]),
)

params_strategy = st.fixed_dictionaries(
    {
        "max_tokens": st.one_of(st.none(), st.integers(1, 20)),
        "stop_token_ids": st.sampled_from([(), (3,), (11, 12)]),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([None, None, 2]),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """The plain loop and, where `dispatch` runs ahead of `collect`, the overlapped one."""

    loop: CountingLoop

    @initialize(limits=limits_strategy, has_buckets=st.booleans())
    def start(self, limits: SchedulerLimits, has_buckets: bool) -> None:
        buckets = Buckets(limits.max_num_seqs, (2, 16), (4, 8, 16, 32, 64)) if has_buckets else None
        self.loop = CountingLoop(limits, buckets=buckets, vocab_size=VOCAB, poison_token_id=POISON, tokens_of=self.tokens_of)
        self.requests: dict[str, Request] = {}
        self.ended_early: set[tuple[str, int]] = set()
        self.num_added = 0

    def tokens_of(self, seq_id: int) -> list[int]:
        return self.loop.scheduler.roster.sequences[seq_id].token_ids

    @rule(
        copies=st.integers(1, 5),
        shared=st.integers(0, 3),
        own=st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=9),
        n=st.sampled_from([1, 1, 2, 4]),
        params=params_strategy,
        min_tokens=st.sampled_from([0, 0, 0, 3]),
        seed=st.integers(0, 30),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a"]),
        is_poisoned=st.sampled_from([False] * 9 + [True]),
    )
    def add(self, copies: int, shared: int, own: list[int], n: int, params: dict[str, Any], min_tokens: int, **rest: Any) -> None:
        limits = self.loop.limits
        if n > 1:
            params = {**params, "temperature": 1.0, "seed": rest["seed"]}
        if params["max_tokens"] is not None:
            min_tokens = min(min_tokens, params["max_tokens"])
        for copy in range(copies):
            prompt = [1, 2, 4, 8] * shared + own[copy:] + own[:copy] + [POISON] * rest["is_poisoned"]
            if len(prompt) >= longest_sequence(limits):
                return
            request_id = str(self.num_added)
            self.num_added += 1
            priority = (rest["priority"] + copy) % 3 if limits.scheduling_policy == "priority" else 0
            self.requests[request_id] = self.loop.add(
                request_id, prompt, priority=priority, salt=rest["salt"], n=n, min_tokens=min_tokens, **params
            )

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=30),
        pooling=st.sampled_from(["last", "mean"]),
        is_poisoned=st.sampled_from([False] * 9 + [True]),
    )
    def embed(self, prompt: list[int], pooling: str, is_poisoned: bool) -> None:
        prompt = [1, 2, 4, 8] + prompt + [POISON] * is_poisoned
        if len(prompt) >= longest_sequence(self.loop.limits):
            return
        request_id = str(self.num_added)
        self.num_added += 1
        self.requests[request_id] = self.loop.embed(request_id, prompt, pooling=pooling)

    @rule(count=st.integers(1, 25))
    def steps(self, count: int) -> None:
        while self.loop.in_flight:
            self.loop.collect()
        for _ in range(count):
            if not self.loop.scheduler.has_work:
                return
            self.count_step(self.loop.step())

    @rule()
    @precondition(lambda self: len(self.loop.in_flight) < MAX_IN_FLIGHT)
    def dispatch(self) -> None:
        self.count_step(self.loop.dispatch())

    @rule()
    @precondition(lambda self: self.loop.in_flight)
    def collect(self) -> None:
        self.loop.collect()

    @rule(count=st.integers(1, 25))
    def overlapped_steps(self, count: int) -> None:
        for _ in range(count):
            self.count_step(self.loop.dispatch())
            while len(self.loop.in_flight) > 1 or (self.loop.in_flight and not self.loop.scheduler.has_work):
                self.loop.collect()

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        n = self.requests[request_id].params.n
        index = data.draw(st.one_of(st.none(), st.integers(0, n - 1)))
        for i in range(n) if index is None else (index,):
            output = self.loop.outputs.get((request_id, i))
            if output is None or output.finish_reason is None:
                self.ended_early.add((request_id, i))
        self.loop.abort(request_id, index)

    @rule()
    def reset_prefix_cache(self) -> None:
        is_idle = self.loop.scheduler.roster.pages.pool.num_used == 0
        assert self.loop.scheduler.reset_prefix_cache() == is_idle

    @rule(is_likely=st.sampled_from([False] * 7 + [True]))
    def fail(self, is_likely: bool) -> None:
        if not is_likely:
            return
        running = {(seq.request.request_id, seq.index) for seq in self.loop.scheduler.roster.running}
        self.loop.in_flight.clear()
        self.loop.take(self.loop.scheduler.fail_running("the device failed"))
        self.loop.runner.reset()
        self.ended_early |= running
        assert all(self.loop.outputs[key].error == "the device failed" for key in running)
        assert self.loop.scheduler.roster.pages.pool.num_used == 0

    def count_step(self, plan: Plan) -> None:
        global num_steps
        num_steps += 1
        scheduler = self.loop.scheduler
        if not plan.rows and not self.loop.in_flight:
            assert not scheduler.has_work, "nothing runs, something waits, and nothing was scheduled"

    @invariant()
    def integrity_holds(self) -> None:
        if hasattr(self, "loop"):
            self.loop.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        while self.loop.in_flight:
            self.loop.collect()
        for plan in self.loop.run():
            self.count_step(plan)
        scheduler = self.loop.scheduler
        scheduler.check_integrity()
        assert scheduler.roster.pages.pool.num_used == 0 and scheduler.num_waiting == 0 and not scheduler.roster.requests
        for request in self.requests.values():
            for index in range(request.params.n):
                self.check_output(request, index)

    def check_output(self, request: Request, index: int) -> None:
        output = self.loop.outputs[request.request_id, index]
        prompt, params = request.prompt_token_ids, request.params
        if POISON in prompt:
            assert not output.token_ids and output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
            return
        if request.pooling is not None:
            self.check_embedding(request, output)
            return
        longest = longest_sequence(self.loop.limits)
        tokens, finish_reason, stop_reason = solo_output(prompt, params, max_length=longest, eos=EOS, vocab_size=VOCAB, index=index)
        if POISON in tokens[:-1] and len(output.token_ids) == tokens.index(POISON) + 1:
            assert output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
            tokens = output.token_ids
        elif (request.request_id, index) in self.ended_early:
            assert output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
            tokens = tokens[: len(output.token_ids)]
        else:
            assert (output.finish_reason, output.stop_reason) == (finish_reason, stop_reason)
        assert output.token_ids == tokens
        if params.logprobs is not None:
            text = [*prompt, *tokens]
            expected = [logprobs_of(text[i], text[:i], VOCAB, params.logprobs) for i in range(len(prompt), len(text))]
            assert output.logprobs == expected
        if params.prompt_logprobs is not None and tokens:
            expected = [logprobs_of(prompt[i], prompt[:i], VOCAB, params.prompt_logprobs) for i in range(1, len(prompt))]
            assert output.prompt_logprobs == [None, *expected]

    def check_embedding(self, request: Request, output: Output) -> None:
        assert request.pooling is not None and not output.token_ids
        if output.embedding is None:
            assert output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
            assert (request.request_id, 0) in self.ended_early
            return
        prompt = request.prompt_token_ids
        states = [hidden_state(prompt[: i + 1]) for i in range(len(prompt))]
        expected = states[-1] if request.pooling.pooling == "last" else [sum(values) / len(prompt) for values in zip(*states, strict=True)]
        assert output.finish_reason is FinishReason.STOP and output.embedding == pytest.approx(expected)


def test_random_lives() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=140,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            database=None,
            report_multiple_bugs=False,
        ),
    )
    assert num_steps >= 10_000
