"""The collector stays away from a step's garbage, still frees cycles, and all is as it was afterwards."""

import gc
import sys
import weakref

from jaxserve.engine.interpreter import GC_THRESHOLD, SWITCH_INTERVAL_S, prompt_interpreter


class Node:
    def __init__(self) -> None:
        self.itself = self


def num_collections() -> int:
    return gc.get_stats()[0]["collections"]


def test_few_collections_and_cycles_freed() -> None:
    with prompt_interpreter():
        assert gc.get_freeze_count() > 0
        start = num_collections()
        kept = [[] for _ in range(GC_THRESHOLD // 2)]
        assert num_collections() == start, "a step's worth of objects sets off no collection"
        node = weakref.ref(Node())
        kept += [[] for _ in range(2 * GC_THRESHOLD)]
        assert num_collections() > start and node() is None


def test_everything_is_undone() -> None:
    before = gc.get_threshold(), sys.getswitchinterval()
    with prompt_interpreter():
        assert sys.getswitchinterval() == SWITCH_INTERVAL_S < before[1]
    assert (gc.get_threshold(), sys.getswitchinterval()) == before and gc.get_freeze_count() == 0
