"""Embeddings of tiny models in float32, against transformers' hidden states (tests/data/embeddings/make.py says how they were made)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM
from jaxserve.core.pooling_params import PoolingParams
from jaxserve.core.request import Request
from jaxserve.core.sequence import FinishReason

REFERENCE = Path(__file__).parent.parent / "data" / "embeddings"
FOLDERS = ["llama3-rope", "qwen3"]
TOLERANCE = 1e-4


@pytest.fixture(params=FOLDERS)
def model(request, tiny_model):
    return tiny_model(request.param, 8, has_pooling=True, is_quick=True)


@pytest.fixture
def reference(model, request) -> dict:
    return json.loads((REFERENCE / f"{request.node.callspec.params['model']}.json").read_text())


def embeddings(prompts: list[list[int]], name: str = "") -> list[Request]:
    return [
        Request(request_id=f"{name} {pooling} {i}", prompt_token_ids=tuple(prompt), pooling=PoolingParams(pooling=pooling))
        for i, prompt in enumerate(prompts)
        for pooling in ("last", "mean")
    ]


def check(events: dict, reference: dict, name: str = "") -> None:
    for pooling in ("last", "mean"):
        for i, expected in enumerate(reference[pooling]):
            [event] = events[f"{name} {pooling} {i}", 0]
            assert (event.finish_reason, event.token_ids, event.error) == (FinishReason.STOP, [], None)
            np.testing.assert_allclose(event.embedding, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_whole_and_in_chunks(model, reference, run: Callable, async_scheduling: bool) -> None:
    compiles = model.runner.compiles.num_compiles
    for limits in ({}, {"max_num_batched_tokens": 7}):
        engine = model.engine(async_scheduling=async_scheduling, enable_prefix_caching=False, **limits)
        check(run(engine, embeddings(reference["prompts"])), reference)
    assert model.runner.compiles.num_compiles == compiles
    assert model.runner.num_late_compiles == 0


def test_on_a_prefix_hit(model, reference, run: Callable) -> None:
    engine = model.engine(async_scheduling=True)
    check(run(engine, embeddings(reference["prompts"], "cold")), reference, "cold")
    again = run(engine, embeddings(reference["prompts"], "warm"))
    check(again, reference, "warm")
    for i, prompt in enumerate(reference["prompts"]):
        assert again[f"warm last {i}", 0][0].num_cached_tokens == (len(prompt) - 1) // 8 * 8
        assert again[f"warm mean {i}", 0][0].num_cached_tokens == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_beside_generation_with_little_memory(model, reference, run: Callable, greedy_request: Callable, async_scheduling: bool) -> None:
    golden = model.expected
    engine = model.engine(async_scheduling=async_scheduling, num_pages=14, max_num_batched_tokens=11, enable_prefix_caching=False)
    tokens = [greedy_request(prompt, f"tokens {i}", 24, prompt_logprobs=0) for i, prompt in enumerate(golden["prompts"])]
    requests = embeddings(reference["prompts"])
    events = run(engine, [*tokens[:2], *requests[:4], *tokens[2:], *requests[4:]])
    assert engine.stats().num_preemptions > 0
    check(events, reference)
    for i, expected in enumerate(golden["greedy"]):
        assert [token for event in events[f"tokens {i}", 0] for token in event.token_ids] == expected


def test_through_the_settings(golden_dir: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    reference = json.loads((REFERENCE / "qwen3.json").read_text())
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "num_pages": 20, "dtype": "float32"}
    with LLM(golden_dir / "qwen3", enable_embeddings=True, pooling="mean", **settings) as llm:
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in reference["prompts"]], use_tqdm=False)
        assert (llm.info.embedding_size, llm.info.num_programs) == (48, 5)
    for output, mean in zip(outputs, reference["mean"], strict=True):
        np.testing.assert_allclose(output.outputs.embedding, mean / np.linalg.norm(mean), atol=TOLERANCE)
