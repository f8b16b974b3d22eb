"""What the engine tells its front ends about itself: plain data that travels as JSON over EngineLink.

Knows no JAX. Filled by `engine.build`; read by `engine.admission` and by everything in `serve`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


def engine_name(number: int, count: int) -> str:
    """What people read of one of `count` engines."""
    return "the engine" if count == 1 else f"engine {number}"


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """Facts that never change while the engine lives.

    Attributes:
        model_path: Directory of the converted checkpoint; the front end reads tokenizer and chat template there.
        vocab_size: Rows of the embedding; token ids are below it.
        num_pages: KV pages, the null page included.
        max_waiting: Waiting sequences beyond which the server refuses more; 0 is no limit.
        attention_reason: Why this attention implementation was chosen.
        tensor_parallel_size: Devices that share the model.
        kv_cache_bytes: Memory of all page arrays together, on one device.
        kv_cache_dtype: Of keys and values in pages, "int8" and "fp8" with scales.
        num_programs: Compiled programs, `num_cached_programs` of them from the persistent cache.
        has_embeddings: Prompts may be embedded; vectors have `embedding_size` values, pooled by `default_pooling` where a request says
            nothing.
        max_logprobs: Most log-probabilities a request may ask for; -1 allows the whole vocabulary.
        default_sampling_params: From the model's generation_config, empty where that is switched off.
    """

    model_path: str
    model: str
    model_type: str
    architectures: tuple[str, ...] = ()
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    max_logprobs: int = 20
    has_prompt_logprobs: bool = False
    has_embeddings: bool = False
    embedding_size: int = 0
    default_pooling: str = "last"
    max_penalty_slots: int = 64
    scheduling_policy: str = "fcfs"
    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int = 0
    device: str = "cpu"
    attention: str = ""
    attention_reason: str = ""
    tensor_parallel_size: int = 1
    kv_cache_bytes: int = 0
    kv_cache_dtype: str = "float32"
    num_programs: int = 0
    num_cached_programs: int = 0
    default_sampling_params: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The object as a JSON document; `from_json` is its inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineInfo:
        """Reads what `to_json` wrote."""
        values = json.loads(text)
        for name in ("architectures", "eos_token_ids"):
            values[name] = tuple(values[name])
        return cls(**values)


def smallest(infos: Iterable[EngineInfo]) -> EngineInfo:
    """The facts of the engine that takes least, so that what fits it fits all of a server; there is at least one."""
    return min(infos, key=lambda info: (info.max_model_len, info.num_pages))
