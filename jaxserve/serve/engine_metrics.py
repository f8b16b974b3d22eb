"""The engines' figures as Prometheus families, made anew for each scrape from one `EngineStats` of each. Knows no requests and no sockets.

Totals are an engine's own and begin at 0 when it is started again, which Prometheus takes for what it is. Next: `metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from jaxserve.engine.info import EngineInfo
from jaxserve.engine.stats import STEP_TOKEN_BOUNDS, EngineStats

LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What is known of one engine: its facts and figures, both None while it is gone, and whether it answers and makes progress."""

    info: EngineInfo | None
    stats: EngineStats | None
    is_up: bool


def engine_families(prefix: str, model_name: str, reports: Sequence[EngineReport]) -> Iterator[Metric]:
    """The families, each with a sample for every engine that has said something; an engine that is gone has only engine_up.

    Args:
        prefix: Before the colon of every name.
        model_name: Label of every series.
        reports: Of all engines; the place of each is its label `engine`.
    """
    there = [((model_name, str(i)), each.info, each.stats) for i, each in enumerate(reports) if each.info and each.stats]

    def family(kind: Callable[..., Any], name: str, text: str, value: Callable[[EngineStats], float]) -> Metric:
        family = kind(f"{prefix}:{name}", text, labels=LABELS)
        for labels, _, stats in there:
            family.add_metric(labels, value(stats))
        return cast(Metric, family)

    gauge, counter = partial(family, GaugeMetricFamily), partial(family, CounterMetricFamily)
    up = GaugeMetricFamily(f"{prefix}:engine_up", "1 while the engine answers and makes progress.", labels=LABELS)
    for i, report in enumerate(reports):
        up.add_metric((model_name, str(i)), float(report.is_up))
    yield up
    if not there:
        return
    yield gauge("num_requests_running", "Sequences in the running batch.", lambda stats: stats.num_running)
    yield gauge("num_requests_waiting", "Sequences that wait for a place in it.", lambda stats: stats.num_waiting)
    # The null page is never used.
    yield gauge(
        "kv_cache_usage_perc", "Share of KV pages in use, from 0 to 1.", lambda stats: stats.num_used_pages / max(1, stats.num_pages - 1)
    )
    yield _cache_config(prefix, [(labels, info) for labels, info, _ in there])
    yield counter("generation_tokens", "Tokens generated.", lambda stats: stats.num_generated_tokens)
    yield counter("num_preemptions", "Sequences that gave up their pages to be computed again later.", lambda stats: stats.num_preemptions)
    yield counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda stats: stats.num_cache_queries)
    yield counter("prefix_cache_hits", "Tokens found there.", lambda stats: stats.num_cache_hits)
    yield counter(
        "corrupted_requests", "Sequences that ended because their logits were not finite.", lambda stats: stats.num_corrupted_sequences
    )
    yield counter(
        "num_compiles",
        "Compiles after warm-up; each stopped a step for seconds and should not have been.",
        lambda stats: stats.num_compiles,
    )
    yield _step_tokens(prefix, [(labels, stats) for labels, _, stats in there])


def _step_tokens(prefix: str, there: Iterable[tuple[tuple[str, str], EngineStats]]) -> Metric:
    steps = HistogramMetricFamily(f"{prefix}:iteration_tokens_total", "Tokens of a step.", labels=LABELS)
    bounds = [*(str(float(bound)) for bound in STEP_TOKEN_BOUNDS), "+Inf"]
    for labels, stats in there:
        steps.add_metric(labels, list(zip(bounds, accumulate(stats.step_token_counts), strict=True)), stats.num_step_tokens)
    return steps


def _cache_config(prefix: str, there: Iterable[tuple[tuple[str, str], EngineInfo]]) -> Metric:
    """vLLM's labels of the facts that we have too; the null page counts."""
    names = ("block_size", "num_gpu_blocks", "cache_dtype", "kv_cache_memory_bytes")
    family = GaugeMetricFamily(f"{prefix}:cache_config_info", "What the KV cache is made of.", labels=[*LABELS, *names])
    for labels, info in there:
        family.add_metric([*labels, *map(str, (info.page_size, info.num_pages, info.kv_cache_dtype, info.kv_cache_bytes))], 1)
    return family
