"""`AsyncLLM` without a model: the real scheduler and loop over the CountingRunner. Over a real one: `tests/golden/test_async_llm.py`."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, AsyncLLM, PoolingParams, RequestOutput, SamplingParams
from jaxserve.config import SchedulerLimits
from jaxserve.core.plan import Plan
from jaxserve.engine.engine import Engine
from jaxserve.engine.info import EngineInfo
from jaxserve.errors import ConfigError, EngineUnavailable, InvalidRequest, RequestFailed
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.testing import CountingRunner, next_token
from jaxserve.text.tokenizer import Tokenizer

VOCAB, CONTEXT, NUM_PAGES = 320, 256, 65
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = GREEDY.with_changes(max_tokens=200)


class GatedRunner(CountingRunner):
    """Waits before each step while the gate is shut; fails steps while `error` is set."""

    def __init__(self) -> None:
        super().__init__(num_pages=NUM_PAGES, page_size=8, max_num_seqs=4, vocab_size=VOCAB)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.is_closed = False

    def run(self, plan: Plan) -> Any:
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return super().run(plan)

    def close(self) -> None:
        self.is_closed = True


def make_engine() -> Engine:
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=CONTEXT, num_pages=NUM_PAGES, page_size=8, eos_token_ids=frozenset({1})
    )
    info = EngineInfo(
        model_path="", model="counting", model_type="llama", dtype="float32", max_model_len=CONTEXT, vocab_size=VOCAB, eos_token_ids=(1,),
        has_prompt_logprobs=True, has_embeddings=True, embedding_size=4, num_pages=NUM_PAGES, page_size=8, max_num_seqs=4,
        max_num_batched_tokens=32,
        default_sampling_params={"temperature": 0.0, "max_tokens": 3},
    )  # fmt: skip
    return Engine(Scheduler(limits), GatedRunner(), info)


@pytest.fixture(scope="module")
def tokenizer(golden_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(golden_dir / "llama-bias")


@pytest.fixture
def engine() -> Engine:
    return make_engine()


@pytest.fixture
def llm(engine: Engine, tokenizer: Tokenizer) -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_engine(engine, tokenizer)
    yield llm
    engine.runner.gate.set()  # type: ignore[attr-defined]
    llm.close()


def continued(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, VOCAB))
    return ids[len(prompt) :]


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams | None = None, **options: Any) -> RequestOutput:
    *_, output = [output async for output in llm.generate(prompt, params, **options)]
    return output


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def is_empty(engine: Engine) -> bool:
    if engine.has_work:
        return False
    engine.scheduler.check_integrity()
    return engine.scheduler.roster.pages.pool.num_used == 0


def test_each_output_is_the_whole_answer_so_far(llm: AsyncLLM, tokenizer: Tokenizer) -> None:
    async def run() -> list[RequestOutput]:
        return [output async for output in llm.generate("a prompt", GREEDY, request_id="mine")]

    outputs = asyncio.run(run())
    ids = tokenizer.encode("a prompt")
    expected = continued(ids, 8)
    for output in outputs:
        answer = output.outputs[0]
        assert (output.request_id, output.prompt, output.prompt_token_ids) == ("mine", "a prompt", ids)
        assert answer.token_ids == expected[: len(answer.token_ids)]
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(set(lengths)), "each output has more than the one before"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].token_ids == expected
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_many_at_once_equal_llm(llm: AsyncLLM, tokenizer: Tokenizer) -> None:
    stop = tokenizer.token_text(continued([10, 11], 5)[4])
    prompts = [{"prompt_token_ids": [3 + i] * (1 + i % 20)} for i in range(60)] + [{"prompt_token_ids": [10, 11]}]
    params = [SamplingParams(n=1 + i % 3, seed=i, max_tokens=1 + i % 13, logprobs=i % 2 or None, ignore_eos=True) for i in range(60)]
    params.append(GREEDY.with_changes(stop=(stop,), max_tokens=30))
    with LLM.from_engine(make_engine(), tokenizer) as other:
        expected = other.generate(prompts, params, use_tqdm=False)

    async def run() -> list[RequestOutput]:
        return await asyncio.gather(*(last(llm, prompt, each) for prompt, each in zip(prompts, params, strict=True)))

    outputs = asyncio.run(run())
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    assert outputs[-1].outputs[0].stop_reason == stop


def test_defaults_and_chat(llm: AsyncLLM, tokenizer: Tokenizer) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
    assert len(asyncio.run(last(llm, "a")).outputs[0].token_ids) == 3
    assert llm.get_tokenizer() is tokenizer
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

    async def chat() -> list[RequestOutput]:
        return [output async for output in llm.chat([{"role": "user", "content": "Hi"}], GREEDY, chat_template=template)]

    assert asyncio.run(chat())[-1].prompt == "user: Hi\n"


def test_a_refusal_leaves_nothing_behind(llm: AsyncLLM, engine: Engine) -> None:
    bad: list[tuple[Any, Any]] = [
        ({"prompt_token_ids": []}, None),
        ({"prompt_token_ids": [VOCAB]}, None),
        ({"prompt_token_ids": [5] * CONTEXT}, None),
        (7, None),
        ("fine", 3),
        ("fine", [GREEDY]),
        ("fine", GREEDY.with_changes(logprobs=21)),
    ]
    for prompt, params in bad:
        with pytest.raises(InvalidRequest):
            asyncio.run(last(llm, prompt, params))
    assert engine.runner.num_steps == 0  # type: ignore[attr-defined]
    assert asyncio.run(last(llm, "fine", GREEDY)).finished


def test_cancelling_and_breaking_free_the_pages(llm: AsyncLLM, engine: Engine) -> None:
    async def run() -> None:
        task = asyncio.create_task(last(llm, {"prompt_token_ids": [5] * 20}, LONG))
        waiting = asyncio.create_task(last(llm, {"prompt_token_ids": [6] * 20}, LONG))
        async with aclosing(llm.generate({"prompt_token_ids": [7] * 20}, LONG.with_changes(max_tokens=100))) as outputs:
            async for _ in outputs:
                break
            task.cancel()
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: is_empty(engine))

    engine.runner.gate.clear()  # type: ignore[attr-defined]
    threading.Timer(0.05, engine.runner.gate.set).start()  # type: ignore[attr-defined]
    asyncio.run(run())


def test_survivors_of_a_crowd_that_comes_and_goes_are_as_alone(llm: AsyncLLM, engine: Engine) -> None:
    rng = random.Random(3)

    async def visit(prompt: list[int], num_tokens: int, num_wanted: int) -> None:
        """Reads until it has had enough; what it has read is what it would have read alone."""
        read: list[int] = []
        async with aclosing(llm.generate({"prompt_token_ids": prompt}, GREEDY.with_changes(max_tokens=num_tokens))) as outputs:
            async for output in outputs:
                read = output.outputs[0].token_ids
                if len(read) >= num_wanted:
                    break
        assert read == continued(prompt, len(read))
        assert len(read) >= min(num_wanted, num_tokens)

    async def run() -> None:
        for _ in range(5):
            visits = []
            for _ in range(40):
                prompt = [rng.randrange(2, VOCAB)] * rng.randrange(1, 60)
                num_tokens = rng.randrange(1, 60)
                visits.append(asyncio.create_task(visit(prompt, num_tokens, rng.choice([1000, rng.randrange(1, 60)]))))
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.random() * 0.01)
            cancelled = rng.sample(visits, 8)
            for task in cancelled:
                await asyncio.sleep(rng.random() * 0.003)
                task.cancel()
            for result in await asyncio.gather(*visits, return_exceptions=True):
                assert result is None or isinstance(result, asyncio.CancelledError), result
            await until(lambda: is_empty(engine))

    asyncio.run(run())
    assert not llm._streams


def test_abort_ends_every_request_of_the_name(llm: AsyncLLM, engine: Engine) -> None:
    async def run() -> None:
        engine.runner.gate.clear()  # type: ignore[attr-defined]
        named = [asyncio.create_task(last(llm, {"prompt_token_ids": [5, i]}, LONG, request_id="a")) for i in range(2)]
        other = asyncio.create_task(last(llm, "b", GREEDY, request_id="b"))
        await until(lambda: len(llm._streams) == 3)
        await llm.abort("a")
        await llm.abort("unknown")
        engine.runner.gate.set()  # type: ignore[attr-defined]
        assert [output.outputs[0].finish_reason for output in await asyncio.gather(*named)] == ["abort", "abort"]
        assert (await other).outputs[0].finish_reason == "length"

    asyncio.run(run())
    assert not llm._streams


def test_a_failed_step_ends_its_own_and_a_lost_engine_all(llm: AsyncLLM, engine: Engine) -> None:
    runner: Any = engine.runner

    async def run() -> None:
        runner.error = RuntimeError("device lost")
        results = await asyncio.gather(*(last(llm, "a", GREEDY) for _ in range(6)), return_exceptions=True)
        # Four run, and end with an error; two wait, and the second failure in a row ends the engine.
        for result in results:
            if isinstance(result, RequestOutput):
                assert result.outputs[0].finish_reason == "error"
                assert result.error is not None and "device lost" in result.error
            else:
                assert isinstance(result, EngineUnavailable), result
                assert "device lost" in str(result)
        assert any(isinstance(result, EngineUnavailable) for result in results)
        with pytest.raises(EngineUnavailable, match="device lost"):
            await last(llm, "a", GREEDY)

    asyncio.run(run())


def test_close_reaches_open_calls(engine: Engine, tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with AsyncLLM.from_engine(engine, tokenizer) as llm:
            assert llm.info is engine.info
            task = asyncio.create_task(last(llm, "a", LONG))
            await until(lambda: engine.has_work)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await task
        llm.close()
        with pytest.raises(EngineUnavailable):
            await last(llm, "a")

    engine.runner.gate.clear()  # type: ignore[attr-defined]
    threading.Timer(0.1, engine.runner.gate.set).start()  # type: ignore[attr-defined]
    asyncio.run(run())
    assert engine.runner.is_closed  # type: ignore[attr-defined]


def test_an_event_loop_that_ends_in_the_middle_leaves_the_engine_usable(llm: AsyncLLM, engine: Engine) -> None:
    loop = asyncio.new_event_loop()
    outputs = llm.generate("a", LONG)
    loop.run_until_complete(anext(outputs))
    engine.runner.gate.clear()  # type: ignore[attr-defined]
    loop.close()
    engine.runner.gate.set()  # type: ignore[attr-defined]
    assert asyncio.run(last(llm, "b", GREEDY)).finished
    end = time.monotonic() + 30
    while not is_empty(engine):
        assert time.monotonic() < end


def test_wrong_settings_are_found_before_anything_loads() -> None:
    with pytest.raises(ConfigError, match="AsyncLLM has no setting 'max_modle_len'. Did you mean max_model_len"):
        AsyncLLM("nowhere", max_modle_len=5)
    with pytest.raises(ConfigError, match="one engine in this process, .*`jaxserve serve MODEL --data-parallel-size`"):
        AsyncLLM("nowhere", data_parallel_size=2)


def test_an_embedding_beside_generation(llm: AsyncLLM, engine: Engine) -> None:
    async def run() -> list[Any]:
        params = PoolingParams(pooling="mean", normalize=False)
        return await asyncio.gather(llm.embed({"prompt_token_ids": [3, 4]}, params), last(llm, "a prompt", GREEDY), llm.embed("a prompt"))

    pooled, generated, scaled = asyncio.run(run())
    assert pooled.outputs.embedding == [3.5, 0.5, 5.0, 1.0]
    assert len(generated.outputs[0].token_ids) == GREEDY.max_tokens
    assert sum(value * value for value in scaled.outputs.embedding) == pytest.approx(1)
    assert is_empty(engine)


def test_an_aborted_embedding_raises(llm: AsyncLLM, engine: Engine) -> None:
    async def run() -> None:
        engine.runner.gate.clear()  # type: ignore[attr-defined]
        call = asyncio.create_task(llm.embed("a prompt", request_id="mine"))
        await until(lambda: bool(llm._streams))
        await llm.abort("mine")
        engine.runner.gate.set()  # type: ignore[attr-defined]
        await call

    with pytest.raises(RequestFailed, match="ended with abort"):
        asyncio.run(run())
    assert is_empty(engine)
