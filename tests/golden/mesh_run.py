"""Runs golden models over several CPU devices, in a process of its own: how many there are is settled when JAX starts.

`python mesh_run.py CASES GOLDEN_DIR SCRATCH_DIR` with cases such as `llama3-rope/4`, `qwen3-moe/2/experts` or `qwen3/8/twice`; a line of
JSON for each tells what was computed and what lies where. "experts" is expert parallelism; "twice" doubles every head and kv head, which
computes the same and can be cut twice as often; "odd" leaves out the last token of the vocabulary; "dealt" deals out the tokens of the
smallest steps too; "built" has the engine built as it is served, with pages of another dtype where one is named too: "built/int8".
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint import open_checkpoint
from jaxserve.config import EngineConfig, SchedulerLimits
from jaxserve.convert import convert
from jaxserve.core.buckets import Bucket, Buckets
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.build import build_engine
from jaxserve.engine.engine import Engine
from jaxserve.engine.info import EngineInfo
from jaxserve.models import shards
from jaxserve.models.load import load_model_on_mesh
from jaxserve.models.registry import resolve_spec
from jaxserve.models.spec import AttentionSpec, ModelSpec
from jaxserve.runner.memory import group_limits
from jaxserve.runner.placement import device_mesh
from jaxserve.runner.runner import ModelRunner, RunnerShape
from jaxserve.scheduler.scheduler import Scheduler

MAX_SEQS, MAX_TOKENS, MAX_LEN, NUM_PAGES, PAGE_SIZE = 4, 64, 84, 128, 16
MIN_DEALT_BYTES = shards.MIN_DEALT_BYTES
QUICK = {"xla_backend_optimization_level": 0}
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


class QuickRunner(ModelRunner):
    """Compiles without XLA's costly optimizations."""

    def lower(self, bucket: Bucket) -> Callable[[], Any]:
        """Lowers to what compiles quickly."""
        lower = super().lower(bucket)
        return lambda: SimpleNamespace(compile=partial(lower().compile, QUICK))


class Doubled:
    """A checkpoint with every head twice: rows of queries, keys and values repeated, columns of the output halved and repeated."""

    def __init__(self, checkpoint: Any, spec: ModelSpec) -> None:
        self._checkpoint, self._spec = checkpoint, spec

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor with the heads doubled."""
        return self.read(name).shape

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The tensor, or some rows of it."""
        array, part = self._checkpoint.read(name), name.split(".")[-2]
        attention = self._spec.layers[0].attention
        is_plain = isinstance(attention, AttentionSpec)
        num_groups = attention.num_kv_heads if is_plain else attention.num_heads
        if part == "o_proj" and array.ndim == 2:
            array = _repeated(array.T, num_groups).T / 2
        elif part in (("q_proj", "k_proj", "v_proj") if is_plain else ("q_proj", "q_b_proj", "kv_b_proj")):
            array = _repeated(array, num_groups)
        return array if rows is None else array[rows]


def _repeated(array: np.ndarray, num_groups: int) -> np.ndarray:
    """Every group of heads is followed by itself."""
    return np.repeat(array.reshape(num_groups, -1, *array.shape[1:]), 2, axis=0).reshape(-1, *array.shape[1:])


class Odd:
    """A checkpoint without the last token."""

    def __init__(self, checkpoint: Any) -> None:
        self._checkpoint = checkpoint

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor without the last token."""
        rows, *rest = self._checkpoint.shape(name)
        return (rows - (name in ("embed_tokens.weight", "lm_head.weight")), *rest)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The tensor, or some rows of it."""
        array: np.ndarray = self._checkpoint.read(name, rows or slice(0, self.shape(name)[0]))
        return array


