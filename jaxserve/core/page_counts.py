"""How many KV pages a sequence needs when some groups of layers see only its end. Arithmetic alone: knows no pool and no sequences.

Next: `scheduler.arrival` and `runner.memory` (what can ever fit), `scheduler.sequence_pages` (what fits now).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from jaxserve.config import GroupLimits


def most_pages(group: GroupLimits, *, max_chunk: int, page_size: int) -> int | None:
    """Most pages that a group holds of a sequence, however long it is: what a chunk of `max_chunk` tokens sees; None without a limit.

    A sequence whose prompt others wait for keeps what they will see, up to a page more, hence a chunk counts as a page at least.
    """
    if group.reach is None:
        return None
    num_positions = group.reach - 1 + max(max_chunk, page_size)
    return (num_positions + page_size - 2) // page_size + 1


@lru_cache
def longest_fit(groups: Sequence[GroupLimits], num_pages: int, *, max_chunk: int, page_size: int, max_length: int) -> int:
    """Positions of a sequence, a multiple of `page_size`, that `num_pages` pages hold; what `max_length` fills, rounded up, is enough."""
    most = [most_pages(group, max_chunk=max_chunk, page_size=page_size) for group in groups]

    def needed(pages: int) -> int:
        return sum(pages if limit is None else min(pages, limit) for limit in most)

    low, high = 0, -(-max_length // page_size)
    while low < high:
        middle = (low + high + 1) // 2
        if needed(middle) <= num_pages:
            low = middle
        else:
            high = middle - 1
    return low * page_size
