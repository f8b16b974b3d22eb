"""Which request is refused for the sequences that wait already."""

import threading

import pytest

from jaxserve.engine.stats import EngineStats
from jaxserve.engine.waiting_limit import WaitingLimit
from jaxserve.errors import Overloaded

IDLE = EngineStats()


def test_seats_and_then_the_queue_fill() -> None:
    limit = WaitingLimit(max_waiting=3, max_num_seqs=2)
    for _ in range(5):
        limit.take(1, IDLE)
    with pytest.raises(
        Overloaded, match=r"^3 sequences are waiting, 1 more would exceed --max-waiting 3; try again later, raise it"
    ) as caught:
        limit.take(1, IDLE)
    assert caught.value.retry_after_s > 0
    assert limit.num_open == 5
    limit.give_back(1)
    limit.take(1, IDLE)


def test_where_pages_are_short_the_free_seats_do_not_count() -> None:
    limit = WaitingLimit(max_waiting=3, max_num_seqs=100)
    limit.take(4, IDLE)
    stats = EngineStats(num_running=1, num_waiting=3)
    with pytest.raises(Overloaded):
        limit.take(1, stats)
    limit.give_back(1)
    limit.take(1, stats)


def test_an_engine_without_work_takes_more_sequences_than_may_wait() -> None:
    limit = WaitingLimit(max_waiting=3, max_num_seqs=2)
    limit.take(16, IDLE)
    with pytest.raises(Overloaded):
        limit.take(1, IDLE)


def test_no_limit() -> None:
    limit = WaitingLimit(max_waiting=0, max_num_seqs=1)
    for _ in range(1000):
        limit.take(2, EngineStats(num_waiting=1000))
    assert limit.num_open == 2000


def test_threads_share_one_count() -> None:
    limit = WaitingLimit(max_waiting=10, max_num_seqs=0)
    refused = []

    def take() -> None:
        for _ in range(100):
            try:
                limit.take(1, IDLE)
            except Overloaded:
                refused.append(1)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (limit.num_open, len(refused)) == (10, 390)
