"""Gemma 3 270M through the whole engine in float32, prompts longer than its window included, against another implementation."""

from __future__ import annotations

import json

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.build import build_engine
from jaxserve.engine.engine import Engine

NEAR_TIE = 1e-3
SHORT = ["plain", "list", "code", "unicode", "whitespace"]
LONG = ["long_800", "long_3000"]
WINDOW, MAX_CHUNK = 512, 256
NUM_GREEDY = 48


@pytest.fixture(scope="module")
def expected(golden_real_dir):
    return json.loads((golden_real_dir / "gemma-3-270m-q4_k_m.json").read_text())["cases"]


@pytest.fixture(scope="module")
def engine(gemma3_model, real_programs):
    config = EngineConfig(model=str(gemma3_model), device="cpu", dtype="float32", max_model_len=3200, max_num_seqs=2,
                          max_num_batched_tokens=MAX_CHUNK, enable_prompt_logprobs=True)  # fmt: skip
    engine = build_engine(config)
    yield engine
    engine.close()


def check(case, events):
    """Greedy tokens up to the first near-tie, and the log-probabilities of the first."""
    count = next((i for i, gap in enumerate(case["top2_gap"]) if gap < NEAR_TIE), NUM_GREEDY)
    assert [token for event in events for token in event.token_ids][:count] == case["greedy"][:count]
    top = dict(zip(events[0].logprobs[0].top_ids, events[0].logprobs[0].top_logprobs, strict=True))
    for token_id, logprob in case["next_top10"]:
        assert top[token_id] == pytest.approx(logprob, abs=2e-3)
    if case["prompt_logprobs"] is not None:
        got = [entry.logprob for entry in events[0].prompt_logprobs[1:]]
        assert got == pytest.approx(case["prompt_logprobs"], abs=2e-3)


def test_short_cases_together(engine, expected, run, greedy_request):
    requests = [greedy_request(expected[name]["token_ids"], name, NUM_GREEDY, logprobs=10, prompt_logprobs=0) for name in SHORT]
    results = run(engine, requests)
    for name in SHORT:
        assert expected[name]["prompt_logprobs"] is not None
        check(expected[name], results[name, 0])


def test_long_cases_together_hold_few_pages_of_windows(engine, expected, greedy_request):
    assert set(expected) == {*SHORT, *LONG}
    plain = Engine(engine.scheduler, engine.runner, engine.info, async_scheduling=False)
    scheduler, page_size = plain.scheduler, plain.info.page_size
    groups = scheduler.limits.groups
    assert {group.window for group in groups} == {WINDOW, None}
    results, most = {}, {name: [0] * len(groups) for name in LONG}
    for name in LONG:
        plain.add(greedy_request(expected[name]["token_ids"], name, NUM_GREEDY, logprobs=10))
    while plain.has_work:
        for event in plain.step():
            results.setdefault(event.request_id, []).append(event)
        for sequence in scheduler.roster.running:
            held = [sum(page != 0 for page in table) for table in sequence.page_tables]
            most[sequence.request.request_id] = list(map(max, most[sequence.request.request_id], held))
    scheduler.check_integrity()
    for name in LONG:
        check(expected[name], results[name])
        num_tokens = len(expected[name]["token_ids"]) + NUM_GREEDY - 1  # the last one's keys are never computed
        for count, group in zip(most[name], groups, strict=True):
            if group.window is None:
                assert count == -(-num_tokens // page_size)
            else:
                assert count <= -(-(WINDOW + MAX_CHUNK) // page_size) + 1 < -(-num_tokens // page_size)


def test_long_prompt_on_a_prefix_hit(engine, expected, run, greedy_request):
    # The other test may have left its pages; once more in any case.
    request = greedy_request(expected["long_3000"]["token_ids"], "again", NUM_GREEDY, logprobs=10)
    run(engine, [greedy_request(expected["long_3000"]["token_ids"], "first", 1)])
    events = run(engine, [request])["again", 0]
    assert events[0].num_cached_tokens >= 2900
    check(expected["long_3000"], events)


def test_tokenizer(gemma3_model, expected):
    from jaxserve.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(gemma3_model)
    texts = {name: case for name, case in expected.items() if isinstance(case.get("text"), str)}
    assert len(texts) >= 5
    for name, case in texts.items():
        assert tokenizer.encode(case["text"]) == case["token_ids"], name  # BOS first
    digits = "902 236743 236778 236771 236778 236812 236764 236743 236770 236800 236819 20896 532 236743 236770 236771 236771 236771"
    digits += " 236771 236771 236771 5385 236793 1123 236784 236800 236761 236770 236812 236770 236810 236819"
    ids = tokenizer.encode("In 2024, 139 boats and 1000000 fish; x=3.14159", add_special_tokens=False)
    assert ids == [int(word) for word in digits.split()]
