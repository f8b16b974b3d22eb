"""Spans of calls over both doors, read from an in-memory exporter; the parent is the client's own trace."""

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jaxserve.serve import server as server_module
from jaxserve.serve.tracing import Tracer

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture
def spans(monkeypatch):
    exporter = InMemorySpanExporter()
    tracer = Tracer("unused", exporter)
    original = server_module.Service
    monkeypatch.setattr(server_module, "Service", lambda client, config, _: original(client, config, tracer))

    def finished():
        tracer._provider.force_flush()
        return exporter.get_finished_spans()

    yield finished
    tracer.close()


def check(span, num_prompt, num_output, reasons):
    assert span.name == "llm_request"
    assert f"{span.parent.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.attributes["gen_ai.usage.prompt_tokens"] == num_prompt
    assert span.attributes["gen_ai.usage.completion_tokens"] == num_output
    assert span.attributes["gen_ai.response.finish_reasons"] == reasons
    assert 0 < span.attributes["gen_ai.latency.time_to_first_token"] <= span.attributes["gen_ai.latency.e2e"]


@pytest.mark.parametrize("is_streaming", [True, False])
def test_http(spans, fresh_server, is_streaming):
    with fresh_server.client() as client:
        answer = client.completions.create(
            model="counting", prompt=[5, 6, 7], max_tokens=4, temperature=0, stream=is_streaming, extra_headers={"traceparent": TRACEPARENT}
        )  # fmt: skip
        if is_streaming:
            list(answer)
        fresh_server.wait_until_idle()
        (span,) = spans()
        check(span, 3, 4, ("length",))
        assert span.attributes["gen_ai.request.max_tokens"] == 4


def test_grpc(spans, fresh_server):
    with fresh_server.channel() as channel:
        request = pb.GenerateRequest(request_id="a", tokenized=pb.TokenizedInput(input_ids=[5, 6]))
        request.sampling_params.max_tokens = 3
        request.sampling_params.n = 2
        request.sampling_params.temperature = 1
        request.sampling_params.ignore_eos = True
        list(fresh_server.stub(channel).Generate(request, metadata=(("traceparent", TRACEPARENT),)))
        (span,) = spans()
        check(span, 2, 6, ("length", "length"))


def test_a_call_without_a_parent_starts_a_trace(spans, fresh_server):
    with fresh_server.client() as client:
        client.completions.create(model="counting", prompt=[5], max_tokens=1, temperature=0)
        (span,) = spans()
        assert span.parent is None