class Counted:
    """A checkpoint that counts the elements read of each tensor."""

    def __init__(self, checkpoint: Any) -> None:
        self._checkpoint = checkpoint
        self.num_read: Counter[str] = Counter()
        self.shape = checkpoint.shape

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The tensor, or some rows of it."""
        array: np.ndarray = self._checkpoint.read(name, rows)
        self.num_read[name] += array.size
        return array


def doubled_spec(spec: ModelSpec) -> ModelSpec:
    """The spec of what `Doubled` reads."""

    def twice(attention: Any) -> Any:
        kv = {"num_kv_heads": 2 * attention.num_kv_heads} if isinstance(attention, AttentionSpec) else {}
        return dataclasses.replace(attention, num_heads=2 * attention.num_heads, **kv)

    layers = tuple(dataclasses.replace(layer, attention=twice(layer.attention)) for layer in spec.layers)
    return dataclasses.replace(spec, layers=layers)


def run(case: str, golden: Path, scratch: Path) -> dict[str, Any]:
    """One case: the tokens, the bytes that weights and pages take on the fullest device, and the collectives of each program."""
    folder, count, *options = case.split("/")
    converted, source = scratch / folder, golden / folder
    shards.MIN_DEALT_BYTES = 0 if "dealt" in options else MIN_DEALT_BYTES
    if not converted.exists():
        convert(next(source.glob("*.gguf"), source), converted)
    has_expert_parallel = "experts" in options
    num_read: Counter[str] = Counter()
    if "built" in options:
        config = EngineConfig(
            model=str(converted), device="cpu", dtype="float32", attention_backend="xla", generation_config="vllm",
            max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS, num_pages=NUM_PAGES,
            tensor_parallel_size=int(count), enable_expert_parallel=has_expert_parallel,
            kv_cache_dtype="int8" if "int8" in options else "auto",
        )  # fmt: skip
        engine = build_engine(config)
        runner = engine.runner
    else:
        runner, num_read = _runner(open_checkpoint(converted), int(count), options)
        engine = _engine(runner)
    expected = json.loads((source / "expected.json").read_text())
    return {
        "case": case,
        "tokens": generate(engine, expected["prompts"]),
        "weights_bytes": device_bytes(runner._weights),
        "pages_bytes": device_bytes(runner._pages),
        "collectives": [(bucket.tokens, Counter(_collectives(program.as_text()))) for bucket, program in runner._steps.items()],
        "num_read": num_read,
        "info": [engine.info.tensor_parallel_size, engine.info.kv_cache_bytes, engine.info.device],
    }


def _runner(checkpoint: Any, count: int, options: list[str]) -> tuple[ModelRunner, Counter[str]]:
    """The runner, and how many elements of each tensor were read for it."""
    spec = resolve_spec(checkpoint.config)
    if "twice" in options:
        checkpoint, spec = Doubled(checkpoint, spec), doubled_spec(spec)
    if "odd" in options:
        checkpoint, spec = Odd(checkpoint), dataclasses.replace(spec, vocab_size=spec.vocab_size - 1)
    source = Counted(checkpoint)
    mesh = device_mesh(jax.devices()[:count])
    assert mesh is not None
    model = load_model_on_mesh(spec, source, jnp.float32, mesh=mesh, has_expert_parallel="experts" in options)
    shape = RunnerShape(
        buckets=Buckets(MAX_SEQS, decode_rows=(MAX_SEQS,), mixed_tokens=(MAX_TOKENS,)), num_pages=NUM_PAGES, page_size=PAGE_SIZE,
        max_model_len=MAX_LEN, max_penalty_slots=MAX_SEQS,
    )  # fmt: skip
    runner = QuickRunner(model, model.spec, shape, kv_dtype=jnp.float32, mesh=mesh)
    runner.compile()
    return runner, source.num_read


def _engine(runner: ModelRunner) -> Engine:
    limits = SchedulerLimits(
        max_num_seqs=MAX_SEQS, max_num_batched_tokens=23, max_model_len=MAX_LEN, num_pages=NUM_PAGES, page_size=PAGE_SIZE,
        rope_original_length=runner.spec.rope_original_length, groups=group_limits(runner.spec),
        has_recurrent_state=bool(runner.spec.recurrent_layers),
    )  # fmt: skip
    info = EngineInfo(
        model_path="", model="tiny", model_type=runner.spec.model_type, dtype="float32", max_model_len=MAX_LEN,
        vocab_size=runner.spec.vocab_size, eos_token_ids=(), num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=23,
    )  # fmt: skip
    return Engine(Scheduler(limits, runner.shape.buckets), runner, info, async_scheduling=True)


def device_bytes(arrays: Any) -> int:
    """What the fullest device holds of the arrays."""
    taken: Counter[int] = Counter()
    for array in jax.tree.leaves(arrays):
        for part in array.addressable_shards:
            taken[part.device.id] += part.data.nbytes
    return max(taken.values())


def _collectives(hlo: str) -> list[str]:
    return re.findall(rf"= [^=]*? ({'|'.join(COLLECTIVES)})(?:-start)?\(", hlo)


def generate(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of the prompts, all at once, in chunks."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(Request(request_id=str(i), prompt_token_ids=tuple(prompt), params=params))
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
    return [tokens[str(i)] for i in range(len(prompts))]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    for each in sys.argv[1].split(","):
        print(json.dumps(run(each, Path(sys.argv[2]), Path(sys.argv[3]))), flush=True)
