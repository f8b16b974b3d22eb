#!/usr/bin/env python
"""Why KV caches are paged: how many requests fit into the same memory, with pages and with the maximum reserved for each.

    python scripts/paging_demo.py --page-size 16 --lengths exp

Two runs. The first hands out pages of the real PagePool to requests of known final length until none are left. The second lets the
real scheduler serve them on a device that only counts (`jaxserve.testing`), and reads the most sequences that ran at once,
and the waste at that moment, from the scheduler's own statistics. Prints a card and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from typing import Any

from jaxserve.cache.page_pool import PagePool
from jaxserve.config import SchedulerLimits
from jaxserve.testing import CountingLoop

POOL_TOKENS = 2**20
NUM_REQUESTS = 4_000
MAX_LENGTH = 4_096
MAX_OUTPUT = 64
"""Tokens that the second run generates for each request; the rest of its length is prompt."""
ENTRY_BYTES = 4


def draw_lengths(kind: str, seed: int) -> list[int]:
    """Final lengths in tokens: 100 + Exp(mean 400), at most 4,096; or all 4,096."""
    if kind == "max":
        return [MAX_LENGTH] * NUM_REQUESTS
    rng = random.Random(seed)
    return [min(MAX_LENGTH, 100 + int(rng.expovariate(1 / 400))) for _ in range(NUM_REQUESTS)]


def fill_pool(lengths: list[int], page_size: int) -> dict[str, Any]:
    """Give pages to requests in order until one does not fit."""
    pool = PagePool(POOL_TOKENS // page_size + 1)  # and the null page
    num_fit = num_tokens = num_entries = 0
    for length in lengths:
        num_pages = -(-length // page_size)
        if num_pages > pool.num_free:
            break
        pool.allocate(num_pages)
        num_fit, num_tokens, num_entries = num_fit + 1, num_tokens + length, num_entries + num_pages
    num_reserved = min(len(lengths), POOL_TOKENS // MAX_LENGTH)
    return {
        "requests_that_fit": num_fit,
        "requests_that_fit_reserving_the_maximum": num_reserved,
        "ratio": round(num_fit / num_reserved, 2),
        "waste": round(1 - num_tokens / (pool.num_used * page_size), 4),
        "waste_reserving_the_maximum": round(1 - sum(lengths[:num_reserved]) / (num_reserved * MAX_LENGTH), 4),
        "page_table_bytes": num_entries * ENTRY_BYTES,
    }


def serve_all(lengths: list[int], page_size: int) -> dict[str, Any]:
    """Serve requests of twice the pool's tokens in all; the waste is that of the step with the most running sequences."""
    limits = SchedulerLimits(
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=2**17,
        max_model_len=MAX_LENGTH + 1,
        num_pages=POOL_TOKENS // page_size + 1,
        page_size=page_size,
        enable_prefix_caching=False,
    )
    loop = CountingLoop(limits)
    num_tokens = 0
    for i, length in enumerate(lengths):
        if num_tokens >= 2 * POOL_TOKENS:
            break
        num_tokens += length
        num_output = min(MAX_OUTPUT, length // 2)
        loop.add(str(i), [i % 1000] * (length - num_output), max_tokens=num_output)
    steps = []
    while loop.scheduler.has_work:
        plan = loop.step()
        steps.append(loop.scheduler.stats(plan))
    peak = max(steps, key=lambda stats: stats.num_running)
    loop.scheduler.check_integrity()
    return {
        "served": len(loop.outputs),
        "steps": len(steps),
        "peak_running": peak.num_running,
        "waste_at_peak": round(1 - peak.num_kv_tokens / (peak.num_used_pages * page_size), 4),
        "preemptions": steps[-1].num_preemptions,
    }


def print_card(options: argparse.Namespace, pool: dict[str, Any], served: dict[str, Any]) -> None:
    """For people."""
    print(f"Paging demo: {POOL_TOKENS:,} tokens of KV cache, pages of {options.page_size}, lengths: {options.lengths}")
    print(f"  requests that fit        {pool['requests_that_fit']:>10,}")
    print(f"  reserving the maximum    {pool['requests_that_fit_reserving_the_maximum']:>10,}   (paged: {pool['ratio']} times as many)")
    print(f"  waste                    {pool['waste']:>10.2%}   (reserving: {pool['waste_reserving_the_maximum']:.2%})")
    print(f"  page tables              {pool['page_table_bytes']:>10,}   bytes")
    print(f"  scheduler: peak running  {served['peak_running']:>10,}")
    print(f"  scheduler: waste there   {served['waste_at_peak']:>10.2%}")
    print(f"  scheduler: {served['served']:,} requests in {served['steps']:,} steps, {served['preemptions']:,} preemptions")


def main() -> None:
    """Parse the flags, do both runs, print."""
    parser = argparse.ArgumentParser(description="How many requests fit into a paged KV cache, on jaxserve's own page pool and scheduler.")
    parser.add_argument("--page-size", type=int, choices=(1, 16, 64, 512), default=16, help="tokens in a page")
    parser.add_argument("--lengths", choices=("exp", "max"), default="exp", help="100 + Exp(400) capped at 4,096; or all 4,096")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths")
    options = parser.parse_args()
    lengths = draw_lengths(options.lengths, options.seed)
    pool, served = fill_pool(lengths, options.page_size), serve_all(lengths, options.page_size)
    print_card(options, pool, served)
    print(json.dumps({"page_size": options.page_size, "lengths": options.lengths, "pool": pool, "scheduler": served}))


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has enough; the interpreter flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
