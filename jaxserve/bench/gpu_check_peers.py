"""Decode attention of other libraries on the shapes of `bench.gpu_check`, where they are installed: FlashInfer, and torch's SDPA.

A process of its own, so that its memory is free again before JAX takes its share. Prints one JSON list of [route, shape, microseconds].
SDPA reads keys and values that lie dense, which no server has; FlashInfer reads pages of our layout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
SHAPES = ((32, 2048), (32, 8192), (128, 2048), (256, 1024))
NUM_REPEATS = 20


def measure() -> int:
    """Returns 0 also where there is nothing to measure. Not `main`: `jaxserve bench` offers modules that have one."""
    results: list[tuple[str, str, float]] = []
    if find_spec("torch") is not None:
        import torch  # type: ignore[import-not-found]

        if torch.cuda.is_available():
            for rows, length in SHAPES:
                for name, prepare in (("torch SDPA, dense", _sdpa), ("FlashInfer", _flashinfer)):
                    try:
                        call = prepare(torch, rows, length)
                        if call is not None:
                            results.append((name, f"decode {rows} x {length}", _microseconds(torch, call)))
                    except Exception as error:  # another library's trouble must not end the check of ours
                        print(f"{name}, {rows} x {length}: {error}", file=sys.stderr)
    print(json.dumps(results))
    return 0


def _sdpa(torch: Any, rows: int, length: int) -> Callable[[], Any]:
    q = torch.randn(rows, HEADS, 1, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(rows, KV_HEADS, length, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _flashinfer(torch: Any, rows: int, length: int) -> Callable[[], Any] | None:
    if find_spec("flashinfer") is None:
        return None
    import flashinfer  # type: ignore[import-not-found]

    pages = length // PAGE_SIZE
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "HND")
    indptr = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * pages
    indices = torch.randperm(rows * pages, device="cuda").to(torch.int32)
    last = torch.full((rows,), PAGE_SIZE, dtype=torch.int32, device="cuda")
    wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    q = torch.randn(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    kv = torch.randn(rows * pages, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    return lambda: wrapper.run(q, kv)


def _microseconds(torch: Any, call: Callable[[], Any]) -> float:
    call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(NUM_REPEATS):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / NUM_REPEATS * 1e3


if __name__ == "__main__":
    sys.exit(measure())
