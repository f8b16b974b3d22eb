"""Every checkpoint of the golden set that keeps its past in pages alone, through the whole engine in float32: logits and greedy tokens.

The logits are read from the serving step itself (whole-vocabulary log-probabilities), cold, on a prefix hit, with chunked
prefill, and under preemption. Expected values come from another implementation (tests/data/golden/README.md).
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax

from jaxserve.core.page_counts import longest_fit
from jaxserve.runner.memory import group_limits

LLAMAS = [
    "llama-bf16", "llama-bias", "llama-dynamic-rope", "llama-fp16", "llama-linear-rope", "llama-sharded", "llama-tied-gqa3",
    "llama-tied-missing-head", "llama-yarn", "llama3-rope", "llama3-rope-gguf-f16", "llama3-rope-gguf-q4_0",
    "llama3-rope-gguf-q4_k_m", "llama3-rope-gguf-q8_0",
]  # fmt: skip
# Layers with windows or chunks of 16 positions: alone, beside layers that see everything, with sinks and soft caps.
WINDOWED = ["cohere2", "exaone4", "gemma2", "gemma3-text", "gpt-oss", "llama4-text", "mistral-swa", "olmo3"]
OTHERS = [
    "cohere", "deepseek-v2-lite", "deepseek-v3", "ernie4_5", "falcon", "falcon-mqa", "gemma", "glm4", "glm4-moe", "gpt-bigcode",
    "gpt-neox", "gpt2", "gpt2-base-keys", "gptj", "granite", "granitemoe", "minicpm3", "mixtral", "olmo", "olmo2", "olmoe", "opt", "phi",
    "phi3", "phi3-longrope", "qwen2", "qwen2-moe", "qwen3", "qwen3-moe", "smollm3", "stablelm", "starcoder2",
]  # fmt: skip
PAGES_OF_16 = {"gemma2", "llama4-text", "llama-dynamic-rope", "llama3-rope", "mistral-swa"}
"""The others have pages of 8."""
SERVED = {"llama3-rope", "gpt-oss"}
"""Compiled as they are served; the others quickly."""
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
TOLERANCE_OF_8_BITS = 1e-3
"""How much the log-probabilities over 8-bit pages may differ between two ways to compute them: the last bits of a key differ with the
program that computed it, and where it lies between two numbers of 8 bits, they decide which is stored. That moves them by less than 1e-4
here; 8 bits in place of 32 move them by more than 1e-2."""
NUM_GREEDY = 24


def expected_tokens(model, i):
    # With a cache, dynamic RoPE leaves earlier keys on the table they were written with.
    return model.expected.get("greedy_with_kv_cache", {}).get(str(i), model.expected["greedy"][i])


def requests(model, make, prefix, **params):
    return [make(p, f"{prefix}{i}", NUM_GREEDY, **params) for i, p in enumerate(model.expected["prompts"])]


def pages_for(model, length, budget, page_size):
    """Just above what a sequence of this length needs alone, so that three cannot finish side by side; the null page included."""
    limits = {"max_chunk": budget, "page_size": page_size, "max_length": length}
    return next(count for count in range(1, 128) if longest_fit(group_limits(model.spec), count, **limits) >= length) + 2


def preempt_often(engine, wanted):
    """Runs the requests and preempts the last running sequence at every sixth step: windows hardly grow, so pages may never run out."""
    results = {}
    for request in wanted:
        engine.add(request)
    for i in range(1000):
        for event in engine.step():
            results.setdefault((event.request_id, event.index), []).append(event)
        scheduler = engine.scheduler
        if i % 6 == 5 and scheduler.num_running:
            scheduler.roster.preempt(scheduler.roster.running.pop())
        scheduler.check_integrity()
        if not engine.has_work:
            return results
    raise AssertionError("the work does not end")


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


@pytest.mark.parametrize("folder", [*LLAMAS, *WINDOWED, *OTHERS])
def test_golden(folder, tiny_model, run, greedy_request, dense_logprobs):
    page_size = 16 if folder in PAGES_OF_16 else 8
    model = tiny_model(folder, page_size, is_quick=folder not in SERVED, is_served=folder in SERVED)
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
    if folder not in OTHERS:  # here, as keeping sixty models compiled for another test takes more memory maps than Linux gives
        check_under_preemption(model, page_size, run, greedy_request)


def check_under_preemption(model, page_size, run, greedy_request):
    longest = len(model.expected["prompts"][2]) + NUM_GREEDY
    for budget in (7, 64):
        num_pages = pages_for(model, longest, budget, page_size)
        engine = model.engine(max_num_batched_tokens=budget, num_pages=num_pages)
        wanted = requests(model, greedy_request, "p")
        if "greedy_with_kv_cache" in model.expected:
            wanted = wanted[:2]  # recomputing moves every key to the table of the new length
        is_windowed = any(group.reach is not None for group in group_limits(model.spec))
        results = preempt_often(engine, wanted) if is_windowed else run(engine, wanted)
        for i in range(len(wanted)):
            assert tokens_of(results[f"p{i}", 0]) == model.expected["greedy"][i]
        if len(wanted) == 3:
            assert engine.last_stats.num_preemptions > 0


@pytest.mark.parametrize(("folder", "kv_dtype"), [("mistral-swa", "uint8"), ("deepseek-v3", "int8")], ids=["windows-fp8", "latent-int8"])
def test_8_bit_pages_hold_the_same_however_they_are_filled(folder, kv_dtype, tiny_model, run, greedy_request, dense_logprobs):
    """In chunks, found by their prefix, and computed again after a preemption they give what each prompt alone gives in one pass."""
    model = tiny_model(folder, 8, is_quick=True, kv_dtype=kv_dtype)
    vocab, longest = model.spec.vocab_size, len(model.expected["prompts"][2])

    def described(results, prefix):
        of_each = [results[f"{prefix}{i}", 0] for i in range(len(model.expected["prompts"]))]
        logprobs = [np.stack([dense_logprobs(entry, vocab) for event in events for entry in event.logprobs]) for events in of_each]
        return [tokens_of(events) for events in of_each], np.stack(logprobs)

    def check(results, prefix):
        tokens, logprobs = described(results, prefix)
        assert tokens == wanted_tokens
        np.testing.assert_allclose(logprobs, wanted_logprobs, atol=TOLERANCE_OF_8_BITS, rtol=0)

    alone = [run(model.engine(), [request]) for request in requests(model, greedy_request, "alone", logprobs=-1)]
    wanted_tokens, wanted_logprobs = described({key: events for results in alone for key, events in results.items()}, "alone")
    unrounded = np.stack([log_softmax(model.arrays[f"logits_{i}"][-1]) for i in range(len(alone))])
    assert np.abs(wanted_logprobs[:, 0] - unrounded).max() > 10 * TOLERANCE_OF_8_BITS
    for budget in (7, 64):
        engine = model.engine(max_num_batched_tokens=budget)
        check(run(engine, requests(model, greedy_request, "cold", logprobs=-1)), "cold")
        hits = run(engine, requests(model, greedy_request, "hit", logprobs=-1))
        assert hits["hit2", 0][0].num_cached_tokens == (longest - 1) // 8 * 8
        check(hits, "hit")
        engine = model.engine(max_num_batched_tokens=budget, num_pages=pages_for(model, longest + NUM_GREEDY, budget, 8))
        check(preempt_often(engine, requests(model, greedy_request, "again", logprobs=-1)), "again")
        assert engine.last_stats.num_preemptions > 2
