"""Checks for tests that walk the scheduler's whole state: nothing leaked, nothing shared that has two writers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxserve.core.sequence import Sequence, Status
from jaxserve.scheduler.sequence_pages import SequencePages


def check_pages(pages: SequencePages, running: Iterable[Sequence], held: Counter[int], page_size: int) -> None:
    """Owners are exactly the running sequences and `held` (page to owner count); pages still to be written have one owner."""
    owners = Counter(held)
    for sequence in running:
        assert sequence.status is Status.RUNNING and len({len(table) for table in sequence.page_tables}) == 1
        owners.update(page for table in sequence.page_tables for page in table)
    pages.pool.check_integrity(owners)
    pages.cache.check_integrity()
    pages.check_lookup()
    for sequence in running:
        first_written = sequence.num_computed_tokens // page_size
        for table in sequence.page_tables:
            assert all(owners[page] == 1 for page in table[first_written:]), f"a page of sequence {sequence.seq_id} has two writers"


def check_slots(free: Iterable[int], taken: Iterable[int | None], count: int) -> None:
    """Each of the `count` slots is free or taken by one sequence; None is a sequence that takes none."""
    assert sorted([*free, *(slot for slot in taken if slot is not None)]) == list(range(count)), "a slot is lost or taken twice"
