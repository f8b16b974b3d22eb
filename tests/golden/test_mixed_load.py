"""A thousand requests that use every sampling field, n, log-probabilities, aborts and preemption: nothing compiles, nothing leaks."""

from __future__ import annotations

import random
from collections import Counter

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.engine.admission import check_request

NUM_REQUESTS = 1000
EOS = 1


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    def maybe(**choices):
        return {name: choice() for name, choice in choices.items() if rng.random() < 0.3}

    is_greedy = rng.random() < 0.3
    fields = maybe(
        presence_penalty=lambda: rng.uniform(-2, 2),
        frequency_penalty=lambda: rng.uniform(-2, 2),
        repetition_penalty=lambda: rng.uniform(0.5, 2),
        logit_bias=lambda: {rng.randrange(vocab_size): rng.uniform(-100, 100) for _ in range(rng.randint(1, 20))},
        min_tokens=lambda: rng.randint(0, 4),
        stop_token_ids=lambda: tuple(rng.randrange(vocab_size) for _ in range(3)),
        ignore_eos=lambda: True,
        logprobs=lambda: rng.choice([-1, 0, 1, 5, 20]),
        prompt_logprobs=lambda: rng.choice([-1, 0, 3]),
        seed=lambda: rng.randrange(2**63),
    )
    if not is_greedy:
        fields |= maybe(
            top_p=lambda: rng.uniform(0.05, 1),
            top_k=lambda: rng.randint(1, vocab_size),
            min_p=lambda: rng.uniform(0, 1),
            n=lambda: rng.randint(2, 3),
        )
    temperature = 0.0 if is_greedy else rng.uniform(0.1, 2)
    return SamplingParams(temperature=temperature, max_tokens=rng.choice([4, 8, 16, None]), **fields)


def test_a_thousand_mixed_requests(tiny_model):
    model = tiny_model("llama3-rope", 8)
    # Three of the four sequences fit at their full length.
    engine = model.engine(num_pages=24, max_num_batched_tokens=40, eos_token_ids=frozenset({EOS}))
    rng = random.Random(0)
    prefixes = [[rng.randrange(model.spec.vocab_size) for _ in range(24)] for _ in range(3)]
    compiles = model.runner.compiles.num_compiles
    num_ends, reasons, open_ids = Counter(), Counter(), {}
    preemptions = hits = added = 0
    while added < NUM_REQUESTS or engine.has_work:
        while added < NUM_REQUESTS and engine.scheduler.num_waiting < 8:
            prompt = rng.choice([[], *prefixes]) + [rng.randrange(model.spec.vocab_size) for _ in range(rng.randint(1, 30))]
            params = check_request(random_params(rng, model.spec.vocab_size), prompt, engine.info)
            engine.add(Request(request_id=str(added), prompt_token_ids=tuple(prompt), params=params, cache_salt=rng.choice([None, "a"])))
            open_ids[str(added)] = params
            added += 1
        events = engine.step()
        if open_ids and rng.random() < 0.05:
            events += engine.abort(rng.choice(list(open_ids)))
        for event in events:
            check_event(event, open_ids[event.request_id])
            if event.finish_reason is not None:
                num_ends[event.request_id] += 1
                reasons[event.finish_reason] += 1
                if num_ends[event.request_id] == open_ids[event.request_id].n:
                    del open_ids[event.request_id]
        engine.scheduler.check_integrity()
        preemptions, hits = engine.last_stats.num_preemptions, engine.last_stats.num_cache_hits
    assert not open_ids
    assert len(num_ends) == NUM_REQUESTS
    assert preemptions > 20
    assert hits > 1000
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    assert model.runner.compiles.late_compiles == 0
    assert model.runner.compiles.num_compiles == compiles


def check_event(event, params):
    """Log-probabilities are there exactly when asked, one for each token."""
    if event.finish_reason is FinishReason.ABORT:
        return
    assert (event.logprobs is not None) == (params.logprobs is not None)
    if event.logprobs is not None:
        assert [entry.token_id for entry in event.logprobs] == event.token_ids
        for entry in event.logprobs:
            assert entry.logprob <= 0
            assert entry.rank >= 1
            if params.logprobs >= 0:
                assert len(entry.top_ids) == params.logprobs
            if params.logprobs > 0:
                assert entry.top_logprobs[0] >= entry.logprob - 1e-6
    if event.prompt_logprobs is not None:
        assert params.prompt_logprobs is not None
        assert len(event.prompt_logprobs) == event.num_prompt_tokens


def test_aborted_pages_are_free_within_a_step(tiny_model, greedy_request):
    model = tiny_model("llama3-rope", 8)
    engine = model.engine()
    for i, prompt in enumerate(model.expected["prompts"]):
        engine.add(greedy_request(prompt, str(i), 24))
    engine.step()
    assert engine.last_stats.num_used_pages > 0
    for i in range(3):
        engine.abort(str(i))
    assert not engine.has_work
    engine.scheduler.check_integrity()
    engine.add(greedy_request([5], "last", 1))
    engine.step()
    assert engine.last_stats.num_used_pages <= 1
