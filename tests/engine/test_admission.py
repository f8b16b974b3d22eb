"""What passes the checks can be sent to the engine: no number is too large for EngineLink."""

from dataclasses import replace

import pytest

from jaxserve.core.pooling_params import PoolingParams
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine import link_codec
from jaxserve.engine.admission import check_embedding, check_request
from jaxserve.engine.info import EngineInfo
from jaxserve.errors import InvalidRequest

INFO = EngineInfo(
    model_path="x", model="x", model_type="llama", dtype="float32", max_model_len=256, vocab_size=320, eos_token_ids=(1,),
    max_logprobs=-1, has_prompt_logprobs=True, scheduling_policy="priority", num_pages=129, page_size=16, max_num_seqs=8,
    max_num_batched_tokens=64,
)  # fmt: skip
NUMBERS = [sign * (2**bits + change) for bits in (31, 32, 63, 64, 200) for sign in (1, -1) for change in (-1, 0, 1)]


@pytest.mark.parametrize("number", [*NUMBERS, 0, 1, -1])
@pytest.mark.parametrize(
    "name", ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "stop_token_ids", "logit_bias", "prompt",
             "priority", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"],
)  # fmt: skip
def test_a_number_is_refused_or_travels(name, number):
    prompt, priority = [number] if name == "prompt" else [5], number if name == "priority" else 0
    value = {"stop_token_ids": (number,), "logit_bias": {number: 1.0}}.get(name, number)
    try:
        params = SamplingParams(**{name: value} if name not in ("prompt", "priority") else {})
        params = check_request(params, prompt, INFO, priority=priority)
    except InvalidRequest as refusal:
        error = refusal
    else:
        error = None
    if error is not None:
        assert error.param == name
        return
    request = Request(request_id="a", prompt_token_ids=tuple(prompt), params=params, priority=priority)
    received = link_codec.decode_add(link_codec.encode_add(request).add)
    assert (received.params.with_changes(detokenize=True), received.priority) == (params, priority)


EMBEDDINGS = replace(INFO, has_embeddings=True, embedding_size=48, scheduling_policy="fcfs")


def test_an_embedding_may_fill_the_context() -> None:
    check_embedding(PoolingParams(dimensions=48), [5] * 256, EMBEDDINGS)


@pytest.mark.parametrize(
    ("prompt", "changes", "message", "param"),
    [
        ([], {}, "the prompt is empty", "prompt"),
        ([5] * 257, {}, "the prompt has 257 tokens; the context is 256: shorten the prompt", "prompt"),
        ([320], {}, "token id 320", "prompt"),
        ([5], {"dimensions": 49}, "dimensions is 49; vectors of this model have 48", "dimensions"),
        ([5], {"priority": 1}, "--scheduling-policy priority", "priority"),
    ],
)
def test_an_embedding_that_cannot_be_served_is_refused(prompt, changes, message, param) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        check_embedding(PoolingParams(dimensions=changes.pop("dimensions", None)), prompt, EMBEDDINGS, **changes)
    assert refused.value.param == param


def test_embeddings_that_are_not_enabled_name_the_flag() -> None:
    with pytest.raises(InvalidRequest, match="embeddings are not enabled; start with --enable-embeddings"):
        check_embedding(PoolingParams(), [5], INFO)
