"""The way of one token, walked by hand: ten stations from an HTTP body to the chunk that a client reads.

Read it beside docs/architecture.md: its table names the functions that are called here, and the last test holds the two together.
Everything is real: a tiny checkpoint whose logits an independent implementation has computed, the scheduler, the traced step, the
tokenizer. Left out is only what waits between the stations: sockets, threads, the compiler.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.arrays import PenaltyState, SlotState
from jaxserve.checkpoint import open_checkpoint
from jaxserve.config import SchedulerLimits
from jaxserve.convert import convert
from jaxserve.core.buckets import Bucket, Buckets
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.engine.admission import check_request
from jaxserve.engine.engine import Engine
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.link_codec import decode_add, decode_event, encode_add, encode_event
from jaxserve.engine.loop import EngineLoop, LoopClient, Output
from jaxserve.models.load import load_model, split_model
from jaxserve.models.registry import resolve_spec
from jaxserve.runner import step as step_module
from jaxserve.runner.layout import StepLayout
from jaxserve.runner.logits import Logits
from jaxserve.runner.pending_step import PendingModelStep
from jaxserve.runner.prepare import prepare
from jaxserve.runner.runner import RunnerShape, page_array_shapes, penalty_state_shapes, slot_state_shapes
from jaxserve.runner.sampling import sample
from jaxserve.runner.step import step
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.serve.delta import Delta
from jaxserve.serve.openai_answers import Chat
from jaxserve.serve.openai_types import ChatBody
from jaxserve.serve.sse import ServerSentEvents
from jaxserve.text.chat_template import render_chat
from jaxserve.text.sequence_text import SequenceText
from jaxserve.text.tokenizer import Tokenizer

MODEL = "llama-tied-missing-head"
MESSAGE = "\x1ci."
"""With BOS in front, its tokens are the first prompt of the checkpoint's expected values."""
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
PAGE_SIZE, NUM_PAGES, CONTEXT, MAX_SEQS, MAX_TOKENS = 16, 8, 64, 2, 16

STATIONS: dict[int, list[Callable[..., Any]]] = {
    1: [ChatBody.parse],
    2: [render_chat, Tokenizer.encode, check_request],
    3: [encode_add, LoopClient.add],
    4: [Scheduler.schedule],
    5: [prepare],
    6: [step],
    7: [sample, PendingModelStep.wait],
    8: [Scheduler.commit],
    9: [SequenceText.push],
    10: [Chat.choices, ServerSentEvents.__call__],
}


class Device(NamedTuple):
    """What lies on the device before the step."""

    graphdef: Any
    weights: Any
    pages: Any
    slots: SlotState
    penalties: PenaltyState


@pytest.fixture
def checkpoint(golden_dir: Path, tmp_path: Path) -> Any:
    convert(golden_dir / MODEL, tmp_path / "converted")
    return open_checkpoint(tmp_path / "converted")


@pytest.fixture
def device(checkpoint: Any) -> Device:
    spec = resolve_spec(checkpoint.config)
    model = load_model(spec, checkpoint.read, jnp.float32, device=jax.devices()[0], attention="reference")
    buckets = Buckets(MAX_SEQS, decode_rows=(MAX_SEQS,), mixed_tokens=(MAX_TOKENS,))
    shape = RunnerShape(buckets=buckets, num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_model_len=CONTEXT, max_penalty_slots=MAX_SEQS)
    shapes = page_array_shapes(spec, shape, jnp.float32), slot_state_shapes(shape, 1), penalty_state_shapes(shape, spec.vocab_size)
    return Device(*split_model(model), *jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), shapes))


@pytest.fixture
def engine(checkpoint: Any) -> Engine:
    info = EngineInfo(
        model_path=str(checkpoint.path), model=MODEL, model_type="llama", dtype="float32", max_model_len=CONTEXT,
        vocab_size=resolve_spec(checkpoint.config).vocab_size, eos_token_ids=(1,), num_pages=NUM_PAGES, page_size=PAGE_SIZE,
        max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS,
    )  # fmt: skip
    limits = SchedulerLimits(
        max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS, max_model_len=CONTEXT, num_pages=NUM_PAGES, page_size=PAGE_SIZE,
        eos_token_ids=frozenset({1}),
    )  # fmt: skip
    runner: Any = SimpleNamespace(num_late_compiles=0)  # stations 5 to 7 are what a runner does
    return Engine(Scheduler(limits), runner, info)


