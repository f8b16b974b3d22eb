"""Checks for tests that walk the scheduler's whole state: nothing leaked, nothing shared that has two writers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxserve.cache.page_pool import NULL_PAGE
from jaxserve.config import SchedulerLimits
from jaxserve.core.sequence import Sequence, Status
from jaxserve.scheduler.sequence_pages import SequencePages


def check_pages(pages: SequencePages, running: Iterable[Sequence], held: Counter[int], limits: SchedulerLimits) -> None:
    """Owners are exactly the running sequences and `held` (page to owner count); pages still to be written have one owner.

    Of a sequence's tables only leading entries are dropped, and none that the next token to be computed sees.
    """
    owners = Counter(held)
    for sequence in running:
        assert sequence.status is Status.RUNNING and len({len(table) for table in sequence.page_tables}) == 1
        owners.update(page for table in sequence.page_tables for page in table if page != NULL_PAGE)
    pages.pool.check_integrity(owners)
    pages.cache.check_integrity()
    pages.check_lookup()
    for sequence in running:
        first_written = sequence.num_computed_tokens // limits.page_size
        for table, num_dropped, group in zip(sequence.page_tables, sequence.num_dropped, limits.groups, strict=True):
            name = f"of sequence {sequence.seq_id}"
            assert not any(table[:num_dropped]) and all(table[num_dropped:]), f"a table {name} has a hole"
            assert num_dropped * limits.page_size <= group.first_visible(sequence.num_computed_tokens), f"a visible page {name} was dropped"
            assert all(owners[page] == 1 for page in table[first_written:]), f"a page {name} has two writers"


def check_slots(free: Iterable[int], taken: Iterable[int | None], count: int) -> None:
    """Each of the `count` slots is free or taken by one sequence; None is a sequence that takes none."""
    assert sorted([*free, *(slot for slot in taken if slot is not None)]) == list(range(count)), "a slot is lost or taken twice"
