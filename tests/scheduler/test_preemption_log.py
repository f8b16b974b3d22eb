"""A preemption is told to whoever runs the server, but not thousands of times a second."""

from __future__ import annotations

import logging

import pytest

from jaxserve.scheduler.preemption_log import PreemptionLog


def test_a_preemption_names_the_request_its_pages_and_the_flags(make_loop, caplog: pytest.LogCaptureFixture) -> None:
    loop = make_loop(num_pages=8, enable_prefix_caching=False, max_num_batched_tokens=32)
    loop.add("a", [1] * 12, max_tokens=12)
    loop.add("b", [2] * 12, max_tokens=12)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            loop.step()
    [record] = caplog.records
    message = record.getMessage()
    assert "request b: the KV pages ran out with 2 sequences running" in message and "its 3 of 7 pages and its 13 tokens" in message
    assert all(flag in message for flag in ("--num-pages", "--kv-cache-memory-bytes", "--gpu-memory-utilization", "--max-num-seqs"))


def test_one_line_a_second_and_the_others_counted(make_loop, caplog: pytest.LogCaptureFixture) -> None:
    now = [10.0]
    log = PreemptionLog(8, clock=lambda: now[0])
    loop = make_loop()
    loop.add("x", [1], n=2, temperature=1.0)
    victim = loop.scheduler.roster.sequences[1]
    for now[0] in (10.0, 10.1, 10.9, 11.0, 11.5, 13.0, 20.0):
        log.note(victim, 3)
    messages = [record.getMessage() for record in caplog.records]
    assert all("request x (sequence 1 of 2)" in message for message in messages)
    assert [message.partition("(--max-num-seqs).")[2] for message in messages] == [
        "",
        " 2 more preemptions since the last such line.",
        " 1 more preemptions since the last such line.",
        "",
    ]
