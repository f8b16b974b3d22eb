"""The collector stays away from a step's garbage, still frees cycles, and is as it was afterwards."""

import gc
import weakref

from jaxserve.engine.collector import THRESHOLD, quiet_collector


class Node:
    def __init__(self) -> None:
        self.itself = self


def num_collections() -> int:
    return gc.get_stats()[0]["collections"]


def test_few_collections_and_cycles_freed() -> None:
    before = gc.get_threshold()
    with quiet_collector():
        assert gc.get_freeze_count() > 0
        start = num_collections()
        kept = [[] for _ in range(THRESHOLD // 2)]
        assert num_collections() == start, "a step's worth of objects sets off no collection"
        node = weakref.ref(Node())
        kept += [[] for _ in range(2 * THRESHOLD)]
        assert num_collections() > start and node() is None
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
