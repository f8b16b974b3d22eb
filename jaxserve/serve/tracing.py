"""One OpenTelemetry span for each call, joined to the caller's trace by its `traceparent` header.

Off unless `--otlp-traces-endpoint` is given; the packages come with the extra `otel` and are imported only then. A span is made when
its call ends, from times that `CallTrace` noted, so nothing of OpenTelemetry runs while tokens flow. Attribute names are those of
the GenAI conventions and vLLM's. HTTP and gRPC leave a call's headers in `caller_headers`; `service.generate` does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.errors import ConfigError

caller_headers: ContextVar[Mapping[str, str]] = ContextVar("caller_headers", default={})  # noqa: B039 - never changed
"""Headers or metadata of the call that this task serves, names in lower case."""


class Tracer:
    """Makes spans and sends them to an OTLP endpoint in the background.

    Args:
        endpoint: Of an OTLP/gRPC collector, such as http://localhost:4317.
        exporter: Instead of an OTLP exporter, for tests.

    Raises:
        ConfigError: The extra `otel` is not installed.
    """

    def __init__(self, endpoint: str, exporter: Any = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint needs OpenTelemetry ({error.name} is missing): install the extra `otel` "
                "(`pip install '.[otel]'` in a clone), or drop the flag."
            ) from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxserve"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("jaxserve")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def trace(self, call: CallTrace) -> Iterator[CallTrace]:
        """Sends the call's span when the block ends, however it does."""
        try:
            yield call
        finally:
            self._send(call)

    def _send(self, call: CallTrace) -> None:
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract(dict(call.headers))
        span = self._tracer.start_span(
            "llm_request", context=parent, kind=SpanKind.SERVER, attributes=call.attributes(), start_time=call.started_ns
        )
        span.end(time.time_ns())

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


class CallTrace:
    """Notes what a call's span will say.

    Attributes:
        headers: The call's `caller_headers`.
        started_ns: `time.time_ns()` at its start.
    """

    def __init__(self, model: str, request_id: str, params: SamplingParams | None, num_prompt_tokens: int) -> None:
        self.headers = caller_headers.get()
        self.started_ns = time.time_ns()
        self._first_token_ns: int | None = None
        self._num_output_tokens = 0
        self._finish_reasons: list[str] = []
        self._attributes = {
            "gen_ai.response.model": model,
            "gen_ai.request.id": request_id,
            "gen_ai.usage.prompt_tokens": num_prompt_tokens,
        }
        for name in ("temperature", "top_p", "max_tokens", "n") if params is not None else ():  # an embedding samples nothing
            self._attributes[f"gen_ai.request.{name}"] = getattr(params, name)

    def on_tokens(self, count: int, finish_reason: str | None) -> None:
        """New output tokens of any of the call's sequences, and its end if this was it."""
        if count and self._first_token_ns is None:
            self._first_token_ns = time.time_ns()
        self._num_output_tokens += count
        if finish_reason is not None:
            self._finish_reasons.append(finish_reason)

    def attributes(self) -> dict[str, Any]:
        """The span's attributes; times in seconds."""
        attributes: dict[str, Any] = {name: value for name, value in self._attributes.items() if value is not None}
        attributes["gen_ai.usage.completion_tokens"] = self._num_output_tokens
        attributes["gen_ai.latency.e2e"] = (time.time_ns() - self.started_ns) / 1e9
        if self._first_token_ns is not None:
            attributes["gen_ai.latency.time_to_first_token"] = (self._first_token_ns - self.started_ns) / 1e9
        # A call that its client left has sequences without one.
        attributes["gen_ai.response.finish_reasons"] = tuple(self._finish_reasons)
        return attributes