def test_the_ten_stations(checkpoint: Any, device: Device, engine: Engine, golden_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = json.loads((golden_dir / MODEL / "expected.json").read_text())
    prompt, token = expected["prompts"][0], expected["greedy"][0][0]
    logits_of_prompt = load_file(golden_dir / MODEL / "expected.safetensors")["logits_0"]
    tokenizer, scheduler = Tokenizer.from_directory(checkpoint.path), engine.scheduler
    tokenizer.chat_templates = {"default": TEMPLATE}

    # 1 body: bytes from a socket become checked fields, and those sampling parameters.
    body = ChatBody.parse(
        json.dumps({"messages": [{"role": "user", "content": MESSAGE}], "temperature": 0, "max_tokens": 1, "stream": True}).encode()
    )
    params = SamplingParams(**{k: v for k, v in body.sampling_fields().items() if v is not None}, max_tokens=body.max_tokens)
    assert params.is_greedy

    # 2 ids: messages become text, text becomes ids; then the request is checked against the model.
    text = render_chat(tokenizer, body.messages)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert token_ids == prompt
    params = check_request(params, token_ids, engine.info)

    # 3 inbox: the request crosses to the engine's process and lies in its thread's inbox until the turn of the loop that takes it.
    sent = Request(request_id="r", prompt_token_ids=tuple(token_ids), params=params)
    request = decode_add(encode_add(sent).add)
    assert (request.prompt_token_ids, request.params.max_tokens) == (tuple(prompt), 1)
    delivered: list[Output] = []
    loop = EngineLoop(engine)
    loop.connect(delivered.append).add(request)
    assert not engine.has_work
    loop._take_commands()
    assert engine.has_work

    # 4 schedule: the sequence gets a slot and a page, and a row of the plan: its whole prompt, of whose last token it is sampled.
    plan = scheduler.schedule()
    (row,) = plan.rows
    assert (row.slot, row.start, row.token_ids, row.is_sampled) == (0, 0, tuple(prompt), True)
    ((slot, group, index, page),) = plan.page_writes
    assert (slot, group, index) == (0, 0, 0) and 0 < page < NUM_PAGES

    # 5 prepare: the plan becomes one array of int32, padded to a bucket.
    bucket = Buckets(MAX_SEQS, decode_rows=(MAX_SEQS,), mixed_tokens=(MAX_TOKENS,)).choose(plan)
    assert bucket == Bucket(tokens=16, rows=2, logits_rows=2, is_decode=False)
    layout = StepLayout(bucket, num_groups=1, page_size=PAGE_SIZE)
    prepared = prepare(plan, layout, null_slot=MAX_SEQS, null_penalty_slot=MAX_SEQS)
    tokens = layout.sections["tokens"]
    assert prepared.packed[tokens.offset : tokens.offset + 16].tolist() == prompt + [0] * 12

    # 6 step: embed, layers that write their keys and values into the page and attend over it, logits of the last token.
    # 7 sample: the step's last act.
    seen: list[jax.Array] = []

    def sample_and_look(logits: Logits, *arguments: Any, **options: Any) -> Any:
        seen.append(logits.rows())
        return sample(logits, *arguments, **options)

    monkeypatch.setattr(step_module, "sample", sample_and_look)
    pages, slots, _, _, outputs = step(device.graphdef, layout, 20, False, *device[1:], (), jnp.asarray(prepared.packed))
    np.testing.assert_allclose(seen[0][0], logits_of_prompt[-1], atol=1e-4)
    assert all(np.abs(each[page, :, :, : len(prompt)]).min() > 0 and not each[page, :, :, len(prompt) :].any() for each in pages)
    assert int(slots.length[0]) == len(prompt) and int(slots.last_token[0]) == token
    result = PendingModelStep(plan, bucket, outputs, prepared.wants_logprobs).wait()
    assert result.token_ids == [token] == [int(logits_of_prompt[-1].argmax())]

    # 8 commit: the token is appended; as it is the last one asked for, the sequence ends, and its page and slot are free.
    (event,) = scheduler.commit(plan, result)
    assert (event.token_ids, event.finish_reason, event.num_prompt_tokens) == ([token], FinishReason.LENGTH, len(prompt))
    assert not engine.has_work
    scheduler.check_integrity()

    # 9 text: back in the front end, the token becomes characters.
    event = decode_event(encode_event(event))
    delta = SequenceText(tokenizer, params, token_ids).push(event)
    assert delta.text == tokenizer.decode([*token_ids, token])[len(tokenizer.decode(token_ids)) :] != ""

    # 10 chunk: the characters become a line of JSON that a client reads.
    service: Any = SimpleNamespace(tokenizer=tokenizer)
    chat = Chat(service, body, token_ids, params)
    news = Delta(
        prompt_index=0, index=0, text=delta.text, token_ids=delta.token_ids, logprobs=None, finish_reason=delta.finish_reason,
        stop_reason=None, num_prompt_tokens=event.num_prompt_tokens, num_cached_tokens=0, prompt_logprobs=None, error=None,
    )  # fmt: skip
    lines = asyncio.run(read_stream([{"choices": [choice]} for choice in chat.choices(news)])).decode().split("\n\n")
    role, content = (json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:2])
    assert role["delta"] == {"role": "assistant", "content": ""}
    assert (content["delta"], content["finish_reason"]) == ({"content": delta.text}, "length")
    assert lines[2:] == ["data: [DONE]", ""]


async def read_stream(chunks: list[dict[str, Any]]) -> bytes:
    """What a client reads of a stream of chunks."""
    read: list[bytes] = []

    async def rest() -> Any:
        for chunk in chunks[1:]:
            yield chunk

    async def send(message: Any) -> None:
        read.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()  # the client stays

    await ServerSentEvents(chunks[0], rest())({"type": "http"}, receive, send)
    return b"".join(read)


def test_the_architecture_names_the_functions_that_are_called_here() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    named: dict[int, list[str]] = {}
    for line in page.splitlines():
        if match := re.match(r"\| (\d+) \w+ \| ([^|]*) \|", line):
            named[int(match[1])] = re.findall(r"`([\w/]+\.py: \w+)`", match[2])
    called = {number: [where(function) for function in functions] for number, functions in STATIONS.items()}
    assert named == called


def where(function: Callable[..., Any]) -> str:
    """`file.py: function` as the page writes it; for what a class does when it is called, the class."""
    module = function.__module__.removeprefix("jaxserve.").replace(".", "/")
    name = function.__qualname__.split(".")
    return f"{module}.py: {name[0] if name[-1] == '__call__' else name[-1]}"
