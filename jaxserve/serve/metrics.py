"""`GET /metrics`: what the engines report when they are asked, and what the front ends have measured, in Prometheus' text format.

Names and buckets are vLLM's, so that its dashboards work with `--metrics-prefix vllm`. Left out is what this engine does not have
(speculative decoding, LoRA, multimodal and external caches, sleeping, KV offload, tool parsers) and what would say nothing new:
num_requests_waiting_by_reason (every waiting sequence waits for capacity) and prompt_tokens_by_source (prompt_tokens and
prompt_tokens_cached say it). Added are engine_up, num_compiles and num_requests_rejected. A server without HTTP has no /metrics.
Next: `engine_metrics`, `request_metrics`; `http` mounts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import Protocol

from prometheus_client import disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxserve.engine.info import EngineInfo
from jaxserve.engine.stats import EngineStats
from jaxserve.errors import EngineUnavailable
from jaxserve.serve.engine_metrics import EngineReport, engine_families
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
        engines: Connected to the engines, or about to be; the place of each is its label `engine`.
        model_name: Label of every series; default is the engines' model.
    """

    def __init__(self, prefix: str, engines: Sequence[StatsSource], model_name: str | None = None) -> None:
        disable_created_metrics()
        self._prefix = prefix
        self._engines = engines
        self._model_name = model_name

    def call(self) -> AbstractContextManager[CallMetrics]:
        """Measures one call; raises EngineUnavailable while no engine has ever been there."""
        return self._requests.call()

    async def render(self) -> tuple[bytes, str]:
        """The answer to a scrape and its content type; empty before an engine first came up, and without the figures of those gone."""
        stats = await asyncio.gather(*map(_ask, self._engines))
        try:
            families = [*self._engine_families(stats), *self._requests.collect()]
        except EngineUnavailable:
            return b"", CONTENT_TYPE_PLAIN_0_0_4
        return generate_latest(_Families(families)), CONTENT_TYPE_PLAIN_0_0_4

    def _engine_families(self, stats: Sequence[EngineStats | None]) -> Iterator[Metric]:
        reports = [
            EngineReport(None if now is None else engine.info, now, is_up=now is not None and engine.is_healthy)
            for engine, now in zip(self._engines, stats, strict=True)
        ]
        return engine_families(self._prefix, self._label, reports)

    @cached_property
    def _label(self) -> str:
        return self._model_name or self._any_info.model

    @property
    def _any_info(self) -> EngineInfo:
        """Of any engine; raises EngineUnavailable before the first has come up."""
        for engine in self._engines[1:]:
            with suppress(EngineUnavailable):
                return engine.info
        return self._engines[0].info

    @cached_property
    def _requests(self) -> RequestMetrics:
        return RequestMetrics(self._prefix, self._label, self._any_info.max_model_len, len(self._engines))


async def _ask(engine: StatsSource) -> EngineStats | None:
    """Its figures; None where it does not answer in time."""
    try:
        return await asyncio.wait_for(engine.stats(), STATS_TIMEOUT_S)
    except (EngineUnavailable, TimeoutError):
        return None


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
