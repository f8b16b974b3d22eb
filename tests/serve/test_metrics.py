"""The metrics: names, figures by hand, and totals of several front ends, one of them dead."""

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jaxserve.config import ServerConfig
from jaxserve.core.events import TokenEvent
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.stats import STEP_TOKEN_BOUNDS, EngineStats
from jaxserve.errors import ConfigError, EngineUnavailable, InvalidRequest, Overloaded
from jaxserve.serve.metrics import Metrics
from jaxserve.serve.request_metrics import arrival_s, one_two_five
from jaxserve.text.sequence_text import TextDelta

ROOT = Path(__file__).parents[2]
INFO = EngineInfo(
    model_path="/model", model="counting", model_type="llama", dtype="bfloat16", max_model_len=256, vocab_size=320, eos_token_ids=(1,),
    num_pages=129, page_size=16, max_num_seqs=8, max_num_batched_tokens=64, kv_cache_bytes=1024, kv_cache_dtype="fp8",
)  # fmt: skip
IDLE = EngineStats(num_pages=129)
ENGINE_NAMES = {
    "engine_up": "gauge",
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "generation_tokens": "counter",
    "num_preemptions": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "corrupted_requests": "counter",
    "num_compiles": "counter",
    "iteration_tokens_total": "histogram",
}
REQUEST_NAMES = {
    "prompt_tokens": "counter",
    "prompt_tokens_cached": "counter",
    "request_success": "counter",
    "num_requests_rejected": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_prefill_kv_computed_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "request_params_max_tokens": "histogram",
    "request_params_n": "histogram",
}


class Client:
    """An engine that says of itself what it is told to; None: it is gone."""

    def __init__(self, stats: EngineStats | None = IDLE, info: EngineInfo | None = INFO) -> None:
        self.given = stats
        self.given_info = info

    @property
    def info(self) -> EngineInfo:
        if self.given_info is None:
            raise EngineUnavailable("loading")
        return self.given_info

    @property
    def is_healthy(self) -> bool:
        return self.given is not None

    async def stats(self) -> EngineStats:
        if self.given is None:
            raise EngineUnavailable("gone")
        return self.given


def scrape(metrics: Metrics) -> bytes:
    return asyncio.run(metrics.render())[0]


class Scraped:
    """Samples of an answer, by name and by the labels that are not on every series."""

    def __init__(self, text: bytes, prefix: str = "jaxserve:") -> None:
        self.prefix = prefix
        self.families = {family.name: family for family in text_string_to_metric_families(text.decode())}

    def types(self) -> dict[str, str]:
        return {name: family.type for name, family in self.families.items()}

    def value(self, name: str, suffix: str = "", **labels: str) -> float:
        samples = [
            sample
            for sample in self.families[self.prefix + name].samples
            if sample.name == self.prefix + name + suffix and labels.items() <= sample.labels.items()
        ]
        [sample] = samples
        assert (sample.labels["model_name"], sample.labels["engine"]) == ("counting", "0")
        return sample.value

    def total(self, name: str, **labels: str) -> float:
        return self.value(name, "_total", **labels)

    def observed(self, name: str) -> tuple[float, float]:
        """How many, and their sum."""
        return self.value(name, "_count"), self.value(name, "_sum")


def event(token_ids: list[int], end: FinishReason | None = None, *, index: int = 0, request_id: str = "a", cached: int = 0, **more: float):
    """An event and the text of it."""
    event = TokenEvent(
        request_id=request_id, index=index, token_ids=token_ids, num_prompt_tokens=20, num_cached_tokens=cached, finish_reason=end, **more
    )
    return event, TextDelta(token_ids=token_ids, finish_reason=end)


def request(request_id: str = "a", n: int = 1, max_tokens: int | None = 7) -> Request:
    return Request(
        request_id=request_id, prompt_token_ids=tuple(range(20)), params=SamplingParams(n=n, max_tokens=max_tokens), arrival_time_s=0.0
    )


def broken_off(metrics: Metrics, error: BaseException, requests: list[Request], *events: tuple[TokenEvent, TextDelta]) -> None:
    """A call that ends with the error after these events."""

    def call() -> None:
        with metrics.call() as call:
            if requests:
                call.begin(requests)
            for event in events:
                call.on_event(*event)
            raise error

    with pytest.raises(type(error)):
        call()


@pytest.mark.parametrize("prefix", ["jaxserve", "vllm"])
def test_the_names_are_vllms_under_the_prefix(prefix):
    expected = {f"{prefix}:{name}": kind for name, kind in (ENGINE_NAMES | REQUEST_NAMES).items()}
    assert Scraped(scrape(Metrics(prefix, [Client()]))).types() == expected


