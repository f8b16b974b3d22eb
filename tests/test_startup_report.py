"""The start-up summary, compared with a text written by hand."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.info import EngineInfo
from jaxserve.startup_report import changed_settings, curl_line, stage_line, summary


def test_summary() -> None:
    info = EngineInfo(
        model="llama, 30 layers",
        dtype="float32",
        device="cpu, 2 threads",
        attention="xla",
        attention_reason="no compiler for cpu_native",
        model_path="",
        model_type="llama",
        vocab_size=320,
        eos_token_ids=(1,),
        num_pages=101,
        page_size=16,
        kv_cache_dtype="int8",
        kv_cache_bytes=3 * 2**29,
        max_model_len=640,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        num_programs=9,
        num_cached_programs=4,
    )
    engine, server = EngineConfig(model="m", max_num_seqs=8), ServerConfig(served_model_name=("a", "b"))
    changes = changed_settings(engine, server, {"model": "--model", "max_num_seqs": "JAXSERVE_MAX_NUM_SEQS", "served_model_name": "c.yaml"})
    lines = [line.split(maxsplit=1) for line in summary([info], {"HTTP": "http://127.0.0.1:8000"}, changes).splitlines()]
    assert lines == [
        ["model", "llama, 30 layers"],
        ["dtype", "float32"],
        ["device", "cpu, 2 threads"],
        ["attention", "xla (no compiler for cpu_native)"],
        ["KV", "cache                    100 pages x 16 = 1,600 tokens, 1.5 GiB of int8"],
        ["context", "640 tokens; 2.5 such sequences fit at once"],
        ["step", "at most 8 sequences and 1,024 tokens"],
        ["programs", "9, 4 of them from the compile cache"],
        ["HTTP", "http://127.0.0.1:8000"],
        ["max_num_seqs", "8 (from JAXSERVE_MAX_NUM_SEQS)"],
        ["served_model_name", "a, b (from c.yaml)"],
    ]
    fewer = replace(info, device="cpu, 1 threads", num_pages=51, kv_cache_bytes=3 * 2**28)
    rest = summary([info, fewer], {"HTTP": "http://127.0.0.1:8000"}).splitlines()[8:]
    assert [line.split(maxsplit=2) for line in rest] == [
        ["engine", "0", "cpu, 2 threads, 100 pages x 16 = 1,600 tokens, 1.5 GiB of int8"],
        ["engine", "1", "cpu, 1 threads, 50 pages x 16 = 800 tokens, 768.0 MiB of int8"],
        ["HTTP", "http://127.0.0.1:8000"],
    ]
    narrow = replace(fewer, max_model_len=80)
    for infos in ([info, narrow], [narrow, info]):
        assert "context                     80 tokens; 10.0 such sequences fit at once" in summary(infos, {})


def test_lines_and_sizes() -> None:
    assert stage_line("compile", 12.345, "9 programs").split() == ["compile", "12.35", "s", "9", "programs"]


def test_the_curl_line_survives_a_shell() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", 'it\'s "mine"'))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/completions"]
    assert json.loads(words[-1])["model"] == 'it\'s "mine"'
    assert "Authorization: Bearer KEY" in shlex.split(curl_line("http://127.0.0.1:8000", "m", has_keys=True))


def test_keys_are_never_printed() -> None:
    server = ServerConfig(api_key=("sk-one", "sk-two"), port=1234)
    changes = changed_settings(EngineConfig(model="m"), server, {"api_key": "JAXSERVE_API_KEY", "port": "--port"})
    assert changes == [("api_key", "***", "JAXSERVE_API_KEY"), ("port", "1234", "--port")]
