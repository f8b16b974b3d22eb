"""SmolLM2-135M-Instruct through the whole engine in float32, against another implementation's tokens and log-probabilities."""

from __future__ import annotations

import json

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.build import build_engine

NEAR_TIE = 1e-3
CASES = ["plain", "list", "code", "unicode", "whitespace", "long_800", "long_3000", "chat"]
NUM_GREEDY = 48


@pytest.fixture(scope="module")
def expected(golden_real_dir):
    return json.loads((golden_real_dir / "smollm2-135m-instruct-q4_1.json").read_text())


@pytest.fixture(scope="module")
def engine(demo_model, real_programs):
    config = EngineConfig(model=str(demo_model), device="cpu", dtype="float32", max_model_len=3200, max_num_seqs=8,
                          max_num_batched_tokens=256, enable_prompt_logprobs=True)  # fmt: skip
    engine = build_engine(config)
    yield engine
    engine.close()


def num_comparable(case):
    """Greedy steps up to the first near-tie."""
    return next((i for i, gap in enumerate(case["top2_gap"]) if gap < NEAR_TIE), NUM_GREEDY)


def tokens_of(events):
    return [token for event in events for token in event.token_ids]


@pytest.mark.parametrize("name", CASES)
def test_case(name, engine, expected, run, greedy_request):
    case = expected["cases"][name]
    has_prompt = case["prompt_logprobs"] is not None
    request = greedy_request(case["token_ids"], name, NUM_GREEDY, logprobs=10, prompt_logprobs=0 if has_prompt else None)
    events = run(engine, [request])[name, 0]
    count = num_comparable(case)
    assert tokens_of(events)[:count] == case["greedy"][:count]
    top = dict(zip(events[0].logprobs[0].top_ids, events[0].logprobs[0].top_logprobs, strict=True))
    for token_id, logprob in case["next_top10"]:
        assert top[token_id] == pytest.approx(logprob, abs=2e-3)
    if has_prompt:
        got = [entry.logprob for entry in events[0].prompt_logprobs[1:]]
        assert got == pytest.approx(case["prompt_logprobs"], abs=2e-3)


def test_all_cases_together_hit_the_cache_and_agree(engine, expected, run, greedy_request):
    requests = [greedy_request(expected["cases"][name]["token_ids"], name, NUM_GREEDY) for name in CASES]
    results = run(engine, requests)
    for name in CASES:
        case = expected["cases"][name]
        count = num_comparable(case)
        assert tokens_of(results[name, 0])[:count] == case["greedy"][:count], name
    # The 800-token prompt is the beginning of the 3,000-token one.
    assert results["long_3000", 0][0].num_cached_tokens == 2992
