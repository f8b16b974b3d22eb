"""The text that start-up prints: stages with their seconds, then one summary. Formats only; knows no engine and no sockets.

The facts about the engine are its `EngineInfo`, the endpoints come from `serve.supervisor`, the origins from
`jaxserve.settings`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from jaxserve.checkpoint_report import size
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.info import EngineInfo, engine_name, smallest


def stage_line(name: str, seconds: float, detail: str = "") -> str:
    """One finished stage of start-up."""
    return f"  {name:<28}{seconds:8.2f} s" + (f"  {detail}" if detail else "")


def summary(infos: Sequence[EngineInfo], endpoints: Mapping[str, str], changes: Iterable[tuple[str, str, str]] = ()) -> str:
    """The summary, one fact a line.

    Args:
        infos: About each engine. All have the same settings, so facts are those of the first, but for a line about each of several, and
            the context, which is that of the one with least room.
        endpoints: Protocol to address, such as {"HTTP": "http://127.0.0.1:8000"}.
        changes: Settings that differ from their defaults: name, value, origin (see `changed_settings`).
    """
    info = infos[0]
    least = smallest(infos)
    concurrency = (least.num_pages - 1) * least.page_size / least.max_model_len
    cached = f", {info.num_cached_programs} of them from the compile cache" if info.num_cached_programs else ""
    rows = [
        ("model", info.model),
        ("dtype", info.dtype),
        ("device", info.device),
        ("attention", f"{info.attention} ({info.attention_reason})"),
        ("KV cache", _kv_cache(info)),
        ("context", f"{least.max_model_len:,} tokens; {concurrency:.1f} such sequences fit at once"),
        ("step", f"at most {info.max_num_seqs:,} sequences and {info.max_num_batched_tokens:,} tokens"),
        ("programs", f"{info.num_programs}{cached}"),
        *((engine_name(i, len(infos)), f"{each.device}, {_kv_cache(each)}") for i, each in enumerate(infos) if len(infos) > 1),
        *endpoints.items(),
        *((name, f"{value} (from {origin})") for name, value, origin in changes),
    ]
    return "\n".join(f"  {name:<28}{value}" for name, value in rows)


def _kv_cache(info: EngineInfo) -> str:
    num_usable_pages = info.num_pages - 1  # the null page holds no tokens
    num_tokens = num_usable_pages * info.page_size
    return f"{num_usable_pages:,} pages x {info.page_size} = {num_tokens:,} tokens, {size(info.kv_cache_bytes)} of {info.kv_cache_dtype}"


def changed_settings(engine: EngineConfig, server: ServerConfig, origins: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Name, value and origin of every setting that is not a default, secrets as ***; the model is left out, it has its own line."""
    values = {**vars(engine), **vars(server)}
    secrets = {spec.name for spec in (*fields(engine), *fields(server)) if spec.metadata.get("is_secret")}
    return [(name, "***" if name in secrets else _text(values[name]), origin) for name, origin in origins.items() if name != "model"]


def curl_line(http_address: str, model: str, *, has_keys: bool = False) -> str:
    """A command that asks the server for a few tokens; `http_address` is such as "http://127.0.0.1:8000", a key is left to be filled in."""
    key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0})
    return f"curl {http_address}/v1/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
