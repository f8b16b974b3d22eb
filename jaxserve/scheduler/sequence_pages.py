"""Pages of sequences: prefix hits, growth, release, and the moment a page's content becomes known to the prefix cache.

Knows nothing of budgets and queues. A page table has one list for each KV group, all of the same length; entry i holds positions
[i * page_size, (i + 1) * page_size). Next: `cache.page_pool`, `cache.prefix_cache`.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from jaxserve.cache.page_pool import PagePool
from jaxserve.cache.prefix_cache import PrefixCache, Watch
from jaxserve.config import SchedulerLimits
from jaxserve.core.plan import PageWrite
from jaxserve.core.sequence import Sequence, Status
from jaxserve.scheduler.prompt_logprobs import is_complete

type PageTables = list[list[int]]


class _Deferred(NamedTuple):
    step_id: int
    tables: PageTables


class _Lookup(NamedTuple):
    sequence: Sequence
    length: int
    tables: PageTables
    watch: Watch


class SequencePages:
    """The pool, the prefix cache, and the rules by which sequences use them."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.pool = PagePool(limits.num_pages)
        self.cache = PrefixCache(self.pool, limits.page_size, limits.num_groups)
        self._page_size = limits.page_size
        self._num_groups = limits.num_groups
        self._is_caching = limits.enable_prefix_caching
        self._rope_original_length = limits.rope_original_length
        self._rope_table = None if limits.rope_original_length is None else "original"
        self._root = self.cache.chain_root(rope_table=self._rope_table)
        self._deferred: list[_Deferred] = []
        self._last_lookup: _Lookup | None = None

    def num_missing(self, sequence: Sequence, length: int) -> int:
        """Pages, over all groups, that must be allocated before the sequence's tables hold `length` tokens."""
        missing = -(-length // self._page_size) - len(sequence.page_tables[0])
        return missing * self._num_groups if missing > 0 else 0

    def num_admission_pages(self, length: int, prefix: PageTables) -> int:
        """Free pages that a sequence of `length` tokens needs besides the owned ones among its prefix pages."""
        num_reused = sum(1 for table in prefix for page in table if self.pool.ref_count(page))
        return -(-length // self._page_size) * self._num_groups - num_reused

    @property
    def num_deferred(self) -> int:
        """Pages that come free when dispatched steps are committed."""
        return sum(len(table) for entry in self._deferred for table in entry.tables)

    def find_prefix(self, sequence: Sequence) -> PageTables:
        """Cached pages of the longest known prefix, for each group. The last token is always left to compute: it gives logits.

        Nothing is read for a sequence whose prompt log-probabilities are still wanted, since they come from computing the
        prompt, nor for one that starts with another RoPE table than the cached pages.
        """
        if not self.may_read_cache(sequence):
            return [[] for _ in range(self._num_groups)]
        length, last = sequence.num_tokens, self._last_lookup
        # The head of a blocked queue asks at every step; a long prompt has thousands of pages to look up.
        if last is not None and last.sequence is sequence and last.length == length and not last.watch.is_stale:
            return last.tables
        tables = self.cache.find(sequence.page_hashes, self._root_of(sequence), sequence.token_ids, (length - 1) // self._page_size)
        self._last_lookup = _Lookup(sequence, length, tables, self.cache.watch(tables, sequence.page_hashes))
        return tables

    def may_read_cache(self, sequence: Sequence) -> bool:
        """Whether a sequence about to be admitted looks into the prefix cache."""
        original = self._rope_original_length
        return self._is_caching and is_complete(sequence) and (original is None or sequence.num_tokens <= original)

    def take_prefix(self, sequence: Sequence, prefix: PageTables) -> None:
        """Become an owner of the prefix's pages."""
        for table in prefix:
            self.pool.touch(table)
        sequence.page_tables = [list(table) for table in prefix]
        sequence.num_computed_tokens = len(prefix[0]) * self._page_size

    def grow(self, sequence: Sequence, length: int, page_writes: list[PageWrite]) -> None:
        """Allocate pages so that the tables hold `length` tokens, and record them for the device."""
        first = len(sequence.page_tables[0])
        count = -(-length // self._page_size) - first
        if count <= 0:
            return
        slot = sequence.slot
        assert slot is not None
        for group, table in enumerate(sequence.page_tables):
            pages = self.pool.allocate(count)
            table += pages
            for i, page in enumerate(pages, first):
                page_writes.append(PageWrite(slot, group, i, page))

    def register_full(self, sequence: Sequence, start: int, end: int) -> None:
        """Positions [start, end) are computed: let the cache know the pages that this filled.

        Called at commit, when the content is certain. With a length-dependent RoPE only pages of the original table count.
        """
        if not self._is_caching or sequence.status is not Status.RUNNING:
            return
        original = self._rope_original_length
        if original is not None:
            if sequence.rope_length > original:
                return
            end = min(end, original)
        first, last = start // self._page_size, end // self._page_size
        hashes = sequence.page_hashes
        if last > len(hashes):
            self.cache.extend_hashes(hashes, self._root_of(sequence), sequence.token_ids, last)
        for group, table in enumerate(sequence.page_tables):
            for i in range(first, last):
                self.cache.register(hashes[i], group, table[i])

    def forget(self, sequence: Sequence) -> None:
        """What the sequence's pages hold cannot be trusted: no other sequence may find them."""
        for table in sequence.page_tables:
            self.cache.forget(table)

    def release(self, sequence: Sequence, *, after_step: int | None = None) -> None:
        """Give up the sequence's pages: at once, or when step `after_step`, which may still write them, is committed."""
        tables = sequence.page_tables
        sequence.page_tables = [[] for _ in range(self._num_groups)]
        sequence.num_computed_tokens = 0
        if after_step is None:
            self.free(tables)
        else:
            self._deferred.append(_Deferred(after_step, tables))

    def release_deferred(self, step_id: int) -> None:
        """Steps up to `step_id` are done: free what waited for them."""
        due = [entry for entry in self._deferred if entry.step_id <= step_id]
        if due:
            self._deferred = [entry for entry in self._deferred if entry.step_id > step_id]
            for entry in due:
                self.free(entry.tables)

    def free(self, tables: PageTables) -> None:
        """Take one owner from every page of the tables."""
        for table in tables:
            self.pool.free(table)

    def deferred_owners(self) -> Counter[int]:
        """How often each page is held for a dispatched step."""
        return Counter(page for entry in self._deferred for table in entry.tables for page in table)

    def check_lookup(self) -> None:
        """Assert that a remembered lookup, while not stale, is what a new one would find."""
        last = self._last_lookup
        if last is not None and not last.watch.is_stale:
            seq, num_pages = last.sequence, (last.length - 1) // self._page_size
            assert last.tables == self.cache.find(seq.page_hashes, self._root_of(seq), seq.token_ids, num_pages)

    def _root_of(self, sequence: Sequence) -> bytes:
        salt = sequence.request.cache_salt
        return self._root if salt is None else self.cache.chain_root(rope_table=self._rope_table, salt=salt)
