"""`GET /metrics`: what the engine reports when it is asked, and what the front ends have measured, in Prometheus' text format.

Names and buckets are vLLM's, so that its dashboards work with `--metrics-prefix vllm`. Left out is what this engine does not have
(speculative decoding, LoRA, multimodal and external caches, sleeping, KV offload, tool parsers) and what would say nothing new:
num_requests_waiting_by_reason (every waiting sequence waits for capacity) and prompt_tokens_by_source (prompt_tokens and
prompt_tokens_cached say it). Added are engine_up, num_compiles and num_requests_rejected. A server without HTTP has no /metrics.
Next: `engine_metrics`, `request_metrics`; `http` mounts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Protocol

from prometheus_client import disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxserve.engine.info import EngineInfo
from jaxserve.engine.stats import EngineStats
from jaxserve.errors import EngineUnavailable
from jaxserve.serve.engine_metrics import engine_families
from jaxserve.serve.request_metrics import CallMetrics, RequestMetrics

STATS_TIMEOUT_S = 1.0


class StatsSource(Protocol):
    """The part of `engine.link_client.EngineClient` that is asked."""

    @property
    def info(self) -> EngineInfo:
        """The engine's facts; raises EngineUnavailable before they are known."""

    @property
    def is_healthy(self) -> bool:
        """Whether the engine answers and makes progress."""

    async def stats(self) -> EngineStats:
        """Its figures now; raises EngineUnavailable."""


class Metrics:
    """The metrics of one front end.

    Args:
        prefix: Before the colon of every name.
        client: Connected to the engine, or about to be.
        model_name: Label of every series; default is the engine's model.
    """

    def __init__(self, prefix: str, client: StatsSource, model_name: str | None = None) -> None:
        disable_created_metrics()
        self._prefix = prefix
        self._client = client
        self._model_name = model_name

    def call(self) -> AbstractContextManager[CallMetrics]:
        """Measures one call; raises EngineUnavailable while the engine has never been there."""
        return self._requests.call()

    async def render(self) -> tuple[bytes, str]:
        """The answer to a scrape and its content type; empty before the engine first came up, and without its figures while it is gone."""
        try:
            info = self._client.info
        except EngineUnavailable:
            return b"", CONTENT_TYPE_PLAIN_0_0_4
        try:
            stats: EngineStats | None = await asyncio.wait_for(self._client.stats(), STATS_TIMEOUT_S)
        except (EngineUnavailable, TimeoutError):
            stats = None
        return generate_latest(_Families(self._families(info, stats))), CONTENT_TYPE_PLAIN_0_0_4

    def _families(self, info: EngineInfo, stats: EngineStats | None) -> Iterator[Metric]:
        is_up = stats is not None and self._client.is_healthy
        yield from engine_families(self._prefix, self._model_name or info.model, info, stats, is_up=is_up)
        yield from self._requests.collect()

    @cached_property
    def _requests(self) -> RequestMetrics:
        info = self._client.info
        return RequestMetrics(self._prefix, self._model_name or info.model, info.max_model_len)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
