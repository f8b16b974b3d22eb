"""The loop's thread: who gets which events, aborts, disconnects and failures."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.engine.loop import EngineLoop, LoopClient, Output
from jaxserve.errors import EngineUnavailable, Overloaded

TIMEOUT_S = 30


def request(request_id: str, *, prompt=(5,), max_tokens=3, n=1) -> Request:
    return Request(request_id=request_id, prompt_token_ids=tuple(prompt), params=SamplingParams(max_tokens=max_tokens, n=n))


@pytest.fixture
def loop(engine) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine)
    loop.start()
    yield loop
    loop.stop(TIMEOUT_S)


def connect(loop: EngineLoop) -> tuple[LoopClient, queue.SimpleQueue[Output]]:
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    return loop.connect(outputs.put), outputs


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def tokens_until_done(outputs, num_sequences: int) -> dict[tuple[str, int], list[int]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    while num_sequences:
        for event in outputs.get(timeout=TIMEOUT_S).events:
            tokens.setdefault((event.request_id, event.index), []).extend(event.token_ids)
            num_sequences -= event.finish_reason is not None
    return tokens


def test_each_client_gets_its_own_events(loop):
    (one, one_outputs), (two, two_outputs) = connect(loop), connect(loop)
    one.add(request("a", prompt=(5,)))
    one.add(request("b", prompt=(10, 10), n=2))
    two.add(request("c", prompt=(100,), max_tokens=2))
    assert tokens_until_done(one_outputs, 3) == {("a", 0): [5, 6, 7], ("b", 0): [20, 21, 22], ("b", 1): [21, 22, 23]}
    assert tokens_until_done(two_outputs, 1) == {("c", 0): [100, 101]}


def test_a_step_is_one_output_for_a_client(loop, engine):
    client, outputs = connect(loop)
    gate = threading.Event()
    loop._inbox.put(lambda: gate.wait(TIMEOUT_S) and None)  # both requests are queued before the first step
    client.add(request("a"))
    client.add(request("b"))
    gate.set()
    first = outputs.get(timeout=TIMEOUT_S)
    assert {event.request_id for event in first.events} == {"a", "b"}


def test_abort_returns_events_and_ends_the_request(loop, engine):
    client, outputs = connect(loop)
    client.add(request("a", max_tokens=None, n=2))
    outputs.get(timeout=TIMEOUT_S)
    client.abort("a", 1)
    finished = []
    while not finished:
        finished = [event for event in outputs.get(timeout=TIMEOUT_S).events if event.finish_reason]
    assert [(event.index, event.finish_reason) for event in finished] == [(1, FinishReason.ABORT)]
    client.abort("a")
    client.abort("unknown")
    tokens_until_done(outputs, 1)
    assert not engine.open


def test_one_client_cannot_abort_another_ones_request(loop, engine):
    (one, one_outputs), (two, _) = connect(loop), connect(loop)
    one.add(request("a", max_tokens=200))
    two.abort("a")
    assert len(tokens_until_done(one_outputs, 1)["a", 0]) == 200


def test_disconnect_aborts_all_of_a_clients_requests(loop, engine):
    (one, one_outputs), (two, two_outputs) = connect(loop), connect(loop)
    one.add(request("a", max_tokens=None))
    one.add(request("b", max_tokens=None))
    one_outputs.get(timeout=TIMEOUT_S)
    one.close()
    two.add(request("c"))
    tokens_until_done(two_outputs, 1)
    assert not engine.open


def test_a_refused_request_is_a_rejection(loop):
    client, outputs = connect(loop)
    client.add(request("a", prompt=[1] * 101))
    [(request_id, error)] = outputs.get(timeout=TIMEOUT_S).rejections
    assert request_id == "a"
    assert "never fit" in str(error)


def test_a_fatal_step_tells_every_client(engine):
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    loop = EngineLoop(engine, on_failure=failures.put)
    loop.start()
    (one, one_outputs), (_, two_outputs) = connect(loop), connect(loop)
    engine.step_error = ValueError("device lost")
    one.add(request("a"))
    for outputs in (one_outputs, two_outputs):
        assert "device lost" in (outputs.get(timeout=TIMEOUT_S).failure or "")
    assert failures.get(timeout=TIMEOUT_S) is engine.step_error
    _, late = connect(loop)
    assert "device lost" in (late.get(timeout=TIMEOUT_S).failure or "")


def test_a_broken_engine_that_cannot_abort_still_ends_in_order(engine, monkeypatch):
    def fail(*_):
        raise AssertionError("broken")

    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    loop = EngineLoop(engine, on_failure=failures.put)
    loop.start()
    (one, _), (_, two_outputs) = connect(loop), connect(loop)
    one.add(request("a"))
    monkeypatch.setattr(engine, "abort", fail)
    loop._inbox.put(fail)  # ends the loop; what follows is still in the inbox
    one.close()
    _, late_outputs = connect(loop)
    assert isinstance(failures.get(timeout=TIMEOUT_S), AssertionError)
    for outputs in (two_outputs, late_outputs):
        while (output := outputs.get(timeout=TIMEOUT_S)).failure is None:
            pass
        assert "broken" in output.failure


def test_a_client_that_cannot_be_told_does_not_hide_a_failure(engine):
    def deliver(output: Output) -> None:
        if output.failure is not None:
            raise RuntimeError("nobody there")

    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    loop = EngineLoop(engine, on_failure=failures.put)
    engine.step_error = ValueError("device lost")
    clients = [connect(loop), (loop.connect(deliver), None), connect(loop)]
    clients[0][0].add(request("a"))
    loop.start()
    assert failures.get(timeout=TIMEOUT_S) is engine.step_error
    for _, outputs in (clients[0], clients[2]):
        assert "device lost" in outputs.get(timeout=TIMEOUT_S).failure


def test_stop_ends_open_requests(engine):
    loop = EngineLoop(engine)
    loop.start()
    client, outputs = connect(loop)
    client.add(request("a", max_tokens=None))
    outputs.get(timeout=TIMEOUT_S)
    loop.stop(TIMEOUT_S)
    last = None
    while not outputs.empty():
        last = outputs.get()
    assert last is not None
    assert last.failure == "the engine is shutting down"


def test_figures_are_read_while_a_step_hangs(loop, engine):
    client, outputs = connect(loop)
    assert loop.stats().has_work is False
    engine.gate.clear()
    client.add(request("a", n=2))
    wait_until(lambda: engine.num_steps == 1)
    assert loop.stats().has_work
    before_s = loop.stats().seconds_since_progress
    client.add(request("b"))
    stats = loop.stats()
    assert stats.num_running + stats.num_waiting == 3, "with the one that is still in the inbox"
    wait_until(lambda: loop.stats().seconds_since_progress > before_s + 0.05)
    engine.gate.set()
    tokens_until_done(outputs, 3)
    wait_until(lambda: not loop.stats().has_work)
    stats = loop.stats()
    assert (stats.seconds_since_progress, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.num_steps == engine.num_steps


def test_too_many_waiting_sequences_are_refused_at_once(engine):
    engine.info = replace(engine.info, max_num_seqs=2)
    loop = EngineLoop(engine, max_waiting=3)
    loop.start()
    client, outputs = connect(loop)
    engine.gate.clear()
    client.add(request("a", n=4))
    wait_until(lambda: engine.num_steps == 1)
    client.add(request("b"))  # the last place; the loop's thread is inside a step, so it lies in the inbox
    with pytest.raises(Overloaded, match="3 sequences are waiting, 1 more would exceed --max-waiting 3"):
        client.add(request("c"))
    engine.gate.set()
    tokens_until_done(outputs, 5)
    client.add(request("c"))
    assert tokens_until_done(outputs, 1) == {("c", 0): [5, 6, 7]}
    loop.stop(TIMEOUT_S)


@pytest.mark.parametrize("how", ["refused", "aborted", "disconnected", "finished"])
def test_every_end_gives_its_places_back(engine, how):
    loop = EngineLoop(engine, max_waiting=1)
    loop.start()
    client, outputs = connect(loop)
    client.add(request("a", n=3, max_tokens=3 if how == "finished" else None, prompt=[1] * 101 if how == "refused" else (5,)))
    if how == "aborted":
        client.abort("a", 1)
        client.abort("a")
    if how == "disconnected":
        outputs.get(timeout=TIMEOUT_S)
        client.add(request("b"))
        client.close()
        client.add(request("c"))
    wait_until(lambda: loop._limit.num_open == 0)
    loop.stop(TIMEOUT_S)


def test_abort_by_label_ends_requests_of_all_clients(loop, engine):
    (one, one_outputs), (two, two_outputs) = connect(loop), connect(loop)
    for client, name, label in ((one, "a", "x"), (two, "b", "x"), (two, "c", "y"), (two, "d", "")):
        client.add(replace(request(name, max_tokens=None), label=label))
    loop.abort_label("")
    loop.abort_label("x")
    for outputs in (one_outputs, two_outputs):
        tokens_until_done(outputs, 1)
    assert list(engine.open) == [("c", 0), ("d", 0)]


def test_a_function_runs_between_two_steps(loop, engine):
    client, outputs = connect(loop)
    client.add(request("a", max_tokens=None))
    outputs.get(timeout=TIMEOUT_S)
    assert loop.call(lambda: (threading.current_thread().name, len(engine.open))).result(TIMEOUT_S) == ("engine-loop", 1)
    assert loop.reset_prefix_cache().result(TIMEOUT_S) is False
    client.abort("a")
    assert loop.reset_prefix_cache().result(TIMEOUT_S) is True
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0).result(TIMEOUT_S)
    assert loop.stop(TIMEOUT_S)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        loop.call(lambda: 1).result(TIMEOUT_S)


def test_a_function_that_nobody_waits_for_any_more_is_not_run(loop, engine):
    client, outputs = connect(loop)
    engine.gate.clear()
    client.add(request("a"))
    wait_until(lambda: engine.num_steps == 1)
    ran: list[int] = []
    assert loop.call(lambda: ran.append(1)).cancel()
    engine.gate.set()
    assert tokens_until_done(outputs, 1) == {("a", 0): [5, 6, 7]}
    assert loop.call(lambda: 1).result(TIMEOUT_S) == 1
    assert not ran


def test_stop_tells_that_the_thread_hangs(engine):
    loop = EngineLoop(engine)
    loop.start()
    client, _ = connect(loop)
    engine.gate.clear()
    client.add(request("a"))
    wait_until(lambda: engine.num_steps == 1)
    assert loop.stop(0.01) is False
    engine.gate.set()
    assert loop.stop(TIMEOUT_S)
