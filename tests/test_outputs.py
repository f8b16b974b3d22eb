from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.core.events import Logprobs, TokenEvent
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.outputs import Logprob, OutputBuilder
from jaxserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(golden_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(golden_dir / "llama-bias")


def event(token_ids: list[int], index: int = 0, **values: object) -> TokenEvent:
    return TokenEvent(request_id="7", index=index, token_ids=token_ids, num_prompt_tokens=2, num_cached_tokens=1, **values)  # type: ignore[arg-type]


def test_events_add_up(tokenizer: Tokenizer) -> None:
    builder = OutputBuilder("7", "d", [0, 71], SamplingParams(n=2), tokenizer)
    builder.push(event([71]))
    builder.push(event([73], index=1))
    builder.push(event([72, 1], finish_reason=FinishReason.STOP))
    output = builder.output
    assert not output.finished and output.metrics.finished_time_s is None
    builder.push(event([], index=1, finish_reason=FinishReason.ERROR, error="it broke"))
    first, second = output.outputs
    assert (first.index, first.text, first.token_ids, first.finish_reason, first.stop_reason) == (0, "de", [71, 72, 1], "stop", None)
    assert (second.index, second.text, second.token_ids, second.finish_reason) == (1, "f", [73], "error")
    assert first.logprobs is None and first.cumulative_logprob is None and output.prompt_logprobs is None
    assert (output.finished, output.error, output.num_cached_tokens) == (True, "it broke", 1)
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("7", "d", [0, 71])
    times = output.metrics
    assert times.first_token_time_s is not None and times.finished_time_s is not None
    assert times.arrival_time_s <= times.first_token_time_s <= times.finished_time_s


def test_logprobs_are_dicts_with_the_sampled_token(tokenizer: Tokenizer) -> None:
    params = SamplingParams(logprobs=2, prompt_logprobs=0)
    builder = OutputBuilder("7", None, [71, 72], params, tokenizer)
    prompt = [None, Logprobs(72, -3.0, 9, [71, 73], [-0.5, -1.0])]
    builder.push(event([264], logprobs=[Logprobs(264, -4.0, 5, [71, 72, 73], [-0.5, -1.0, -2.0])], prompt_logprobs=prompt))
    builder.push(event([71], logprobs=[Logprobs(71, -0.5, 1, [71, 72], [-0.5, -1.0])], finish_reason=FinishReason.LENGTH))
    output = builder.output
    assert output.prompt_logprobs == [None, {72: Logprob(-3.0, 9, "e")}]
    assert output.outputs[0].logprobs == [
        {71: Logprob(-0.5, 1, "d"), 72: Logprob(-1.0, 2, "e"), 264: Logprob(-4.0, 5, " the")},
        {71: Logprob(-0.5, 1, "d"), 72: Logprob(-1.0, 2, "e")},
    ]
    assert output.outputs[0].cumulative_logprob == -4.5


def test_whole_vocabulary_is_ranked(tokenizer: Tokenizer) -> None:
    builder = OutputBuilder("7", None, [71], SamplingParams(logprobs=-1), tokenizer)
    builder.push(event([71], logprobs=[Logprobs(71, -1.0, 2, [70, 71, 72], [-2.0, -1.0, -0.5])]))
    entry = (builder.output.outputs[0].logprobs or [])[0]
    assert [(token_id, value.rank) for token_id, value in entry.items()] == [(72, 1), (71, 2), (70, 3)]
