"""The overlapped loop gives a real model's requests what the plain one gives: every kind of sampling, aborts and preemption in float32."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.engine.admission import check_request
from jaxserve.engine.engine import Engine

NUM_REQUESTS = 60
EOS = 1


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    def maybe(**choices):
        return {name: choice() for name, choice in choices.items() if rng.random() < 0.3}

    fields = maybe(
        presence_penalty=lambda: rng.uniform(-2, 2),
        frequency_penalty=lambda: rng.uniform(-2, 2),
        repetition_penalty=lambda: rng.uniform(0.5, 2),
        logit_bias=lambda: {rng.randrange(vocab_size): rng.uniform(-100, 100) for _ in range(5)},
        min_tokens=lambda: rng.randint(0, 4),
        stop_token_ids=lambda: tuple(rng.randrange(vocab_size) for _ in range(6)),
        logprobs=lambda: rng.choice([0, 3, -1]),
        prompt_logprobs=lambda: 2,
    )
    if rng.random() < 0.7:
        fields |= {"temperature": rng.uniform(0.2, 1.5), "seed": rng.randrange(2**63)}
        fields |= maybe(top_p=lambda: rng.uniform(0.3, 1), top_k=lambda: rng.randint(2, 50), n=lambda: rng.randint(2, 3))
    return SamplingParams(max_tokens=rng.choice([4, 8, 16, 24]), **{"temperature": 0.0, **fields})


def make_requests(rng: random.Random, engine: Engine) -> list[Request]:
    vocab_size = engine.info.vocab_size
    prefixes = [[], *([rng.randrange(vocab_size) for _ in range(17)] for _ in range(2))]
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = (*rng.choice(prefixes), *(rng.randrange(vocab_size) for _ in range(rng.randint(1, 20))))
        params = check_request(random_params(rng, vocab_size), prompt, engine.info)
        requests.append(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
    return requests


def serve(engine: Engine, requests: list[Request], abort_at: dict[tuple[str, int], int]) -> dict[tuple[str, int], list]:
    """Serves the requests, a few at a time; aborts a sequence once it has so many tokens, as one with a stop string does."""
    events: dict[tuple[str, int], list] = {}
    num_tokens = dict.fromkeys(abort_at, 0)
    waiting = list(reversed(requests))
    while waiting or engine.has_work:
        while waiting and engine.scheduler.num_waiting < 6:
            engine.add(waiting.pop())
        new = engine.step()
        for event in list(new):
            key = event.request_id, event.index
            if key in abort_at and event.finish_reason is None:
                num_tokens[key] += len(event.token_ids)
                if num_tokens[key] == abort_at[key]:
                    new += engine.abort(*key)
        for event in new:
            events.setdefault((event.request_id, event.index), []).append(event)
        engine.scheduler.check_integrity()
    return events


def test_the_same_answers_as_the_plain_loop(tiny_model) -> None:
    model = tiny_model("llama3-rope", 8)
    rng = random.Random(5)
    compiles = model.runner.compiles.num_compiles
    limits = {"num_pages": 14, "max_num_batched_tokens": 40, "max_penalty_slots": 2, "eos_token_ids": frozenset({EOS})}
    requests = make_requests(rng, model.engine(**limits))
    keys = [(request.request_id, index) for request in requests for index in range(request.params.n)]
    abort_at = {key: rng.randint(1, 5) for key in rng.sample(keys, len(keys) // 8)}
    answers, stats = [], []
    for async_scheduling in (False, True):
        engine = model.engine(async_scheduling=async_scheduling, **limits)
        answers.append(serve(engine, requests, abort_at))
        stats.append(engine.stats())
    plain, overlapped = answers
    assert plain.keys() == overlapped.keys() == set(keys)
    for key in keys:
        compare(plain[key], overlapped[key])
    ends = [events[-1].finish_reason for events in overlapped.values()]
    assert {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT} == set(ends)
    for figures in stats:
        assert figures.num_preemptions > 5
        assert figures.num_cache_hits > 100
        assert (figures.num_used_pages, figures.num_compiles) == (0, 0)
    assert model.runner.compiles.num_compiles == compiles


def compare(plain: list, overlapped: list) -> None:
    """Two histories of one sequence: the same tokens and ends; log-probabilities may differ in their last bits, as batches do."""
    for ours, theirs in zip(plain, overlapped, strict=True):
        assert (ours.token_ids, ours.finish_reason, ours.stop_reason) == (theirs.token_ids, theirs.finish_reason, theirs.stop_reason)
        for name in ("logprobs", "prompt_logprobs"):
            mine, others = getattr(ours, name), getattr(theirs, name)
            assert (mine is None) == (others is None)
            for a, b in zip(mine or (), others or (), strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert a.token_id == b.token_id
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
                    np.testing.assert_allclose(a.top_logprobs, b.top_logprobs, atol=1e-4)


def test_a_failed_device_step_is_cleared_away(tiny_model, run, greedy_request, monkeypatch) -> None:
    """With the real arrays: a step that cannot be dispatched while another is in flight, then the same prompts again."""
    model = tiny_model("llama3-rope", 8)
    prompts = model.expected["prompts"][:3]
    engine = model.engine(async_scheduling=True)
    expected = run(engine, [greedy_request(prompt, str(i), 6) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        engine.add(greedy_request(prompt, f"lost {i}", 6))
    engine.step()
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(model.runner, "_dispatch", lambda *_: 1 / 0)
        ends = engine.step()
    assert {event.finish_reason for event in ends} == {FinishReason.ERROR}
    assert "ZeroDivisionError" in ends[0].error
    again = run(engine, [greedy_request(prompt, str(i), 6) for i, prompt in enumerate(prompts)])
    assert tokens(again) == tokens(expected)


def tokens(events: dict) -> dict:
    return {key: [token for event in each for token in event.token_ids] for key, each in events.items()}
