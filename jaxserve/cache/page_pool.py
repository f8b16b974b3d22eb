"""The pool of KV pages: which are free, how many owners each used page has, and in which order free pages are reused.

Knows page ids only: not what a page holds, nor for whom. A free page may still hold a known prefix (`mark_cached`); it keeps it
until it is allocated again, which is the moment of eviction. Next: `cache.prefix_cache`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

NULL_PAGE = 0
"""Never allocated, cached or counted: padding on the device reads and writes it."""


class PagePool:
    """Pages 1 .. num_pages - 1, each free or owned by one or more holders.

    Free pages form one queue. Pages without a known prefix return to its front, since nothing is lost by reusing them; pages
    with one return to its back, so the queue is also the least-recently-used order of the prefix cache.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, f"a pool of {num_pages} pages has no page beside the null page"
        self.num_pages = num_pages
        # An ordered dict is a linked list with O(1) removal from the middle, written in C.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages))
        self._ref_counts = [0] * num_pages
        self._is_cached = bytearray(num_pages)
        self._on_evict: Callable[[int], None] = lambda page: None

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out, those with a cached prefix included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages with at least one owner."""
        return self.num_pages - 1 - len(self._free)

    def ref_count(self, page: int) -> int:
        """Number of owners."""
        return self._ref_counts[page]

    def on_evict(self, forget: Callable[[int], None]) -> None:
        """Have `forget(page)` called when a cached page is about to be handed out for new content."""
        self._on_evict = forget

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages from the front of the queue, each with one owner. The caller checks `num_free` first."""
        assert count <= len(self._free), f"{count} pages asked, {len(self._free)} free"
        pages = []
        for _ in range(count):
            page, _none = self._free.popitem(last=False)
            if self._is_cached[page]:
                self._is_cached[page] = 0
                self._on_evict(page)
            self._ref_counts[page] = 1
            pages.append(page)
        return pages

    def touch(self, pages: Iterable[int]) -> None:
        """Add one owner to each page; a free one leaves the queue with its content."""
        for page in pages:
            assert page != NULL_PAGE
            if self._ref_counts[page] == 0:
                del self._free[page]
            self._ref_counts[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Take one owner from each page of a sequence's table. The tail is freed first, so that it is evicted first."""
        for page in reversed(pages):
            if page == NULL_PAGE:
                continue
            count = self._ref_counts[page] - 1
            assert count >= 0, f"page {page} is freed but has no owner"
            self._ref_counts[page] = count
            if count == 0:
                self._free[page] = None
                if not self._is_cached[page]:
                    self._free.move_to_end(page, last=False)

    def mark_cached(self, page: int) -> None:
        """Remember that the page, which has an owner, holds a known prefix."""
        assert self._ref_counts[page] > 0
        self._is_cached[page] = 1

    def unmark_cached(self, page: int) -> None:
        """The page's content is no longer known; if free, it is reused first."""
        self._is_cached[page] = 0
        if page in self._free:
            self._free.move_to_end(page, last=False)

    def check_integrity(self, owners: Mapping[int, int] | None = None) -> None:
        """Assert free + cached + owned = all, and, when given, that `owners` maps exactly the owned pages to their owner counts."""
        assert NULL_PAGE not in self._free and self._ref_counts[NULL_PAGE] == 0 and not self._is_cached[NULL_PAGE]
        owned = {page: count for page, count in enumerate(self._ref_counts) if count}
        assert all(count > 0 for count in owned.values())
        assert not owned.keys() & self._free.keys(), "a page is both free and owned"
        num_cached = sum(1 for page in self._free if self._is_cached[page])
        num_blank = len(self._free) - num_cached
        assert num_blank + num_cached + len(owned) == self.num_pages - 1, "a page is lost"
        if owners is not None:
            assert owned == dict(owners), f"owners differ: pool {owned}, holders {dict(owners)}"

    def is_cached(self, page: int) -> bool:
        """True when the page holds a known prefix."""
        return bool(self._is_cached[page])
