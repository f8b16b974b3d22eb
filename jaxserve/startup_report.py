"""The text that start-up prints: stages with their seconds, then one summary. Formats only; knows no engine and no sockets.

The engine's part of the facts comes from `engine.build`, the endpoints from `serve.supervisor`, the origins from
`jaxserve.settings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxserve.config import EngineConfig, ServerConfig


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What an engine says of itself once it is built.

    Attributes:
        attention_reason: Why this attention implementation was chosen.
        num_usable_pages: Pages that can hold tokens (the null page is not one).
        kv_cache_bytes: Memory of all page arrays together.
        num_programs: Compiled programs, `num_cached_programs` of them from the persistent cache.
    """

    model: str
    dtype: str
    device: str
    attention: str
    attention_reason: str
    num_usable_pages: int
    page_size: int
    kv_cache_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_programs: int
    num_cached_programs: int = 0


def stage_line(name: str, seconds: float, detail: str = "") -> str:
    """One finished stage of start-up."""
    return f"  {name:<28}{seconds:8.2f} s" + (f"  {detail}" if detail else "")


def summary(facts: EngineFacts, endpoints: Mapping[str, str], changes: Iterable[tuple[str, str, str]] = ()) -> str:
    """The summary, one fact a line.

    Args:
        facts: About the engine.
        endpoints: Protocol to address, such as {"HTTP": "http://127.0.0.1:8000"}.
        changes: Settings that differ from their defaults: name, value, origin (see `changed_settings`).
    """
    num_tokens = facts.num_usable_pages * facts.page_size
    concurrency = num_tokens / facts.max_model_len
    cached = f", {facts.num_cached_programs} of them from the compile cache" if facts.num_cached_programs else ""
    rows = [
        ("model", facts.model),
        ("dtype", facts.dtype),
        ("device", facts.device),
        ("attention", f"{facts.attention} ({facts.attention_reason})"),
        (
            "KV cache",
            f"{facts.num_usable_pages:,} pages x {facts.page_size} = {num_tokens:,} tokens, {format_bytes(facts.kv_cache_bytes)}",
        ),
        ("context", f"{facts.max_model_len:,} tokens; {concurrency:.1f} such sequences fit at once"),
        ("step", f"at most {facts.max_num_seqs:,} sequences and {facts.max_num_batched_tokens:,} tokens"),
        ("programs", f"{facts.num_programs}{cached}"),
        *endpoints.items(),
        *((name, f"{value} (from {origin})") for name, value, origin in changes),
    ]
    return "\n".join(f"  {name:<28}{value}" for name, value in rows)


def changed_settings(engine: EngineConfig, server: ServerConfig, origins: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Name, value and origin of every setting that is not a default; the model is left out, it has its own line."""
    values = {**vars(engine), **vars(server)}
    return [(name, _text(values[name]), origin) for name, origin in origins.items() if name != "model"]


def format_bytes(size: int) -> str:
    """A size in binary units: 1.50 GiB."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{size} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
