"""`LLM` without a model: the real scheduler over the CountingRunner, and the golden 320-token tokenizer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, PoolingParams, RequestOutput, SamplingParams
from jaxserve.config import SchedulerLimits
from jaxserve.core.events import TokenEvent
from jaxserve.core.plan import Plan
from jaxserve.engine.engine import Engine
from jaxserve.engine.info import EngineInfo
from jaxserve.errors import ConfigError, EngineUnavailable, InvalidRequest, RequestFailed
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.testing import CountingRunner, hidden_state, next_token
from jaxserve.text.tokenizer import Tokenizer

VOCAB = 320
CONTEXT = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class Runner(CountingRunner):
    """Calls `before_step` first; remembers whether it was closed."""

    before_step: Callable[[], None] = staticmethod(lambda: None)
    is_closed = False

    def run(self, plan: Plan) -> Any:
        self.before_step()
        return super().run(plan)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(scope="module")
def tokenizer(golden_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(golden_dir / "llama-bias")


@pytest.fixture
def runner() -> Runner:
    return Runner(num_pages=33, page_size=8, max_num_seqs=4, vocab_size=VOCAB)


@pytest.fixture
def engine(runner: Runner) -> Engine:
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=CONTEXT, num_pages=33, page_size=8, eos_token_ids=frozenset({1})
    )
    info = EngineInfo(
        model_path="",
        model="counting",
        model_type="llama",
        dtype="float32",
        max_model_len=CONTEXT,
        vocab_size=VOCAB,
        eos_token_ids=(1,),
        has_prompt_logprobs=True,
        has_embeddings=True,
        embedding_size=4,
        num_pages=33,
        page_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        default_sampling_params={"temperature": 0.0, "max_tokens": 3},
    )
    return Engine(Scheduler(limits), runner, info)


@pytest.fixture
def llm(engine: Engine, tokenizer: Tokenizer) -> Iterator[LLM]:
    with LLM.from_engine(engine, tokenizer) as llm:
        yield llm
        engine.scheduler.check_integrity()
        assert not engine.has_work


def continued(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, VOCAB))
    return ids[len(prompt) :]


def test_answers_come_in_the_order_of_the_prompts(llm: LLM, tokenizer: Tokenizer) -> None:
    prompts = [f"prompt {i}" for i in range(9)]
    params = [GREEDY.with_changes(max_tokens=1 + (7 * i) % 11) for i in range(9)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert len({output.request_id for output in outputs}) == 9
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        ids = tokenizer.encode(prompt)
        answer = output.outputs[0]
        assert (output.prompt, output.prompt_token_ids, output.finished) == (prompt, ids, True)
        assert answer.token_ids == continued(ids, each.max_tokens or 0)
        assert answer.text == tokenizer.decode(ids + answer.token_ids)[len(prompt) :]
        assert answer.finish_reason == "length"


def test_forms_of_prompts(llm: LLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a prompt")
    forms: list[Any] = ["a prompt", {"prompt": "a prompt"}, {"prompt_token_ids": ids}]
    for prompts in [*forms, forms]:
        for output in llm.generate(prompts, GREEDY, use_tqdm=False):
            assert output.prompt_token_ids == ids
            assert output.outputs[0].token_ids == continued(ids, 8)
    texts = [output.prompt for output in llm.generate(forms, GREEDY, use_tqdm=False)]
    assert texts == ["a prompt", "a prompt", None]
    assert llm.generate([], GREEDY) == []


def test_default_parameters_are_the_models(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
    assert len(llm.generate("d", use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_max_tokens_is_clamped_to_the_context(llm: LLM) -> None:
    output = llm.generate({"prompt_token_ids": [5] * 60}, GREEDY.with_changes(max_tokens=100), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].finish_reason == "length"


def test_several_answers_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": [7, 8, 9]}, params, use_tqdm=False)[0]
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    for answer in output.outputs:
        assert answer.logprobs is not None and len(answer.logprobs) == 4
        assert all(token_id in entry for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True))
        assert answer.cumulative_logprob == sum(e[t].logprob for t, e in zip(answer.token_ids, answer.logprobs, strict=True))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 3


def test_stop_string_ends_the_sequence_in_the_engine(llm: LLM, engine: Engine, runner: Runner, tokenizer: Tokenizer) -> None:
    plain = llm.generate({"prompt_token_ids": [10, 11]}, GREEDY.with_changes(max_tokens=30), use_tqdm=False)[0].outputs[0]
    stop = tokenizer.token_text(plain.token_ids[4])
    assert stop and "\ufffd" not in stop
    before = runner.num_steps
    params = GREEDY.with_changes(max_tokens=30, stop=(stop,))
    answer = llm.generate({"prompt_token_ids": [10, 11]}, params, use_tqdm=False)[0].outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.text == plain.text[: plain.text.index(stop)]
    assert answer.token_ids == plain.token_ids[: len(answer.token_ids)]
    num_tokens = len(answer.token_ids)
    assert num_tokens <= 5
    assert num_tokens <= runner.num_steps - before <= num_tokens + 1, "one more may be in flight when the stop string is found"


def test_one_bad_prompt_stops_the_call_before_it_starts(llm: LLM, engine: Engine, runner: Runner) -> None:
    bad: list[tuple[Any, Any]] = [
        (["fine", {"prompt_token_ids": []}], None),
        (["fine", {"prompt_token_ids": [VOCAB]}], None),
        (["fine", {"prompt_token_ids": [-1]}], None),
        (["fine", {"prompt_token_ids": ["x"]}], None),
        (["fine", {"prompt_token_ids": [5] * CONTEXT}], None),
        (["fine", 7], None),
        (["fine", {"text": "x"}], None),
        (["fine", "a\ud800"], None),
        (None, None),
        (7, None),
        (["fine", "fine"], [GREEDY]),
        (["fine"], 3),
        (["fine", "fine"], iter([GREEDY])),
        (["fine"], [{"temperature": 0.0}]),
        (["fine", "fine"], [GREEDY, GREEDY.with_changes(logprobs=21)]),
    ]
    for prompts, params in bad:
        with pytest.raises(InvalidRequest):
            llm.generate(prompts, params, use_tqdm=False)
        assert not engine.has_work
    assert runner.num_steps == 0
    assert llm.generate("fine", GREEDY, use_tqdm=False)[0].finished
    assert llm.generate("", GREEDY, use_tqdm=False)[0].prompt_token_ids == [0], "BOS makes an empty text a prompt"


def test_request_that_never_fits_leaves_the_engine_clean(llm: LLM, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    add = engine.scheduler.add

    def refuse_second(request: Any) -> None:
        if request.request_id.endswith("1"):
            raise InvalidRequest("never fits")
        add(request)

    monkeypatch.setattr(engine.scheduler, "add", refuse_second)
    with pytest.raises(InvalidRequest, match="never fits"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert not engine.has_work


def test_failed_step_is_reported_and_the_next_call_works(llm: LLM, runner: Runner) -> None:
    def fail_once() -> None:
        runner.before_step = lambda: None
        raise RuntimeError("device lost,\nin two lines")

    runner.before_step = fail_once
    output = llm.generate("a", GREEDY, use_tqdm=False)[0]
    assert output.outputs[0].finish_reason == "error"
    assert output.error == "the step failed: RuntimeError: device lost, in two lines"
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_waiting_prompts_go_on_after_a_failed_step_and_two_in_a_row_raise(llm: LLM, engine: Engine, runner: Runner) -> None:
    prompts = [{"prompt_token_ids": [5 + i] * 20} for i in range(6)]
    params = [SamplingParams(n=1 + i % 3, seed=i, max_tokens=4, ignore_eos=True) for i in range(6)]
    solo = [[answer.token_ids for answer in llm.generate(prompts, params, use_tqdm=False)[i].outputs] for i in range(6)]
    failures = [1]

    def fail() -> None:
        if failures and not failures.pop():
            raise RuntimeError("device lost")

    failures[:] = [0, 1, 1]  # taken from the end: the third step fails
    runner.before_step = fail
    outputs = llm.generate(prompts, params, use_tqdm=False)
    reasons = [[answer.finish_reason for answer in output.outputs] for output in outputs]
    assert {reason for each in reasons for reason in each} == {"error", "length"}
    for each, output, expected in zip(reasons, outputs, solo, strict=True):
        assert (output.error is not None) == ("error" in each)
        for reason, answer, tokens in zip(each, output.outputs, expected, strict=True):
            assert reason == "error" or answer.token_ids == tokens
    failures[:] = [0, 0]
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate(prompts, params, use_tqdm=False)
    assert not engine.has_work
    assert llm.generate(prompts, params, use_tqdm=False)[5].outputs[0].token_ids == solo[5][0]


def test_interrupt_aborts_what_runs(llm: LLM, engine: Engine, runner: Runner) -> None:
    runner.before_step = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert runner.num_steps == 1, "the step that was dispatched is finished, and no other begun"
    assert not engine.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    runner.before_step = lambda: None
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished


def test_threads_take_turns(llm: LLM) -> None:
    results: dict[int, RequestOutput] = {}

    def work(i: int) -> None:
        results[i] = llm.generate({"prompt_token_ids": [i + 3]}, GREEDY, use_tqdm=False)[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i].outputs[0].token_ids for i in range(4)] == [continued([i + 3], 8) for i in range(4)]


def test_chat_uses_the_template_and_adds_no_second_bos(engine: Engine, golden_dir: Path) -> None:
    tokenizer = Tokenizer.from_directory(golden_dir / "llama-bias")
    tokenizer.chat_templates = {
        "default": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}{{ name | default('assistant') }}:{% endif %}"
    }
    llm = LLM.from_engine(engine, tokenizer)
    talk = [{"role": "user", "content": "Hi"}]
    output = llm.chat(talk, GREEDY, use_tqdm=False)[0]
    assert output.prompt == "<s>user: Hi\nassistant:"
    assert output.prompt_token_ids == tokenizer.encode("user: Hi\nassistant:")
    assert [each.outputs[0].token_ids for each in llm.chat([talk, talk], GREEDY, use_tqdm=False)] == [output.outputs[0].token_ids] * 2
    assert llm.chat(talk, GREEDY, use_tqdm=False, chat_template_kwargs={"name": "bot"})[0].prompt == "<s>user: Hi\nbot:"
    with pytest.raises(InvalidRequest, match="role"):
        llm.chat([{"content": "Hi"}], GREEDY)
    for wrong in (None, 7, ["Hi"], "Hi", [[]]):
        with pytest.raises(InvalidRequest, match="messages"):
            llm.chat(wrong, GREEDY)  # type: ignore[arg-type]


def test_progress_bar(llm: LLM, runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    runner.before_step = lambda: time.sleep(0.03)
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr()
    assert "2/2" in shown.err and "tok/s out" in shown.err
    assert shown.out == ""
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_close(engine: Engine, runner: Runner, tokenizer: Tokenizer) -> None:
    with LLM.from_engine(engine, tokenizer) as llm:
        assert llm.get_tokenizer() is tokenizer
        assert llm.info is engine.info
    assert runner.is_closed
    llm.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        llm.generate("a")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_modle_len": 5}, "Did you mean max_model_len"),
        ({"dtype": "int4"}, "dtype"),
        ({"block_size": 7}, "page_size"),
        ({"block_size": 16, "page_size": 16}, "page_size is given twice"),
        ({"model": None}, "model is None; it must be a path or a hub id"),
        ({"kv_cache_memory_bytes": "4 apples"}, "4GiB"),
    ],
)
def test_wrong_settings_are_found_before_anything_loads(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(**{"model": "nowhere", **settings})


def test_events_of_others_are_ignored(llm: LLM, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    step = engine.step
    stray = TokenEvent(request_id="stray", index=0, token_ids=[5], num_prompt_tokens=1, num_cached_tokens=0)
    monkeypatch.setattr(engine, "step", lambda: [stray, *step()])
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished


def test_embeddings_come_in_the_order_of_the_prompts(llm: LLM, tokenizer: Tokenizer) -> None:
    prompts: list[Any] = [*(f"prompt {i}" for i in range(6)), {"prompt_token_ids": [5] * CONTEXT}]
    outputs = llm.embed(prompts, PoolingParams(normalize=False), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"]
        assert (output.prompt, output.prompt_token_ids, output.finished) == (prompt if isinstance(prompt, str) else None, ids, True)
        assert output.outputs.embedding == list(hidden_state(ids))
    [scaled] = llm.embed(prompts[-1], use_tqdm=False)
    assert sum(value * value for value in scaled.outputs.embedding) == pytest.approx(1)
    assert scaled.num_cached_tokens == CONTEXT - 8
    [short] = llm.embed({"prompt_token_ids": [3, 4]}, PoolingParams(dimensions=2, pooling="mean"), use_tqdm=False)
    assert short.outputs.embedding == pytest.approx([3.5 / 12.5**0.5, 0.5 / 12.5**0.5])


def test_an_embedding_that_fails_raises(llm: LLM, runner: Runner) -> None:
    with pytest.raises(InvalidRequest, match="65 tokens; the context is 64"):
        llm.embed({"prompt_token_ids": [5] * (CONTEXT + 1)})
    with pytest.raises(InvalidRequest, match="it must be PoolingParams"):
        llm.embed("a prompt", SamplingParams())  # type: ignore[arg-type]
    runner.failures[1] = RuntimeError("the device is gone")
    with pytest.raises(RequestFailed, match="the device is gone"):
        llm.embed("a prompt", use_tqdm=False)
    assert len(llm.embed("a prompt", use_tqdm=False)) == 1
