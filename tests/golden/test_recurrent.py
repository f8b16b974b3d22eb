"""A model with recurrent layers through the whole engine: its state lies in slots, so no prefix is ever found and no prompt shared.

Logits and tokens as in `test_golden.py`; its README allows 1e-3, since the recurrence adds up in another order.
"""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxserve.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.build import build_engine
from jaxserve.runner.runner import ModelRunner

NUM_GREEDY = 24
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3-next")


def requests(model, make, prefix, **params):
    return [make(prompt, f"{prefix}{i}", NUM_GREEDY, **params) for i, prompt in enumerate(model.expected["prompts"])]


def check(model, results, prefix):
    """Tokens of the three prompts; every sequence was computed from its first token on."""
    for i, expected in enumerate(model.expected["greedy"]):
        events = results[f"{prefix}{i}", 0]
        assert [token for event in events for token in event.token_ids] == expected, f"prompt {i}"
        assert {event.num_cached_tokens for event in events} == {0}


def spoil_states(runner):
    """What an earlier sequence may have left in every slot, at worst."""
    runner._states = jax.tree.map(lambda state: jnp.full_like(state, jnp.nan), runner._states)


@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("is_overlapped", [False, True], ids=["plain", "overlapped"])
def test_golden(budget, is_overlapped, model, run, greedy_request, dense_logprobs):
    engine = model.engine(max_num_batched_tokens=budget, async_scheduling=is_overlapped)
    spoil_states(model.runner)
    results = run(engine, requests(model, greedy_request, "cold", logprobs=-1, prompt_logprobs=-1))
    check(model, results, "cold")
    for i in range(len(model.expected["prompts"])):
        first = results[f"cold{i}", 0][0]
        got = np.stack([dense_logprobs(entry, model.spec.vocab_size) for entry in [*first.prompt_logprobs[1:], first.logprobs[0]]])
        np.testing.assert_allclose(got, log_softmax(model.arrays[f"logits_{i}"], axis=-1), **TOLERANCE)
    # The same prompts again find nothing.
    check(model, run(engine, requests(model, greedy_request, "again")), "again")
    assert engine.last_stats.num_cache_hits == engine.last_stats.num_cache_queries == 0


@pytest.mark.parametrize("is_overlapped", [False, True], ids=["plain", "overlapped"])
def test_golden_under_preemption(is_overlapped, model, run, greedy_request):
    longest = len(model.expected["prompts"][2]) + NUM_GREEDY
    for budget in (7, 64):
        engine = model.engine(max_num_batched_tokens=budget, num_pages=-(-longest // 16) + 2, async_scheduling=is_overlapped)
        check(model, run(engine, requests(model, greedy_request, "p")), "p")
        assert engine.last_stats.num_preemptions > 0


def test_a_slot_that_is_used_again_begins_with_nothing(model, run, greedy_request):
    engine = model.engine(max_num_seqs=1)
    for prefix in ("a", "b"):
        check(model, run(engine, requests(model, greedy_request, prefix)), prefix)


def test_each_of_several_samples_computes_its_own_prompt(model, run, greedy_request):
    # A top_k of 1 is greedy; temperature 0 allows one sample only.
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(n=2, temperature=1.0, top_k=1, max_tokens=NUM_GREEDY, ignore_eos=True),
        )
        for i, prompt in enumerate(model.expected["prompts"])
    ]
    num_pages = -(-(len(model.expected["prompts"][2]) + NUM_GREEDY) // 16) + 4
    for changes in ({}, {"max_num_batched_tokens": 7}, {"num_pages": num_pages}):
        results = run(model.engine(**changes), requests)
        assert len(results) == 6
        for (request_id, _), events in results.items():
            assert [token for event in events for token in event.token_ids] == model.expected["greedy"][int(request_id)]
            assert {event.num_cached_tokens for event in events} == {0}


@pytest.mark.parametrize("is_overlapped", [False, True], ids=["plain", "overlapped"])
def test_neighbours_that_come_and_go_disturb_nobody(is_overlapped, model, greedy_request):
    engine = model.engine(max_num_batched_tokens=16, async_scheduling=is_overlapped)
    results = {}
    for request in requests(model, greedy_request, "kept"):
        engine.add(request)
    num_steps = 0
    while engine.has_work:
        if num_steps < 40:
            engine.add(greedy_request([5 + num_steps] * (3 + num_steps), f"gone{num_steps}", 9))
            if num_steps >= 3:
                engine.abort(f"gone{num_steps - 3}")
        for event in engine.step():
            results.setdefault((event.request_id, event.index), []).append(event)
        num_steps += 1
    engine.scheduler.check_integrity()
    check(model, results, "kept")
    assert any(request_id.startswith("gone") for request_id, _ in results)


def test_the_start_plans_for_the_state_and_says_that_there_are_no_prefix_hits(golden_dir, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(ModelRunner, "compile", lambda self, *args, **kwargs: (0, 0))  # that is not asked here, and takes long
    monkeypatch.setattr(ModelRunner, "temporaries_bytes", 0)
    config = EngineConfig(model=str(golden_dir / "qwen3-next"), device="cpu", dtype="float32", max_num_seqs=2, max_num_batched_tokens=16)
    with caplog.at_level(logging.INFO, logger="jaxserve.engine.build"):
        engine = build_engine(config)
    assert engine.scheduler.limits.has_recurrent_state
    assert "prefix caching is off: this model has recurrent layers" in caplog.text
    # Three slots, two layers: 3 tokens of 2 x (2 x 8 + 2 x 8) channels, and four matrices of 8 x 8, in float32.
    num_bytes = 3 * 2 * (3 * 64 + 4 * 64) * 4
    assert f"recurrent state {num_bytes / 2**20:>22,.1f} MiB  for every slot" in caplog.text
    engine.runner.close()
