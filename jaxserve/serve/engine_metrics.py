"""The engine's figures as Prometheus families, made anew for each scrape from one `EngineStats`. Knows no requests and no sockets.

Totals are the engine's own and begin at 0 when it is started again, which Prometheus takes for what it is. Next: `metrics`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from jaxserve.engine.info import EngineInfo
from jaxserve.engine.stats import STEP_TOKEN_BOUNDS, EngineStats

LABELS = ("model_name", "engine")


def engine_families(prefix: str, model_name: str, info: EngineInfo, stats: EngineStats | None, *, is_up: bool) -> Iterator[Metric]:
    """The families.

    Args:
        prefix: Before the colon of every name.
        model_name: Label of every series.
        info: Of the engine.
        stats: Its figures; None when it is gone: then there is only engine_up.
        is_up: Whether it answers and makes progress.
    """
    labels = (model_name, "0")

    def gauge(name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{prefix}:{name}", text, labels=LABELS)
        family.add_metric(labels, value)
        return family

    def counter(name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{prefix}:{name}", text, labels=LABELS)
        family.add_metric(labels, value)
        return family

    yield gauge("engine_up", "1 while the engine answers and makes progress.", float(is_up))
    if stats is None:
        return
    yield gauge("num_requests_running", "Sequences in the running batch.", stats.num_running)
    yield gauge("num_requests_waiting", "Sequences that wait for a place in it.", stats.num_waiting)
    # The null page is never used.
    yield gauge("kv_cache_usage_perc", "Share of KV pages in use, from 0 to 1.", stats.num_used_pages / max(1, stats.num_pages - 1))
    yield _cache_config(prefix, labels, info)
    yield counter("generation_tokens", "Tokens generated.", stats.num_generated_tokens)
    yield counter("num_preemptions", "Sequences that gave up their pages to be computed again later.", stats.num_preemptions)
    yield counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.num_cache_queries)
    yield counter("prefix_cache_hits", "Tokens found there.", stats.num_cache_hits)
    yield counter("corrupted_requests", "Sequences that ended because their logits were not finite.", stats.num_corrupted_sequences)
    yield counter("num_compiles", "Compiles after warm-up; each stopped a step for seconds and should not have been.", stats.num_compiles)
    steps = HistogramMetricFamily(f"{prefix}:iteration_tokens_total", "Tokens of a step.", labels=LABELS)
    bounds = [*(str(float(bound)) for bound in STEP_TOKEN_BOUNDS), "+Inf"]
    steps.add_metric(labels, list(zip(bounds, accumulate(stats.step_token_counts), strict=True)), stats.num_step_tokens)
    yield steps


def _cache_config(prefix: str, labels: tuple[str, str], info: EngineInfo) -> Metric:
    """vLLM's labels of the facts that we have too; the null page counts."""
    facts = {
        "block_size": info.page_size,
        "num_gpu_blocks": info.num_pages,
        "cache_dtype": info.dtype,
        "kv_cache_memory_bytes": info.kv_cache_bytes,
    }
    family = GaugeMetricFamily(f"{prefix}:cache_config_info", "What the KV cache is made of.", labels=[*LABELS, *facts])
    family.add_metric([*labels, *map(str, facts.values())], 1)
    return family
