"""Engines over tiny real models: converted once, compiled once for each page size, and driven with many host limits."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.checkpoint import open_checkpoint
from jaxserve.config import SchedulerLimits
from jaxserve.convert import convert
from jaxserve.core.buckets import Bucket, Buckets
from jaxserve.core.events import Logprobs, TokenEvent
from jaxserve.core.plan import Plan
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine import build
from jaxserve.engine.engine import Engine
from jaxserve.engine.info import EngineInfo
from jaxserve.models.load import load_model
from jaxserve.models.registry import resolve_spec
from jaxserve.runner import filters, sampling
from jaxserve.runner.memory import group_limits
from jaxserve.runner.runner import ModelRunner, RunnerShape
from jaxserve.scheduler.scheduler import Scheduler

MAX_SEQS, MAX_TOKENS, MAX_LEN, ARRAY_PAGES = 4, 64, 84, 128


class FewBuckets(Buckets):
    """Every mixed step by the program for prompt log-probabilities, which does all that the other does: a third less to compile."""

    def choose(self, plan: Plan) -> Bucket:
        bucket = super().choose(plan)
        if bucket.is_decode:
            return bucket
        return bucket._replace(logits_rows=bucket.rows, has_prompt_logprobs=True, has_pooling=self.has_pooling)

    def all(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in super().all() if bucket.is_decode or bucket.has_prompt_logprobs)


class RealBuckets(Buckets):
    """Three programs for a real model: decode, the whole budget of mixed tokens, and 64 with prompt log-probabilities."""

    @classmethod
    def build(cls, *, max_num_seqs: int, max_num_tokens: int, **enabled: Any) -> RealBuckets:
        del enabled
        return cls(max_num_seqs, decode_rows=(max_num_seqs,), mixed_tokens=(64, max_num_tokens), has_prompt_logprobs=True)

    def choose(self, plan: Plan) -> Bucket:
        bucket = super().choose(plan)
        if bucket.is_decode or bucket.has_prompt_logprobs:
            return bucket
        return bucket._replace(tokens=self.max_num_tokens, logits_rows=bucket.rows)

    def all(self) -> tuple[Bucket, ...]:
        rows = self.max_num_seqs
        mixed = Bucket(self.max_num_tokens, rows, rows, is_decode=False)
        return Bucket(rows, rows, rows, is_decode=True), mixed, mixed._replace(tokens=64, has_prompt_logprobs=True)


class ServedRunner(ModelRunner):
    """Compiles with XLA's optimizations, as programs are served, and not as tests ask by default (conftest.py at the root)."""

    def lower(self, bucket: Bucket) -> Callable[[], Any]:
        lower = super().lower(bucket)
        return lambda: SimpleNamespace(compile=partial(lower().compile, {"xla_backend_optimization_level": 3}))


class QuickRunner(ModelRunner):
    """Compiles for greedy requests alone: what is tested is what the models compute.

    Drawing at random is nearly half of a tiny model's program and the same in all of them (tests/runner/test_sampling.py).
    """

    def compile(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "_choose", greedy_token)
            return super().compile(*args, **kwargs)


def greedy_token(logits: jax.Array, *_: object) -> jax.Array:
    """`sampling._choose` without its draw."""
    best = jnp.max(logits, axis=-1)
    return jnp.where(jnp.isfinite(best), filters.first_true(logits == best[:, None]), -1)


@pytest.fixture(scope="module")
def served_runner() -> type[ModelRunner]:
    """The class `ServedRunner`."""
    return ServedRunner


