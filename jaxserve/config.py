"""Every setting of the engine and the server, each default written once.

Frozen: a resolved value makes a new object. Knows no JAX. `metadata` of a field carries its help text (and other flag
spellings); flags, environment variables and the configuration file are all generated from it by `jaxserve.settings`.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError

POOLINGS = ("last", "mean")


def setting(
    default: Any,
    help_text: str,
    *,
    group: str = "model",
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    kind: str = "",
    low: float | None = None,
    high: float | None = None,
    is_secret: bool = False,
) -> Any:
    """A dataclass field with a default, its help text, the allowed range and, for flags, group, aliases, choices and a kind.

    The kind says how text is read: "bytes" (`4GiB`), "count" (`32k`) or "" (by the type alone). A secret is never printed.
    """
    metadata = {"help": help_text, "group": group, "aliases": aliases, "choices": choices, "kind": kind, "low": low, "high": high}
    return field(default=default, repr=not is_secret, metadata=metadata | {"is_secret": is_secret})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. None means: derived from the model and the machine at start-up, and printed."""

    model: str
    """A converted checkpoint, a Hugging Face directory, a GGUF file or a hub id."""
    revision: str | None = setting(None, "Revision of a hub id.")
    dtype: str = setting(
        "auto",
        "Weights and activations; auto is the checkpoint's on GPU, what a probe finds faster on CPU.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    device: str = setting("auto", "Where the model runs.", choices=("auto", "cpu", "gpu"))
    max_model_len: int | None = setting(None, "Longest sequence, prompt and output together.", kind="count", low=1)
    generation_config: str = setting("auto", "Default sampling parameters: the model's own, or vLLM's.", choices=("auto", "vllm"))
    max_logprobs: int = setting(20, "Most log-probabilities a request may ask for; -1 allows the whole vocabulary.", low=-1)
    enable_prompt_logprobs: bool = setting(False, "Compile the programs that prompt_logprobs needs.")
    enable_embeddings: bool = setting(False, "Compile the programs that embeddings need.")
    pooling: str = setting("last", "How embeddings are pooled where a request does not say.", choices=POOLINGS)

    page_size: int = setting(
        16, "Tokens in a KV page, a power of two from 8 to 256.", group="cache", aliases=("block_size",), low=8, high=256
    )
    num_pages: int | None = setting(
        None, "KV pages, overriding what memory allows.", group="cache", aliases=("num_gpu_blocks_override",), low=2
    )
    kv_cache_memory_bytes: int | None = setting(None, "Memory for KV pages of a device, such as 4GiB.", group="cache", kind="bytes", low=1)
    gpu_memory_utilization: float = setting(0.92, "Share of a GPU's memory that jaxserve may take.", group="cache", low=0.01, high=1.0)
    kv_cache_dtype: str = setting(
        "auto",
        "Of keys and values in pages; auto is that of the activations. int8 and fp8 (e4m3) have a scale for each token and head.",
        group="cache",
        choices=("auto", "bfloat16", "float16", "float32", "int8", "fp8", "fp8_e4m3"),
    )
    enable_prefix_caching: bool = setting(True, "Reuse pages of equal prompt beginnings.", group="cache")

    max_num_batched_tokens: int | None = setting(None, "Token budget of one step.", group="scheduler", kind="count", low=1)
    max_num_seqs: int | None = setting(None, "Most sequences running at once.", group="scheduler", kind="count", low=1)
    scheduling_policy: str = setting("fcfs", "Order of waiting requests.", group="scheduler", choices=("fcfs", "priority"))
    long_prefill_token_threshold: int = setting(
        0, "Longest prefill chunk of one sequence in a step; 0 is no limit.", group="scheduler", kind="count", low=0
    )
    max_penalty_slots: int = setting(64, "Sequences that may use penalties, logit_bias or min_tokens at once.", group="scheduler", low=0)

    async_scheduling: bool = setting(True, "Schedule and prepare a step while the one before it runs on the device.", group="execution")
    attention_backend: str = setting(
        "auto",
        "Implementation of attention and of the products with weights; auto is the best that the device and the model allow.",
        group="execution",
        choices=("auto", "cpu_native", "mosaic_gpu", "triton", "xla", "reference"),
    )
    tensor_parallel_size: int = setting(
        1, "Devices that share the model: each computes its part of the heads, MLPs and vocabulary.", group="execution", low=1, high=256
    )
    enable_expert_parallel: bool = setting(
        False, "Deal out whole experts to those devices, in place of a part of each expert.", group="execution"
    )
    compilation_cache_dir: str | None = setting(
        None, "Persistent compile cache; default under the jaxserve cache directory.", group="execution"
    )
    num_threads: int | None = setting(None, "CPU threads; default from the CPU quota.", group="execution", low=1)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size is {self.page_size}; it must be a power of two from 8 to 256.")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the front end: where it listens and under which names it serves the model."""

    host: str = setting("127.0.0.1", "Address that HTTP and gRPC listen on.", group="server")
    port: int = setting(8000, "HTTP port; 0 picks a free one.", group="server", low=0, high=65535)
    grpc_port: int = setting(50051, "gRPC port; 0 picks a free one.", group="server", low=0, high=65535)
    http_only: bool = setting(False, "Serve no gRPC.", group="server")
    grpc_only: bool = setting(False, "Serve no HTTP, and so no /metrics.", group="server")
    served_model_name: tuple[str, ...] = setting((), "Names that clients may use; default is MODEL as given.", group="server")
    chat_template: str | None = setting(
        None, "Jinja chat template in place of the model's own: a file, or the template itself.", group="server"
    )
    api_server_count: int | None = setting(
        None, "Front-end processes that share the ports; default 2 from four CPU cores on, else 1.", group="server", low=1, high=64
    )
    data_parallel_size: int = setting(
        1,
        "Engines, each with the whole model, GPUs and KV pages of its own; requests are spread over them.",
        group="server",
        low=1,
        high=64,
    )
    shutdown_timeout: float = setting(
        30.0, "Seconds that open requests may still run when the server is told to stop.", group="server", low=0
    )
    max_restarts: int = setting(
        5,
        "Times in ten minutes that one process which died (an engine, or a front end) is started again before the server gives up.",
        group="server",
        low=0,
    )
    stall_timeout: float = setting(
        60.0,
        "Seconds without progress of a step, or of a front end's loop, after which the process counts as hung and is started again.",
        group="server",
        low=1,
    )

    max_waiting: int | None = setting(
        None,
        "Most waiting sequences of an engine; beyond it requests are refused (429). Default 4 x max_num_seqs.",
        group="limits",
        kind="count",
        low=1,
    )
    max_request_bytes: int = setting(16 * 2**20, "Largest body of a request.", group="limits", kind="bytes", low=1024)
    request_timeout: float | None = setting(
        None,
        "Most seconds that a request may take; then it ends with finish_reason abort. A request may ask for less.",
        group="limits",
        low=0.001,
    )

    api_key: tuple[str, ...] = setting((), "Keys that clients must send as a bearer token.", group="security", is_secret=True)
    api_key_file: str | None = setting(None, "File with one key a line, beside those of --api-key.", group="security")
    ssl_certfile: str | None = setting(None, "Certificate (PEM) of both doors: they then speak TLS alone.", group="security")
    ssl_keyfile: str | None = setting(None, "Private key (PEM) of the certificate.", group="security")
    ssl_ca_certs: str | None = setting(
        None, "Certificate authorities (PEM) that clients' certificates must come from (mutual TLS).", group="security"
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "Web origins that browsers may call from (CORS); none by default, * is any.", group="security"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (), "More Host names to answer on loopback without a key; there, only loopback names are answered.", group="security"
    )
    enable_dev_endpoints: bool = setting(False, "Allow flushing the prefix cache and profiling.", group="security")

    metrics_prefix: str = setting("jaxserve", "Prefix of the metrics' names; vllm suits dashboards made for vLLM.", group="observability")
    log_requests: bool = setting(False, "Log the prompt, parameters and answer of every request.", group="observability")
    log_format: str = setting(
        "auto", "Form of log lines; auto is text on a terminal, else JSON.", group="observability", choices=("auto", "text", "json")
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "OTLP/gRPC collector to send a span of each request to, such as http://localhost:4317; needs the extra otel.",
        group="observability",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.http_only and self.grpc_only:
            raise ConfigError("http_only and grpc_only are both set; give one of them, or neither to serve both.")
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError(f"metrics_prefix is {self.metrics_prefix!r}; it must be letters, digits and _, beginning with no digit.")


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What the layers of a KV group see of a sequence: everything, or only its end.

    Attributes:
        window: The last `window` positions, the token's own included.
        chunk: The positions of the token's own chunk of `chunk`, up to itself; never together with a window.
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def reach(self) -> int | None:
        """Most positions that one token sees; None without a limit."""
        return self.chunk if self.window is None else self.window

    def first_visible(self, position: int) -> int:
        """The first position that a token at `position` sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position // self.chunk * self.chunk


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
    page_size: int = EngineConfig.page_size
    groups: tuple[GroupLimits, ...] = (GroupLimits(),)
    max_penalty_slots: int = EngineConfig.max_penalty_slots
    enable_prefix_caching: bool = EngineConfig.enable_prefix_caching
    scheduling_policy: str = EngineConfig.scheduling_policy
    long_prefill_token_threshold: int = EngineConfig.long_prefill_token_threshold
    eos_token_ids: frozenset[int] = frozenset()
    rope_original_length: int | None = None
    """For RoPE whose table depends on the length: only pages below it, of sequences admitted at most that long, are cached."""
    has_recurrent_state: bool = False
    """Some layers keep a state for each sequence that no page holds: a sequence is always computed from its first token on, so there are
    no prefix hits and no shared prompts, whatever `enable_prefix_caching` says."""

    @property
    def num_groups(self) -> int:
        """KV groups, each with a page table of its own."""
        return len(self.groups)

    @property
    def max_chunk(self) -> int:
        """Most tokens that a step computes of one sequence."""
        threshold = self.long_prefill_token_threshold
        return min(self.max_num_batched_tokens, threshold) if threshold else self.max_num_batched_tokens


def check_ranges(config: EngineConfig | ServerConfig) -> None:
    """Raises ConfigError when a value is outside the choices or the range that its field declares."""
    for spec in fields(config):
        if message := range_error(spec, getattr(config, spec.name)):
            raise ConfigError(message)


def range_error(spec: Field[Any], value: Any) -> str:
    """What is wrong with a field's value, or nothing."""
    choices, low, high = (spec.metadata.get(key) for key in ("choices", "low", "high"))
    if value is None:
        return ""
    if choices and value not in choices:
        return f"{spec.name} is {value!r}; it must be one of {', '.join(choices)}."
    if value == math.inf:
        return f"{spec.name} is {value}; it must be a finite number."
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        limit = f"between {low} and {high}" if high is not None else f"at least {low}"
        return f"{spec.name} is {value}; it must be {limit}."
    return ""


def cache_dir() -> Path:
    """Where jaxserve keeps converted checkpoints and compiled programs: $JAXSERVE_CACHE, else under $XDG_CACHE_HOME or ~/.cache.

    Made readable by its owner only, as what it holds is trusted when it is read back. Raises ConfigError when it cannot be made.
    """
    given = os.environ.get("JAXSERVE_CACHE")
    path = Path(given).expanduser() if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the cache directory: {error}. Set JAXSERVE_CACHE to one that can be written.") from None
    return path
