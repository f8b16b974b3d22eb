"""The model part of `bench.gpu_check`: a whole engine over weights that are made up, how fast it decodes, and how long the device waits.

Made-up weights cost what real ones do: no program looks at values, and a request's length is fixed. Knows no kernels; the engine is
`engine.build`'s own.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxserve.checkpoint import Checkpoint
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.models.registry import family_of, resolve_spec
from jaxserve.models.tensors import logical_tensors

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}  # fmt: skip
TINY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 512,
}  # fmt: skip
POOL = 1 << 22
"""Numbers that all weights repeat: drawing billions would take longer than everything else."""


class SyntheticCheckpoint(Checkpoint):
    """A checkpoint of made-up weights: norms are 1, everything else small and random."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.path = Path("synthetic")
        # In place of what the base class would read from files.
        self.__dict__.update(config=dict(config), generation_config={}, eos_token_ids=frozenset(), num_token_ids=None)
        spec = resolve_spec(dict(config))
        self._shapes = {tensor.name: tensor.shape for tensor in logical_tensors(family_of(spec), spec)}
        self._pool = (np.random.default_rng(0).standard_normal(POOL, np.float32) * 0.02).astype(ml_dtypes.bfloat16)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """See `Checkpoint.read`."""
        shape = self._shapes[name]
        array = np.ones(shape, ml_dtypes.bfloat16) if len(shape) == 1 else np.resize(self._pool, shape)
        return array if rows is None else array[rows]


@dataclass(frozen=True, slots=True)
class Level:
    """One number of requests at once.

    Attributes:
        tokens_per_s: Output tokens while all requests decode.
        step_ms: Of those steps, the mean.
        ttft_ms: From the arrival of all requests to a request's first token, the median.
        gap_ms: In which the device ran nothing, for each step of a run, those of prompts too; None where the trace shows no device.
    """

    batch: int
    tokens_per_s: float
    step_ms: float
    ttft_ms: float
    gap_ms: float | None


def run_level(engine: Engine, batch: int, *, input_len: int, output_len: int) -> Level:
    """Measures one level on an engine that is warm."""
    _run(engine, batch, input_len, output_len, "warm")
    measured = _run(engine, batch, input_len, output_len, "measured")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # by default each call of Python is recorded, and the host several times as slow
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            traced = _run(engine, batch, input_len, min(output_len, 16), "traced")
        idle = device_idle_s(Path(directory))
    return Level(
        batch,
        tokens_per_s=measured.num_tokens / measured.decode_s,
        step_ms=1e3 * measured.decode_s / max(measured.num_decode_steps, 1),
        ttft_ms=1e3 * statistics.median(measured.first_s),
        gap_ms=None if idle is None else 1e3 * idle / traced.num_steps,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Seconds to each first token, all steps with tokens; and what came after the last of those first: steps, tokens, seconds."""

    first_s: list[float]
    num_steps: int
    num_decode_steps: int
    num_tokens: int
    decode_s: float


def _run(engine: Engine, batch: int, input_len: int, output_len: int, label: str) -> _Run:
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    for i in range(batch):
        prompt = tuple(rng.integers(0, engine.info.vocab_size, input_len).tolist())
        engine.add(Request(request_id=f"{label}-{batch}-{i}", prompt_token_ids=prompt, params=params, arrival_time_s=start))
    first: dict[str, float] = {}
    began, num_steps, num_decode_steps, num_tokens = start, 0, 0, 0
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter()
        num_steps += bool(events)
        num_decode_steps += bool(events)
        num_tokens += sum(len(event.token_ids) for event in events)
        if errors := [event.error for event in events if event.error is not None]:
            raise RuntimeError(errors[0])  # requests that end so would look fast
        if new := {event.request_id for event in events} - first.keys():
            first |= dict.fromkeys(new, now - start)
            began, num_decode_steps, num_tokens = now, 0, 0  # what this step gave was computed before `now`
    return _Run(list(first.values()), max(num_steps, 1), num_decode_steps, num_tokens, time.perf_counter() - began)


def device_idle_s(directory: Path) -> float | None:
    """Seconds between the first and last kernel of a trace in which a GPU ran none; None where it shows no GPU."""
    for path in directory.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if plane.name.startswith("/device:GPU"):
                streams = (line for line in plane.lines if "stream" in line.name.lower())
                return idle_ns((e.start_ns, e.start_ns + e.duration_ns) for line in streams for e in line.events) / 1e9
    return None


def idle_ns(intervals: Iterable[tuple[float, float]]) -> float:
    """What lies between the first start and the last end and in no interval."""
    idle, end = 0.0, None
    for start, stop in sorted(intervals):
        if end is not None and start > end:
            idle += start - end
        end = stop if end is None else max(end, stop)
    return idle