def test_the_engines_figures():
    stats = EngineStats(
        has_work=True, num_running=3, num_waiting=5, num_used_pages=32, num_pages=129, num_steps=4, num_prompt_tokens=70,
        num_generated_tokens=41, num_preemptions=2, num_cache_queries=70, num_cache_hits=16, num_compiles=1,
        step_token_counts=(1, 2, 0, 0, 0, 1, *[0] * (len(STEP_TOKEN_BOUNDS) - 5)), num_step_tokens=111, num_corrupted_sequences=6,
    )  # fmt: skip
    scraped = Scraped(scrape(Metrics("jaxserve", [Client(stats)])))
    assert scraped.value("engine_up") == 1
    assert (scraped.value("num_requests_running"), scraped.value("num_requests_waiting")) == (3, 5)
    assert scraped.value("kv_cache_usage_perc") == 32 / 128
    totals = {"generation_tokens": 41, "num_preemptions": 2, "prefix_cache_queries": 70, "prefix_cache_hits": 16}
    assert {name: scraped.total(name) for name in totals} == totals
    assert (scraped.total("corrupted_requests"), scraped.total("num_compiles")) == (6, 1)
    assert scraped.observed("iteration_tokens_total") == (4, 111)
    assert [scraped.value("iteration_tokens_total", "_bucket", le=le) for le in ("1.0", "8.0", "64.0", "128.0", "+Inf")] == [1, 3, 3, 4, 4]
    assert scraped.value("cache_config_info", block_size="16", num_gpu_blocks="129", cache_dtype="fp8") == 1


def test_without_an_engine_the_requests_so_far_are_told():
    client = Client()
    metrics = Metrics("jaxserve", [client])
    with metrics.call() as call:
        call.begin([request()])
        call.on_event(*event([5], FinishReason.LENGTH))
    client.given = None
    scraped = Scraped(scrape(metrics))
    assert scraped.value("engine_up") == 0
    assert scraped.types() == {f"jaxserve:{name}": kind for name, kind in ({"engine_up": "gauge"} | REQUEST_NAMES).items()}
    assert scraped.total("request_success", finished_reason="length") == 1
    assert scrape(Metrics("jaxserve", [Client(None, None)])) == b""


def test_a_request_with_two_sequences(monkeypatch):
    times = iter([103.0, 103.5, 104.0, 104.0, 106.0, 107.0])
    monkeypatch.setattr("jaxserve.serve.request_metrics.time", SimpleNamespace(perf_counter=lambda: next(times)))
    arrival_s.set(100.0)
    metrics = Metrics("jaxserve", [Client()])
    with metrics.call() as call:
        call.begin([request(n=2)])
        call.on_event(*event([5], queue_s=0.5, prefill_s=1.5, cached=16))  # at 103
        call.on_event(*event([6], index=1, queue_s=0.5, prefill_s=2.0, cached=16))  # at 103.5
        call.on_event(*event([7], FinishReason.STOP))  # at 104
        call.on_event(*event([7, 8], FinishReason.LENGTH, index=1))  # at 106, two tokens at once
    arrival_s.set(None)
    scraped = Scraped(scrape(metrics))
    assert scraped.total("prompt_tokens") == 40
    assert scraped.total("prompt_tokens_cached") == 32
    assert scraped.total("request_success", finished_reason="stop") == scraped.total("request_success", finished_reason="length") == 1
    observed = {
        "time_to_first_token_seconds": (2, 3.0 + 3.5),
        "inter_token_latency_seconds": (2, 1.0 + 2.5),
        "request_time_per_output_token_seconds": (2, 1.0 + 2.5 / 2),
        "e2e_request_latency_seconds": (2, 4.0 + 7.0),
        "request_queue_time_seconds": (2, 1.0),
        "request_prefill_time_seconds": (2, 3.5),
        "request_decode_time_seconds": (2, 1.0 + 2.5),
        "request_inference_time_seconds": (2, 2.5 + 4.5),
        "request_prompt_tokens": (2, 40),
        "request_prefill_kv_computed_tokens": (2, 8),
        "request_generation_tokens": (2, 5),
        "request_max_num_generation_tokens": (1, 3),
        "request_params_max_tokens": (2, 14),
        "request_params_n": (1, 2),
    }
    assert {name: scraped.observed(name) for name in observed} == observed
    assert scraped.value("time_to_first_token_seconds", "_bucket", le="2.5") == 0
    assert scraped.value("time_to_first_token_seconds", "_bucket", le="5.0") == 2


@pytest.mark.parametrize(("error", "num_rejected"), [(InvalidRequest("x"), 0), (Overloaded("x"), 2)])
def test_a_refused_call_is_no_request_that_ran(error, num_rejected):
    metrics = Metrics("jaxserve", [Client()])
    broken_off(metrics, error, [])
    broken_off(metrics, error, [request("a"), request("b")])
    scraped = Scraped(scrape(metrics))
    assert scraped.total("num_requests_rejected") == num_rejected
    assert sum(scraped.total("request_success", finished_reason=reason.value) for reason in FinishReason) == 0


@pytest.mark.parametrize(
    ("error", "reason"), [(EngineUnavailable("x"), "error"), (GeneratorExit(), "abort"), (asyncio.CancelledError(), "abort")]
)
def test_what_is_open_when_a_call_breaks_off_is_counted_by_its_reason(error, reason):
    metrics = Metrics("jaxserve", [Client()])
    broken_off(metrics, error, [request(n=3)], event([5], FinishReason.LENGTH), event([5], index=1))
    scraped = Scraped(scrape(metrics))
    assert scraped.total("request_success", finished_reason=reason) == 2
    assert scraped.total("request_success", finished_reason="length") == 1
    assert scraped.observed("e2e_request_latency_seconds")[0] == 1
    assert scraped.observed("request_params_n")[0] == 0
    assert scraped.total("num_requests_rejected") == 0


