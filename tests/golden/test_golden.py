"""Every llama checkpoint of the golden set, through the whole engine in float32: logits and greedy tokens.

The logits are read from the serving step itself (whole-vocabulary log-probabilities), cold, on a prefix hit, with chunked
prefill, and under preemption. Expected values come from another implementation (tests/data/golden/README.md).
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax

FOLDERS = [
    "llama-bf16", "llama-bias", "llama-dynamic-rope", "llama-fp16", "llama-linear-rope", "llama-sharded", "llama-tied-gqa3",
    "llama-tied-missing-head", "llama-yarn", "llama3-rope", "llama3-rope-gguf-f16", "llama3-rope-gguf-q4_0",
    "llama3-rope-gguf-q4_k_m", "llama3-rope-gguf-q8_0",
]  # fmt: skip
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
NUM_GREEDY = 24


def expected_tokens(model, i):
    # With a cache, dynamic RoPE leaves earlier keys on the table they were written with.
    return model.expected.get("greedy_with_kv_cache", {}).get(str(i), model.expected["greedy"][i])


def requests(model, make, prefix, **params):
    return [make(p, f"{prefix}{i}", NUM_GREEDY, **params) for i, p in enumerate(model.expected["prompts"])]


def tokens_of(events):
    return [token for event in events for token in event.token_ids]


def check_tokens(model, results, prefix):
    for i in range(len(model.expected["prompts"])):
        assert tokens_of(results[prefix + str(i), 0]) == expected_tokens(model, i), f"prompt {i}"


def check_logits(model, results, prefix, dense_logprobs, has_prompt):
    vocab = model.spec.vocab_size
    for i, prompt in enumerate(model.expected["prompts"]):
        want = log_softmax(model.arrays[f"logits_{i}"], axis=-1)
        first = results[prefix + str(i), 0][0]
        np.testing.assert_allclose(dense_logprobs(first.logprobs[0], vocab), want[-1], **TOLERANCE)
        if has_prompt:
            assert first.prompt_logprobs[0] is None
            assert [entry.token_id for entry in first.prompt_logprobs[1:]] == prompt[1:]
            got = np.stack([dense_logprobs(entry, vocab) for entry in first.prompt_logprobs[1:]])
            np.testing.assert_allclose(got, want[:-1], **TOLERANCE)


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("folder", FOLDERS)
def test_golden(folder, page_size, tiny_model, run, greedy_request, dense_logprobs):
    model = tiny_model(folder, page_size)
    for budget in (7, 64):
        engine = model.engine(max_num_batched_tokens=budget)
        cold = run(engine, requests(model, greedy_request, "cold", logprobs=-1, prompt_logprobs=-1))
        check_logits(model, cold, "cold", dense_logprobs, has_prompt=True)
        check_tokens(model, cold, "cold")

        hits = run(engine, requests(model, greedy_request, "hit", logprobs=-1))
        num_prompt = len(model.expected["prompts"][2])
        limit = model.spec.rope_original_length or num_prompt
        # All full pages but those that hold the last token; nothing of a sequence beyond a length-dependent RoPE's original table.
        num_cached = (num_prompt - 1) // page_size * page_size if num_prompt <= limit else 0
        assert hits["hit2", 0][0].num_cached_tokens == num_cached
        check_logits(model, hits, "hit", dense_logprobs, has_prompt=False)
        check_tokens(model, hits, "hit")


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("folder", FOLDERS)
def test_golden_under_preemption(folder, page_size, tiny_model, run, greedy_request):
    model = tiny_model(folder, page_size)
    longest = len(model.expected["prompts"][2]) + NUM_GREEDY
    # Just above what the longest sequence needs alone: the three cannot finish side by side.
    num_pages = -(-longest // page_size) + 2
    for budget in (7, 64):
        engine = model.engine(max_num_batched_tokens=budget, num_pages=num_pages)
        wanted = requests(model, greedy_request, "p")
        if "greedy_with_kv_cache" in model.expected:
            wanted = wanted[:2]  # recomputing moves every key to the table of the new length
        results = run(engine, wanted)
        for i in range(len(wanted)):
            assert tokens_of(results[f"p{i}", 0]) == model.expected["greedy"][i]
        if len(wanted) == 3:
            assert engine.last_stats.num_preemptions > 0
