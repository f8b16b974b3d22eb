"""`AsyncLLM` over a real model gives what `LLM` gives, token by token, with other requests beside it that come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, AsyncLLM, RequestOutput, SamplingParams
from jaxserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(golden_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(golden_dir / "llama3-rope")


def test_equal_to_llm_with_cancellations_beside(tiny_model: Any, tokenizer: Tokenizer) -> None:
    model = tiny_model("llama3-rope")
    prompts = [{"prompt_token_ids": prompt} for prompt in model.expected["prompts"]]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    expected = LLM.from_engine(model.engine(), tokenizer).generate(prompts, greedy, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in expected] == model.expected["greedy"]
    engine = model.engine()
    llm = AsyncLLM.from_engine(engine, tokenizer)

    async def read(prompt: Any, params: SamplingParams) -> list[RequestOutput]:
        return [output async for output in llm.generate(prompt, params)]

    async def run() -> list[list[RequestOutput]]:
        kept = [asyncio.create_task(read(prompt, greedy)) for prompt in prompts]
        cancelled = [asyncio.create_task(read({"prompt_token_ids": [5 + i] * 30}, greedy)) for i in range(6)]
        for task in cancelled:
            await asyncio.sleep(0.01)
            task.cancel()
        return await asyncio.gather(*kept)

    results = asyncio.run(run())
    llm._loop.stop()  # not close(): the compiled programs belong to the session
    for outputs, other in zip(results, expected, strict=True):
        answer, solo = outputs[-1].outputs[0], other.outputs[0]
        assert (answer.token_ids, answer.text, answer.finish_reason) == (solo.token_ids, solo.text, solo.finish_reason)
        for output in outputs:
            so_far = output.outputs[0]
            assert so_far.token_ids == solo.token_ids[: len(so_far.token_ids)]
            assert solo.text.startswith(so_far.text)
            assert so_far.logprobs is not None and len(so_far.logprobs) == len(so_far.token_ids)
    engine.abort("anything")
    while engine.has_work:
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.roster.pages.pool.num_used == 0
