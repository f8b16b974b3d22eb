"""Figures of a whole engine process: what `GetStats` and the heartbeat of EngineLink carry. Plain data; knows no JAX.

Filled by `engine.loop` after each turn; read by the front end's metrics, health and loads, and by the log line of `engine.stats_log`.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histogram of tokens in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One look at the engine; the fields are explained in `link.proto`."""

    has_work: bool = False
    seconds_since_progress: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_used_pages: int = 0
    num_pages: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_cache_queries: int = 0
    num_cache_hits: int = 0
    num_compiles: int = 0
    step_token_counts: tuple[int, ...] = (0,) * (len(STEP_TOKEN_BOUNDS) + 1)
    num_step_tokens: int = 0
    num_corrupted_sequences: int = 0
