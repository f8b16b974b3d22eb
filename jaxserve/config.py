"""Every setting of the engine and the server, each default written once.

Frozen: a resolved value makes a new object. Knows no JAX. `metadata` of a field carries its help text (and other flag
spellings); flags, environment variables, the configuration file and the docs table are all generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def setting(default: Any, help_text: str, *, aliases: tuple[str, ...] = (), choices: tuple[str, ...] = (), kind: str = "") -> Any:
    """A dataclass field with a default, its help text and, for flags, aliases, choices and a kind ("bytes", "tokens")."""
    return field(default=default, metadata={"help": help_text, "aliases": aliases, "choices": choices, "kind": kind})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. None means: derived from the model and the machine at start-up, and printed."""

    model: str
    """A converted checkpoint, a Hugging Face directory, a GGUF file or a hub id."""
    revision: str | None = setting(None, "Revision of a hub id.")
    dtype: str = setting(
        "auto", "Weights and activations; auto is the checkpoint's on GPU, what a probe finds faster on CPU.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )  # fmt: skip
    device: str = setting("auto", "Where the model runs.", choices=("auto", "cpu", "gpu"))
    max_model_len: int | None = setting(None, "Longest sequence, prompt and output together.", kind="tokens")
    generation_config: str = setting("auto", "Default sampling parameters: the model's own, or vLLM's.", choices=("auto", "vllm"))
    max_logprobs: int = setting(20, "Most log-probabilities a request may ask for; -1 allows the whole vocabulary.")
    enable_prompt_logprobs: bool = setting(False, "Compile the programs that prompt_logprobs needs.")

    page_size: int = setting(16, "Tokens in a KV page, a power of two from 8 to 256.", aliases=("block-size",))
    num_pages: int | None = setting(None, "KV pages, overriding what memory allows.", aliases=("num-gpu-blocks-override",))
    kv_cache_memory_bytes: int | None = setting(None, "Memory for KV pages, such as 4GiB.", kind="bytes")
    gpu_memory_utilization: float = setting(0.92, "Share of a GPU's memory that jaxserve may take.")
    enable_prefix_caching: bool = setting(True, "Reuse pages of equal prompt beginnings.")

    max_num_batched_tokens: int | None = setting(None, "Token budget of one step.", kind="tokens")
    max_num_seqs: int | None = setting(None, "Most sequences running at once.")
    scheduling_policy: str = setting("fcfs", "Order of waiting requests.", choices=("fcfs", "priority"))
    long_prefill_token_threshold: int = setting(0, "Longest prefill chunk of one sequence in a step; 0 is no limit.", kind="tokens")
    max_penalty_slots: int = setting(64, "Sequences that may use penalties, logit_bias or min_tokens at once.")

    attention_backend: str = setting("auto", "Attention implementation.", choices=("auto", "reference", "xla", "cpu_native"))
    compilation_cache_dir: str | None = setting(None, "Persistent compile cache; default under the jaxserve cache directory.")
    num_threads: int | None = setting(None, "CPU threads; default from the CPU quota.")


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What the scheduler must respect; resolved, no None. `runner` limits and host limits meet here.

    A host limit may be smaller than the arrays it governs: a budget of 7 runs in a 16-token bucket, a pool of 20 pages in an
    array of 1,000.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_pages: int
    page_size: int = 16
    num_groups: int = 1
    max_penalty_slots: int = 64
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    rope_original_length: int | None = None
    """For RoPE whose table depends on the length: only pages below it, of sequences admitted at most that long, are cached."""
