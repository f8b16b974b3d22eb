"""The decoder against golden logits: chunks, cached decodes, other dtypes and attention implementations. Every folder: `test_families`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.decoder import DecoderLayer
from pallas_kernels import dispatch

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("folder", ["llama-tied-gqa3", "llama-dynamic-rope", "gpt-oss", "llama4-text", "deepseek-v2-lite"])
def test_chunks_then_a_greedy_decode(folder: str, golden: Callable[..., Any], sequence_run: Any) -> None:
    case = golden(folder)
    run = sequence_run(case.model())
    prompt, logits = case.prompts[2], case.logits[2]
    run.start(rope_length=len(prompt))
    chunks = [run.feed(prompt[:13]), run.feed(prompt[13:14]), run.feed(prompt[14:])]
    np.testing.assert_allclose(np.concatenate(chunks), logits, **TOLERANCE)
    # With a length-dependent table a cached decode differs from recomputing: the folder then has its own tokens.
    expected = case.expected.get("greedy_with_kv_cache", {}).get("2", case.expected["greedy"][2])
    tokens = [int(chunks[-1][-1].argmax())]
    while len(tokens) < len(expected):
        tokens.append(int(run.feed(tokens[-1:])[0].argmax()))
    assert tokens == expected


@pytest.mark.parametrize("name", ["cpu_native", "xla"])
def test_every_attention_implementation(name: str, golden: Callable[..., Any], sequence_run: Any) -> None:
    if (reason := dispatch.available()[name]) is not None:
        pytest.skip(reason)
    case = golden("llama3-rope")
    run = sequence_run(case.model(attention=name))
    prompt = case.prompts[2]
    np.testing.assert_allclose(np.concatenate([run.feed(prompt[:20]), run.feed(prompt[20:])]), case.logits[2], **TOLERANCE)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.1), ("float16", 0.02)])
@pytest.mark.parametrize("folder", ["llama-bias", "llama-tied-gqa3"])
def test_narrow_dtypes_stay_near(folder: str, dtype: str, tolerance: float, golden: Callable[..., Any], sequence_run: Any) -> None:
    case = golden(folder)
    run = sequence_run(case.model(jnp.dtype(dtype)))
    logits = run.feed(case.prompts[1])
    assert logits.dtype == np.float32 and run.pages[0].dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(logits, case.logits[1], atol=tolerance)
    assert np.abs(logits - case.logits[1]).mean() < tolerance / 5


def test_mistral_without_a_window_is_the_same_network(golden: Callable[..., Any], sequence_run: Any) -> None:
    case = golden("llama-sharded", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None)
    run = sequence_run(case.model())
    np.testing.assert_allclose(run.feed(case.prompts[0]), case.logits[0], **TOLERANCE)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
def test_activation_changes_the_logits(activation: str, golden: Callable[..., Any], sequence_run: Any) -> None:
    case = golden("llama-sharded", hidden_act=activation)
    run = sequence_run(case.model())
    assert np.abs(run.feed(case.prompts[0]) - case.logits[0]).max() > 1e-2


def test_a_missing_head_is_the_embedding(golden: Callable[..., Any], sequence_run: Any) -> None:
    case = golden("llama-tied-missing-head", tie_word_embeddings=False)
    assert not case.spec.head.is_tied and "lm_head.weight" not in case.tensors
    model = case.model()
    assert model.spec.head.is_tied
    run = sequence_run(model)
    np.testing.assert_allclose(run.feed(case.prompts[0]), case.logits[0], **TOLERANCE)


@pytest.mark.parametrize("folder", ["llama-sharded", "gpt-oss"])
def test_padding_changes_nothing_and_is_finite(folder: str, golden: Callable[..., Any], sequence_run: Any) -> None:
    case = golden(folder)
    run = sequence_run(case.model())
    prompt = case.prompts[0]
    ctx = run.inputs(len(prompt))
    tokens = jnp.zeros(64, jnp.int32).at[: len(prompt)].set(jnp.array(prompt))
    logits, (pages, _) = run.step(False, run.weights, tokens, ctx, run.pages, run.states)
    other, (other_pages, _) = run.step(False, run.weights, tokens.at[len(prompt) :].set(300), ctx, run.pages, run.states)
    np.testing.assert_array_equal(logits[: len(prompt)], other[: len(prompt)])
    owned = np.setdiff1d(np.arange(pages[0].shape[0]), [0])  # page 0 takes the padding
    np.testing.assert_array_equal(pages[-1][owned], other_pages[-1][owned])
    assert bool(jnp.isfinite(logits).all())


def test_layers_of_equal_kind_are_traced_once(golden: Callable[..., Any], sequence_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    inner = DecoderLayer.__call__
    monkeypatch.setattr(DecoderLayer, "__call__", lambda self, *args, **kwargs: calls.append(1) or inner(self, *args, **kwargs))
    # An epsilon that no other test has, so that no earlier trace is found.
    run = sequence_run(golden("llama-bias", rms_norm_eps=0.0123).model())
    run.feed([1, 2, 3])
    assert len(calls) == 1, "two layers, one trace"
