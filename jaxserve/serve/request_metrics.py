"""What a front end measures of the requests it serves: latencies, token counts and ends, as Prometheus counters and histograms.

Each front end writes its own file under PROMETHEUS_MULTIPROC_DIR, where the supervisor has set it, and any of them answers for all,
also for one that has died; without it the figures live in this process. `service.generate` calls `CallMetrics` for every event, so
what it does there is little. Knows no engine. Next: `metrics`, which renders them beside the engine's.

A sequence (one of a request's n) counts by itself, as in vLLM; request_params_n, request_max_num_generation_tokens and
num_requests_rejected count requests.
Latencies and sizes are observed of sequences that ended by themselves: one that was aborted or failed is only counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from jaxserve.core.events import TokenEvent
from jaxserve.core.request import Request
from jaxserve.core.sequence import FinishReason
from jaxserve.errors import InvalidRequest, Overloaded
from jaxserve.text.sequence_text import TextDelta

arrival_s: ContextVar[float | None] = ContextVar("arrival_s", default=None)
"""`time.perf_counter()` when the call that this task serves had been read; a door sets it."""

LABELS = ("model_name", "engine")
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
N_BUCKETS = (1, 2, 5, 10, 20)


@dataclass(frozen=True, slots=True)
class EngineSeries:
    """The series of what one engine answered."""

    ends: Mapping[FinishReason, Counter]
    prompt_tokens: Counter
    prompt_tokens_cached: Counter
    rejected: Counter
    ttft: Histogram
    itl: Histogram
    tpot: Histogram
    e2e: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram
    prompt_size: Histogram
    computed_size: Histogram
    output_size: Histogram
    max_output_size: Histogram
    max_tokens: Histogram
    n: Histogram


class RequestMetrics:
    """The metrics of one front end.

    Args:
        prefix: Before the colon of every name.
        model_name: Label of every series.
        max_model_len: Ends the buckets of token counts.
        num_engines: How many there are; each has series of its own.

    Attributes:
        engines: The series, by the engine's number.
    """

    def __init__(self, prefix: str, model_name: str, max_model_len: int, num_engines: int = 1) -> None:
        self._directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        # With a directory its files are what is rendered, those of other processes among them, and never the objects made here.
        self._registry = None if self._directory else CollectorRegistry()

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"{prefix}:{name}", text, LABELS, buckets=buckets, registry=self._registry)

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"{prefix}:{name}", text, LABELS + more, registry=self._registry)

        sizes = one_two_five(max_model_len)
        families: dict[str, Any] = {
            "prompt_tokens": counter("prompt_tokens", "Prompt tokens of sequences that got their first token."),
            "prompt_tokens_cached": counter("prompt_tokens_cached", "Those of them that the prefix cache held."),
        }
        ends = counter("request_success", "Sequences that ended, by finish_reason.", "finished_reason")
        families |= {
            "rejected": counter("num_requests_rejected", "Requests refused as too many sequences waited."),
            "ttft": histogram("time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS),
            "itl": histogram("inter_token_latency_seconds", "Between two events of a sequence.", TOKEN_BUCKETS),
            "tpot": histogram("request_time_per_output_token_seconds", "Mean over a sequence's tokens after its first.", TOKEN_BUCKETS),
            "e2e": histogram("e2e_request_latency_seconds", "From arrival to the end.", REQUEST_BUCKETS),
            "queue": histogram("request_queue_time_seconds", "From the engine's queue to the first step.", REQUEST_BUCKETS),
            "prefill": histogram("request_prefill_time_seconds", "From the first step to the first token.", REQUEST_BUCKETS),
            "decode": histogram("request_decode_time_seconds", "From the first token to the last.", REQUEST_BUCKETS),
            "inference": histogram("request_inference_time_seconds", "From the first step to the last token.", REQUEST_BUCKETS),
            "prompt_size": histogram("request_prompt_tokens", "Prompt tokens of a sequence.", sizes),
            "computed_size": histogram("request_prefill_kv_computed_tokens", "Those not found in the prefix cache.", sizes),
            "output_size": histogram("request_generation_tokens", "Output tokens of a sequence.", sizes),
            "max_output_size": histogram("request_max_num_generation_tokens", "Of a request's longest sequence.", sizes),
            "max_tokens": histogram("request_params_max_tokens", "max_tokens as resolved for the request.", sizes),
            "n": histogram("request_params_n", "Sequences that a request asked for.", N_BUCKETS),
        }
        self.engines = [
            EngineSeries(
                ends={reason: ends.labels(model_name, str(engine), reason.value) for reason in FinishReason},
                **{name: family.labels(model_name, str(engine)) for name, family in families.items()},
            )
            for engine in range(num_engines)
        ]

    @contextmanager
    def call(self) -> Iterator[CallMetrics]:
        """Measures one call from arrival to its end, however it ends."""
        call = CallMetrics(self)
        try:
            yield call
        except BaseException as error:
            call.end_with(error)
            raise

    def collect(self) -> Iterable[Metric]:
        """The families, totals over all front ends that share the directory."""
        if self._registry is not None:
            return self._registry.collect()
        families: Iterable[Metric] = MultiProcessCollector(None, self._directory).collect()
        return families


@dataclass(slots=True)
class _Sequence:
    request: Request
    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    prefill_s: float | None = None
    num_cached_tokens: int = 0


class CallMetrics:
    """Measures one call: `begin` when its requests are known, then `on_event` for each of its events.

    Attributes:
        engine_ids: The engine of each request, by its id; 0 where nothing is said.
    """

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        given = arrival_s.get()
        self._arrived_s = time.perf_counter() if given is None else given
        self._requests: Sequence[Request] = ()
        self.engine_ids: Mapping[str, int] = {}
        self._open: dict[tuple[str, int], _Sequence] = {}
        self._sizes: dict[str, list[int]] = {}
        """Output tokens of each request's ended sequences."""

    def begin(self, requests: Sequence[Request]) -> None:
        """These are about to be sent to the engine."""
        self._requests = requests
        self._open = {(request.request_id, index): _Sequence(request) for request in requests for index in range(request.params.n)}

    def on_event(self, event: TokenEvent, text: TextDelta) -> None:
        """New tokens and/or the end of a sequence."""
        sequence = self._open.get((event.request_id, event.index))
        if sequence is None:
            return
        if text.token_ids:
            now = time.perf_counter()
            if sequence.num_tokens:
                self._series(event.request_id).itl.observe(now - sequence.last_s)
            else:
                sequence.first_s = now
                self._on_first_token(event, sequence)
            sequence.last_s = now
            sequence.num_tokens += len(text.token_ids)
        elif event.embedding is not None:
            self._on_prompt(event, sequence)
        if text.finish_reason is not None:
            del self._open[event.request_id, event.index]
            self._series(event.request_id).ends[text.finish_reason].inc()
            if text.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
                self._on_end(sequence)

    def _on_first_token(self, event: TokenEvent, sequence: _Sequence) -> None:
        self._series(event.request_id).ttft.observe(sequence.first_s - self._arrived_s)
        self._on_prompt(event, sequence)

    def _on_prompt(self, event: TokenEvent, sequence: _Sequence) -> None:
        metrics = self._series(event.request_id)
        metrics.prompt_tokens.inc(event.num_prompt_tokens)
        metrics.prompt_tokens_cached.inc(event.num_cached_tokens)
        sequence.num_cached_tokens = event.num_cached_tokens
        sequence.prefill_s = event.prefill_s
        if event.queue_s is not None:
            metrics.queue.observe(event.queue_s)
        if event.prefill_s is not None:
            metrics.prefill.observe(event.prefill_s)

    def _on_end(self, sequence: _Sequence) -> None:
        request = sequence.request
        metrics = self._series(request.request_id)
        num_prompt_tokens = len(request.prompt_token_ids)
        decode_s = sequence.last_s - sequence.first_s
        metrics.e2e.observe(time.perf_counter() - self._arrived_s)
        if sequence.prefill_s is not None:
            metrics.inference.observe(sequence.prefill_s + decode_s)
        if sequence.num_tokens > 1:
            metrics.tpot.observe(decode_s / (sequence.num_tokens - 1))
        metrics.prompt_size.observe(num_prompt_tokens)
        metrics.computed_size.observe(num_prompt_tokens - sequence.num_cached_tokens)
        if request.pooling is not None:
            return
        metrics.decode.observe(decode_s)
        metrics.output_size.observe(sequence.num_tokens)
        if request.params.max_tokens is not None:
            metrics.max_tokens.observe(request.params.max_tokens)
        sizes = self._sizes.setdefault(request.request_id, [])
        sizes.append(sequence.num_tokens)
        if len(sizes) == request.params.n:
            metrics.n.observe(request.params.n)
            metrics.max_output_size.observe(max(sizes))

    def end_with(self, error: BaseException) -> None:
        """The call ends by an exception, its client's leaving included; one that the engine refused as invalid never was a request."""
        if isinstance(error, Overloaded):
            for request in self._requests:
                self._series(request.request_id).rejected.inc()
        elif not isinstance(error, InvalidRequest):
            reason = FinishReason.ERROR if isinstance(error, Exception) else FinishReason.ABORT
            for request_id, _ in self._open:
                self._series(request_id).ends[reason].inc()

    def _series(self, request_id: str) -> EngineSeries:
        return self._metrics.engines[self.engine_ids.get(request_id, 0)]


def one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 and so on, up to the limit."""
    return tuple(step * 10**power for power in range(len(str(limit))) for step in (1, 2, 5) if step * 10**power <= limit)