@pytest.fixture(scope="module")
def real_programs() -> Iterator[None]:
    """What `build_engine` builds in this module is optimized and has few programs: a real model's take long to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "Buckets", RealBuckets)
        patch.setattr(build, "ModelRunner", ServedRunner)
        yield


class TinyModel:
    """A golden checkpoint with its runner; `engine(...)` puts a fresh scheduler over the same compiled programs.

    A quick one has few programs and is for greedy requests alone; a served one is optimized. `kv_dtype` is that of the page arrays.
    """

    def __init__(
        self, source: Path, converted: Path, page_size: int, *, has_pooling: bool, is_quick: bool, is_served: bool, kv_dtype: str
    ) -> None:
        if not converted.exists():  # one compiled again, after others took its place, was converted before
            convert(next(source.glob("*.gguf"), source), converted)
        checkpoint = open_checkpoint(converted)
        self.spec = resolve_spec(checkpoint.config)
        self.expected = json.loads((source / "expected.json").read_text())
        self.arrays = load_file(source / "expected.safetensors")
        model = load_model(self.spec, checkpoint.read, jnp.float32, device=jax.devices()[0], attention=None)
        ladder = FewBuckets if is_quick else Buckets
        buckets = ladder(MAX_SEQS, decode_rows=(MAX_SEQS,), mixed_tokens=(MAX_TOKENS,), has_prompt_logprobs=True, has_pooling=has_pooling)
        shape = RunnerShape(buckets=buckets, num_pages=ARRAY_PAGES, page_size=page_size, max_model_len=MAX_LEN,
                            max_penalty_slots=MAX_SEQS, has_full_logprobs=True)  # fmt: skip
        runner = QuickRunner if is_quick else ServedRunner if is_served else ModelRunner
        self.runner = runner(model, self.spec, shape, kv_dtype=jnp.dtype(kv_dtype), device=jax.devices()[0])
        self.runner.compile()

    def engine(self, *, async_scheduling: bool = False, **changes: object) -> Engine:
        """An engine with an empty cache; `changes` are fields of SchedulerLimits, host limits only."""
        self.runner.reset()
        shape = self.runner.shape
        limits = SchedulerLimits(
            max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN, num_pages=ARRAY_PAGES,
            page_size=shape.page_size, rope_original_length=self.spec.rope_original_length,
            groups=group_limits(self.spec), has_recurrent_state=bool(self.spec.recurrent_layers),
        )  # fmt: skip
        limits = dataclasses.replace(limits, **changes)
        info = EngineInfo(
            model_path="", model="tiny", model_type=self.spec.model_type, dtype="float32", max_model_len=MAX_LEN,
            vocab_size=self.spec.vocab_size, eos_token_ids=(), num_pages=limits.num_pages, page_size=shape.page_size,
            max_num_seqs=MAX_SEQS, max_num_batched_tokens=limits.max_num_batched_tokens, max_logprobs=-1, has_prompt_logprobs=True,
        )  # fmt: skip
        return Engine(Scheduler(limits), self.runner, info, async_scheduling=async_scheduling)


@functools.lru_cache(maxsize=4)  # compiled programs take memory maps, of which Linux gives a process 65,530
def _tiny_model(source: Path, converted: Path, page_size: int, **kind: Any) -> TinyModel:
    return TinyModel(source, converted, page_size, **kind)


@pytest.fixture(scope="session")
def tiny_model(golden_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """`tiny_model(folder, page_size)`: the last few are kept."""
    root = tmp_path_factory.mktemp("converted")

    def make(
        folder: str,
        page_size: int = 16,
        *,
        has_pooling: bool = False,
        is_quick: bool = False,
        is_served: bool = False,
        kv_dtype: str = "float32",
    ) -> TinyModel:
        kind = {"has_pooling": has_pooling, "is_quick": is_quick, "is_served": is_served, "kv_dtype": kv_dtype}
        return _tiny_model(golden_dir / folder, root / folder, page_size, **kind)

    return make


def run_all(engine: Engine, requests: list[Request]) -> dict[tuple[str, int], list[TokenEvent]]:
    """Adds the requests at once and steps until all have ended; events by (request id, index)."""
    events: dict[tuple[str, int], list[TokenEvent]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            events.setdefault((event.request_id, event.index), []).append(event)
    engine.scheduler.check_integrity()
    return events


@pytest.fixture(scope="session")
def run():
    """The function `run_all`."""
    return run_all


def greedy(prompt: list[int], request_id: str, max_tokens: int, **params: object) -> Request:
    """A greedy request that does not stop at EOS."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)
    return Request(request_id=request_id, prompt_token_ids=tuple(prompt), params=sampling)


@pytest.fixture(scope="session")
def greedy_request():
    """The function `greedy`."""
    return greedy


def dense(entry: Logprobs, vocab_size: int) -> np.ndarray:
    """A whole-vocabulary entry as an array [V]."""
    out = np.full(vocab_size, -np.inf, np.float32)
    out[np.asarray(entry.top_ids)] = entry.top_logprobs
    return out


@pytest.fixture(scope="session")
def dense_logprobs():
    """The function `dense`."""
    return dense
