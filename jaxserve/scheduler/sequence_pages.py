"""Pages of sequences: prefix hits, growth, release, and the moment a page's content becomes known to the prefix cache.

Knows nothing of budgets and queues. A page table has one list for each KV group, all of the same length; entry i holds positions
[i * page_size, (i + 1) * page_size). Groups that see only a sequence's end drop the pages that fell out of sight once the step that
saw them last is committed: their entries become the null page, while the device keeps the old ones and reads none of them.
Next: `cache.page_pool`, `cache.prefix_cache`.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import NamedTuple

from jaxserve.cache.page_pool import NULL_PAGE, PagePool
from jaxserve.cache.prefix_cache import Hit, PrefixCache, Watch
from jaxserve.config import SchedulerLimits
from jaxserve.core.page_counts import most_pages
from jaxserve.core.plan import PageWrite
from jaxserve.core.sequence import Sequence, Status
from jaxserve.scheduler.pooling import needs_every_position
from jaxserve.scheduler.prompt_logprobs import is_complete

type PageTables = list[list[int]]


class _Deferred(NamedTuple):
    step_id: int
    tables: PageTables


class _Lookup(NamedTuple):
    sequence: Sequence
    length: int
    hit: Hit
    watch: Watch


class SequencePages:
    """The pool, the prefix cache, and the rules by which sequences use them."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.pool = PagePool(limits.num_pages)
        self.cache = PrefixCache(self.pool, limits.page_size, limits.groups)
        self._page_size = page_size = limits.page_size
        self._num_groups = limits.num_groups
        self._most = [most_pages(group, max_chunk=limits.max_chunk, page_size=page_size) for group in limits.groups]
        self._dropping = [(i, group) for i, group in enumerate(limits.groups) if group.reach is not None]
        self._is_caching = limits.enable_prefix_caching and not limits.has_recurrent_state
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
        """Free pages that a sequence of `length` tokens needs at most at once besides the owned ones among its prefix pages."""
        total, missing = 0, -(-length // self._page_size) - len(prefix[0])
        for table, most in zip(prefix, self._most, strict=True):
            needed = missing + sum([page != NULL_PAGE and not self.pool.ref_count(page) for page in table])
            total += needed if most is None else min(needed, most)
        return total

    def num_reserved(self, sequence: Sequence) -> int:
        """Pages that a running sequence may still need, beyond what it holds, for tokens it already has."""
        missing = -(-sequence.num_tokens // self._page_size) - len(sequence.page_tables[0])
        if missing <= 0:
            return 0
        total = missing * (self._num_groups - len(self._dropping))
        for group, _limits in self._dropping:
            most = self._most[group]
            assert most is not None
            num_held = len(sequence.page_tables[group]) - sequence.num_dropped[group]
            total += min(missing, max(0, most - num_held))
        return total

    @property
    def num_deferred(self) -> int:
        """Pages that come free when dispatched steps are committed."""
        return sum(1 for entry in self._deferred for table in entry.tables for page in table if page != NULL_PAGE)

    def find_prefix(self, sequence: Sequence) -> PageTables:
        """Cached pages of the longest known prefix, for each group. The last token is always left to compute: it gives logits.

        Nothing is read for a sequence whose prompt log-probabilities, or all of whose hidden states, are still wanted, since they come
        from computing the prompt, nor for one that starts with another RoPE table than the cached pages.
        """
        if not self.may_read_cache(sequence):
            return [[] for _ in range(self._num_groups)]
        length, last = sequence.num_tokens, self._last_lookup
        # The head of a blocked queue asks at every step; a long prompt has thousands of pages to look up.
        if last is not None and last.sequence is sequence and last.length == length and not last.watch.is_stale:
            return last.hit.tables
        hit = self.cache.find(sequence.page_hashes, self._root_of(sequence), sequence.token_ids, (length - 1) // self._page_size)
        self._last_lookup = _Lookup(sequence, length, hit, self.cache.watch(hit))
        return hit.tables

    def may_read_cache(self, sequence: Sequence) -> bool:
        """Whether a sequence about to be admitted looks into the prefix cache."""
        original = self._rope_original_length
        wants_all = not is_complete(sequence) or needs_every_position(sequence)
        return self._is_caching and not wants_all and (original is None or sequence.num_tokens <= original)

    def take_prefix(self, sequence: Sequence, prefix: PageTables) -> None:
        """Become an owner of the prefix's pages."""
        self.touch(prefix)
        sequence.page_tables = [list(table) for table in prefix]
        if self._dropping:
            sequence.num_dropped = [table.count(NULL_PAGE) for table in prefix]
        sequence.decodes_until = sequence.drop_at = sequence.attend_at = 0
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

    def drop_unseen(self, sequence: Sequence, length: int) -> None:
        """The first `length` tokens are computed and committed: give up pages that no token behind them will see.

        Cheap to skip: nothing happens before `length` reaches `sequence.drop_at`.
        """
        next_at, page_size = sys.maxsize, self._page_size
        for group, limits in self._dropping:
            first, end = sequence.num_dropped[group], limits.first_visible(length) // page_size
            table = sequence.page_tables[group]
            if end > first:
                self.pool.free(table[first:end])
                table[first:end] = [NULL_PAGE] * (end - first)
                sequence.num_dropped[group] = end
            if limits.window is not None:
                next_at = min(next_at, (end + 1) * page_size + limits.window - 1)
            elif limits.chunk is not None:
                next_at = min(next_at, (length // limits.chunk + 1) * limits.chunk)
        sequence.drop_at = next_at

    def num_leaving(self, sequence: Sequence, length: int) -> int:
        """Pages that come free when `length` tokens are committed, of which the last are being computed by dispatched steps."""
        return sum(
            1
            for group, limits in self._dropping
            for page in sequence.page_tables[group][sequence.num_dropped[group] : limits.first_visible(length) // self._page_size]
            if self.pool.ref_count(page) == 1
        )

    def shared_prefix(self, sequence: Sequence, num_pages: int) -> PageTables:
        """The first `num_pages` pages as another sequence takes them over, with one more owner for it."""
        firsts = self.cache.first_pages(num_pages)
        assert all(first >= dropped for first, dropped in zip(firsts, sequence.num_dropped, strict=True)), "a shared page was dropped"
        tables = [[NULL_PAGE] * first + table[first:num_pages] for first, table in zip(firsts, sequence.page_tables, strict=True)]
        self.touch(tables)
        return tables

    def touch(self, tables: PageTables) -> None:
        """Add one owner to every page of the tables."""
        for table in tables:
            self.pool.touch([page for page in table if page != NULL_PAGE])

    def forget(self, sequence: Sequence) -> None:
        """What the sequence has computed cannot be trusted: no other sequence may find it, in pages it has dropped neither."""
        self.cache.forget(sequence.page_hashes)

    def release(self, sequence: Sequence, *, after_step: int | None = None) -> None:
        """Give up the sequence's pages: at once, or when step `after_step`, which may still write them, is committed."""
        tables = sequence.page_tables
        sequence.page_tables = [[] for _ in range(self._num_groups)]
        sequence.num_dropped = [0] * self._num_groups
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
        return Counter(page for entry in self._deferred for table in entry.tables for page in table if page != NULL_PAGE)

    def check_lookup(self) -> None:
        """Assert that a remembered lookup, while not stale, is what a new one would find."""
        last = self._last_lookup
        if last is not None and not last.watch.is_stale:
            seq, num_pages = last.sequence, (last.length - 1) // self._page_size
            assert last.hit.tables == self.cache.find(seq.page_hashes, self._root_of(seq), seq.token_ids, num_pages).tables

    def _root_of(self, sequence: Sequence) -> bytes:
        salt = sequence.request.cache_salt
        return self._root if salt is None else self.cache.chain_root(rope_table=self._rope_table, salt=salt)