def test_buckets_of_sizes_end_with_the_context():
    assert one_two_five(256) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert one_two_five(1000)[-2:] == (500, 1000)


@pytest.mark.parametrize("prefix", ["", "a:b", "9x", "a b", "a-b"])
def test_a_prefix_that_is_no_name_is_refused(prefix):
    with pytest.raises(ConfigError, match="metrics_prefix"):
        ServerConfig(metrics_prefix=prefix)


FRONT_END = """
import asyncio, os, signal, sys
from types import SimpleNamespace
from jaxserve.core.events import TokenEvent
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason
from jaxserve.engine.stats import EngineStats
from jaxserve.serve.metrics import Metrics
from jaxserve.text.sequence_text import TextDelta

async def stats():
    return EngineStats(num_pages=129)

num_requests, then = sys.argv[1:]
info = SimpleNamespace(model="counting", max_model_len=256, page_size=16, num_pages=129, kv_cache_bytes=1, kv_cache_dtype="fp8")
metrics = Metrics("jaxserve", [SimpleNamespace(info=info, is_healthy=True, stats=stats)])
for _ in range(int(num_requests)):
    with metrics.call() as call:
        call.begin([Request(request_id="a", prompt_token_ids=tuple(range(20)), params=SamplingParams())])
        for finish in (None, FinishReason.LENGTH):
            event = TokenEvent(request_id="a", index=0, token_ids=[5], num_prompt_tokens=20, num_cached_tokens=0, finish_reason=finish)
            call.on_event(event, TextDelta(token_ids=[5], finish_reason=finish))
if then == "die":
    os.kill(os.getpid(), signal.SIGKILL)
print(asyncio.run(metrics.render())[0].decode())
"""


def test_any_front_end_answers_for_all_also_for_one_that_was_killed(tmp_path):
    def front_end(num_requests: int, then: str = "render") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        command = [sys.executable, "-c", FRONT_END, str(num_requests), then]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=then == "render")

    assert front_end(3, "die").returncode == -signal.SIGKILL
    for num_requests, total in ((2, 5), (0, 5)):
        scraped = Scraped(front_end(num_requests).stdout.encode())
        assert scraped.types() == {f"jaxserve:{name}": kind for name, kind in (ENGINE_NAMES | REQUEST_NAMES).items()}
        assert scraped.total("request_success", finished_reason="length") == total
        assert scraped.total("prompt_tokens") == 20 * total
        assert scraped.observed("request_generation_tokens") == (total, 2 * total)
        assert scraped.value("request_generation_tokens", "_bucket", le="1.0") == 0
        assert scraped.value("request_generation_tokens", "_bucket", le="2.0") == total


def test_a_servers_totals_are_those_of_its_requests(start_server):
    with start_server(ServerConfig(metrics_prefix="vllm")) as server:
        prompt = list(range(100, 133))  # two full pages of 16 and a token
        with server.client() as client:
            for _ in range(3):
                client.completions.create(model="counting", prompt=prompt, max_tokens=5, temperature=0, extra_body={"ignore_eos": True})
            twins = {"prompt": [7, 8], "max_tokens": 4, "n": 2, "seed": 1, "temperature": 1}
            list(client.completions.create(model="counting", stream=True, extra_body={"ignore_eos": True}, **twins))
        with server.channel() as channel:
            params = pb.SamplingParams(max_tokens=6, ignore_eos=True)
            list(
                server.stub(channel).Generate(pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[9, 9, 9]), sampling_params=params))
            )
        server.wait_until_idle()
        with urllib.request.urlopen(f"{server.http}/metrics", timeout=30) as answer:
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            scraped = Scraped(answer.read(), "vllm:")
    assert scraped.total("prompt_tokens") == 3 * 33 + 2 * 2 + 3
    assert scraped.total("prompt_tokens_cached") == 2 * 32
    assert scraped.total("generation_tokens") == 3 * 5 + 2 * 4 + 6
    assert scraped.total("prefix_cache_hits") == 2 * 32
    assert scraped.total("request_success", finished_reason="length") == 3 + 2 + 1
    assert (scraped.value("num_requests_running"), scraped.value("num_requests_waiting"), scraped.value("engine_up")) == (0, 0, 1)
    counts = {
        "request_params_n": (5, 3 * 1 + 2 + 1),
        "request_generation_tokens": (6, 29),
        "request_max_num_generation_tokens": (5, 3 * 5 + 4 + 6),
        "request_prompt_tokens": (6, 106),
        "request_params_max_tokens": (6, 3 * 5 + 2 * 4 + 6),
    }
    assert {name: scraped.observed(name) for name in counts} == counts
    seconds = ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds")
    assert [scraped.observed(name)[0] for name in seconds] == [6, 6, 6, 6]
    assert scraped.observed("inter_token_latency_seconds")[0] <= 29 - 6
