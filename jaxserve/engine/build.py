"""Puts an engine together from a configuration: device, checkpoint, weights, memory plan, programs, scheduler.

Reads top to bottom in the order in which start-up prints its stages. Everything it decides ends up in `EngineInfo`. Next:
`engine.engine` for what the parts then do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxserve.cgroup import usable_cores
from jaxserve.checkpoint import Checkpoint, open_checkpoint
from jaxserve.checkpoint_report import size
from jaxserve.config import EngineConfig, SchedulerLimits
from jaxserve.convert.resolve import resolve_model
from jaxserve.core.buckets import Buckets
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.engine.info import EngineInfo
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.models.load import load_model, load_model_on_mesh
from jaxserve.models.registry import resolve_spec
from jaxserve.models.shards import Shards, shard_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.runner.backend import choose_backend, kv_cache_name, page_dtype
from jaxserve.runner.compile import set_up_compile_cache
from jaxserve.runner.device import choose_dtype, set_up_devices
from jaxserve.runner.memory import (
    MIN_PAGES,
    MemoryPlan,
    check_token_budget,
    choose_num_pages,
    fullest,
    group_limits,
    kv_budget,
    num_pages_key,
    page_bytes,
    resolve_max_model_len,
    tree_bytes,
)
from jaxserve.runner.placement import device_mesh
from jaxserve.runner.runner import ModelRunner, RunnerShape, penalty_state_shapes, recurrent_state_shapes, slot_state_shapes
from jaxserve.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

Stage = Callable[[str, float, str], None]
"""Called after each stage of start-up with its name, its seconds and a detail."""


class _StepLimits(NamedTuple):
    """Defaults of one platform: sequences and tokens of a step, and how far apart the mixed buckets lie."""

    max_num_seqs: int
    max_num_batched_tokens: int
    bucket_ratio: int


_DEFAULT_LIMITS = {"cpu": _StepLimits(64, 512, 4), "gpu": _StepLimits(256, 8192, 2)}
"""At most 16 programs on CPU, where each costs seconds of the first start-up, and 48 on GPU."""

_GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""What generation_config.json may say about sampling, and our names for it."""


def build_engine(
    config: EngineConfig, stage: Stage | None = None, *, max_host_bytes: int | None = None, checkpoint: Checkpoint | None = None
) -> Engine:
    """An engine ready for its first request.

    Args:
        config: What was asked for.
        stage: Told of each stage of start-up.
        max_host_bytes: Memory of the machine that this process may take where the model runs on the CPU; None is all that is free.
        checkpoint: In place of the one that `config.model` names.

    Raises:
        ConfigError: A setting does not fit this machine or this model.
        CheckpointError: The model is missing, damaged or unsupported.
    """
    timer = _Timer(stage)
    with timer.stage("device") as detail:
        devices = set_up_devices(config)
        device, mesh = devices[0], device_mesh(devices)
        cache_directory = set_up_compile_cache(config)
        num_threads = config.num_threads or usable_cores()
        device_name = f"cpu, {num_threads} threads" if device.platform == "cpu" else device.device_kind
        device_name = device_name if mesh is None else f"{mesh.size} x {device_name}"
        detail(device_name)
    with timer.stage("checkpoint") as detail:
        if checkpoint is None:
            checkpoint = open_checkpoint(resolve_model(config.model, revision=config.revision))
        whole = resolve_spec(checkpoint.config)
        spec = shard_spec(whole, Shards(config.tensor_parallel_size, config.enable_expert_parallel))  # what each device computes
        detail(str(checkpoint.path))
    with timer.stage("kernels") as detail:
        dtype = choose_dtype(config.dtype, device, whole)
        kv_dtype = page_dtype(config.kv_cache_dtype, dtype)
        attention, attention_reason = choose_backend(config, spec, dtype, device)  # the first time this builds the native ones
        detail(f"{attention} ({attention_reason})")
    with timer.stage("weights") as detail, out_of_memory("the weights; share them by --tensor-parallel-size, or take a smaller model"):
        if mesh is None:
            model = load_model(whole, checkpoint.read, dtype, device=device, attention=attention)
        else:
            has_expert_parallel = config.enable_expert_parallel
            model = load_model_on_mesh(whole, checkpoint, dtype, mesh=mesh, has_expert_parallel=has_expert_parallel, attention=attention)
        detail(dtype)
    with timer.stage("memory") as detail:
        shape, plan = _plan_memory(config, spec, model, dtype, devices, cache_directory, checkpoint.num_token_ids, max_host_bytes)
        detail(f"{plan.num_pages:,} pages")
        logger.info("memory:\n%s", plan.table())
        if spec.recurrent_layers and config.enable_prefix_caching:
            logger.info("prefix caching is off: this model has recurrent layers, whose state no page holds")
    with timer.stage("programs") as detail, out_of_memory("pages, state and steps; lower --gpu-memory-utilization or --num-pages"):
        runner = ModelRunner(model, spec, shape, kv_dtype=kv_dtype, device=device, mesh=mesh)
        del model
        num_programs, num_cached = runner.compile(
            lambda done, total, seconds: timer.report(f"  compile {done}/{total}", seconds), num_threads=num_threads
        )
        _check_temporaries(plan, runner)
        detail(f"{num_programs}, {num_cached} from the compile cache")
    info = _engine_info(
        config, checkpoint, spec, shape, dtype,
        device=device_name, tensor_parallel_size=len(devices), attention=attention, attention_reason=attention_reason,
        kv_cache_bytes=plan.kv_bytes, kv_cache_dtype=kv_cache_name(kv_dtype),
        num_programs=num_programs, num_cached_programs=num_cached,
    )  # fmt: skip
    scheduler = Scheduler(_scheduler_limits(config, info, spec, shape), shape.buckets)
    return Engine(scheduler, runner, info, async_scheduling=config.async_scheduling)


@contextmanager
def out_of_memory(what: str) -> Iterator[None]:
    """A device without room for something becomes a ConfigError that names it: started again, it would have no more."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "Out of memory" not in str(error):
            raise
        raise ConfigError(f"the device has no room for {what}. It says: {str(error).strip().splitlines()[0]}") from error


class _Timer:
    """Times stages and reports them."""

    def __init__(self, stage: Stage | None) -> None:
        self._stage = stage

    def report(self, name: str, seconds: float, detail: str = "") -> None:
        if self._stage is not None:
            self._stage(name, seconds, detail)

    @contextmanager
    def stage(self, name: str) -> Iterator[Callable[[str], None]]:
        """Yields a function that sets the stage's detail."""
        details: list[str] = []
        started = time.perf_counter()
        yield details.append
        self.report(name, time.perf_counter() - started, "".join(details))


def _plan_memory(
    config: EngineConfig,
    spec: ModelSpec,
    model: Any,
    dtype: str,
    devices: Sequence[jax.Device],
    cache_directory: Path,
    num_token_ids: int | None,
    max_host_bytes: int | None,
) -> tuple[RunnerShape, MemoryPlan]:
    """Decides the number of pages and the longest sequence, hence every shape. `spec` is what each device computes."""
    device = fullest(devices)
    defaults = _DEFAULT_LIMITS["cpu" if device.platform == "cpu" else "gpu"]
    max_num_seqs = config.max_num_seqs or defaults.max_num_seqs
    buckets = Buckets.build(
        max_num_seqs=max_num_seqs,
        max_num_tokens=max(config.max_num_batched_tokens or defaults.max_num_batched_tokens, 16),
        has_prompt_logprobs=config.enable_prompt_logprobs,
        has_pooling=config.enable_embeddings,
        ratio=defaults.bucket_ratio,
    )
    shape = RunnerShape(
        buckets=buckets,
        num_pages=MIN_PAGES,
        page_size=config.page_size,
        max_model_len=config.max_model_len or spec.derived_max_model_len,
        max_penalty_slots=min(config.max_penalty_slots, max_num_seqs),
        num_logprobs=max(config.max_logprobs, 0),
        has_full_logprobs=config.max_logprobs == -1,
        num_token_ids=num_token_ids,
    )
    state_bytes = tree_bytes((slot_state_shapes(shape, len(spec.kv_groups)), penalty_state_shapes(shape, spec.vocab_size)))
    recurrent_bytes = tree_bytes(recurrent_state_shapes(spec, shape.num_slots))
    temporaries_bytes = _temporaries_bytes(model, spec, shape, page_dtype(config.kv_cache_dtype, dtype), devices)
    budget = kv_budget(
        config,
        device,
        state_bytes=state_bytes + recurrent_bytes,
        temporaries_bytes=temporaries_bytes,
        max_host_bytes=max_host_bytes,
    )
    bytes_per_page = page_bytes(spec, config.page_size, page_dtype(config.kv_cache_dtype, dtype))
    key = num_pages_key(spec, config, dtype, device)
    num_pages = choose_num_pages(config, budget, bytes_per_page, key=key, cache_directory=cache_directory)
    budget_tokens = config.max_num_batched_tokens or buckets.max_num_tokens
    max_chunk = min(budget_tokens, config.long_prefill_token_threshold or budget_tokens)
    max_model_len, message = resolve_max_model_len(config, spec, num_pages, max_chunk=max_chunk)
    if message is not None:
        logger.warning(message)
    check_token_budget(
        config,
        default=defaults.max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_kv_tokens=(num_pages - 1) // len(spec.kv_groups) * config.page_size,
    )
    plan = MemoryPlan(
        weights_bytes=tree_bytes(jax.tree.leaves(model)) // len(devices),
        state_bytes=state_bytes,
        recurrent_bytes=recurrent_bytes,
        temporaries_bytes=temporaries_bytes,
        page_bytes=bytes_per_page,
        num_pages=num_pages,
        page_size=config.page_size,
        reason="num_pages" if config.num_pages is not None else budget.reason,
    )
    return replace(shape, num_pages=num_pages, max_model_len=max_model_len), plan


def _temporaries_bytes(model: Any, spec: ModelSpec, shape: RunnerShape, kv_dtype: str, devices: Sequence[jax.Device]) -> int:
    """Temporaries of the largest step, measured by compiling it with hardly any pages; 0 on CPU, where pages do not compete for memory."""
    if devices[0].platform == "cpu":
        return 0
    runner = ModelRunner(model, spec, shape, kv_dtype=kv_dtype, device=devices[0], mesh=device_mesh(devices))
    largest = max(shape.buckets.all(), key=lambda bucket: (bucket.tokens, bucket.logits_rows))
    try:
        return runner.lower(largest)().compile().memory_analysis().temp_size_in_bytes
    finally:
        runner.compiles.close()


def _check_temporaries(plan: MemoryPlan, runner: ModelRunner) -> None:
    """Warns when the programs need more than was planned for: the pages then took memory that steps need."""
    planned, actual = plan.temporaries_bytes, runner.temporaries_bytes
    if planned and actual > planned * 1.05:
        logger.warning(
            "the largest step takes %s of temporaries, %s were planned; lower --gpu-memory-utilization if memory runs out",
            size(actual),
            size(planned),
        )


def _engine_info(config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec, shape: RunnerShape, dtype: str, **facts: Any) -> EngineInfo:
    return EngineInfo(
        model_path=str(checkpoint.path),
        model=config.model,
        model_type=spec.model_type,
        architectures=spec.architectures,
        dtype=dtype,
        max_model_len=shape.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=servable_eos_ids(checkpoint.eos_token_ids, spec.vocab_size),
        bos_token_id=next(iter(spec.bos_token_ids), None),
        pad_token_id=checkpoint.generation_config.get("pad_token_id"),
        max_logprobs=config.max_logprobs,
        has_prompt_logprobs=config.enable_prompt_logprobs,
        has_embeddings=config.enable_embeddings,
        embedding_size=spec.hidden_size,
        default_pooling=config.pooling,
        max_penalty_slots=shape.max_penalty_slots,
        scheduling_policy=config.scheduling_policy,
        num_pages=shape.num_pages,
        page_size=shape.page_size,
        max_num_seqs=shape.buckets.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or shape.buckets.max_num_tokens,
        default_sampling_params=default_sampling_params(checkpoint.generation_config) if config.generation_config == "auto" else {},
        **facts,
    )


def servable_eos_ids(eos_token_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Those that the model can sample. A tokenizer may have more tokens than the embedding has rows."""
    return tuple(sorted(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size))


def default_sampling_params(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation_config.json says about sampling; a value that no request may have is left out, with a warning."""
    params: dict[str, Any] = {}
    for theirs, ours in _GENERATION_FIELDS.items():
        value = generation_config.get(theirs)
        if value is None:
            continue
        try:
            SamplingParams(**{ours: value})
        except InvalidRequest as error:
            logger.warning("generation_config.json: %s is left out: %s", theirs, error)
            continue
        params[ours] = value
    if params:
        logger.info("default sampling parameters from generation_config.json: %s", params)
    return params


def _scheduler_limits(config: EngineConfig, info: EngineInfo, spec: ModelSpec, shape: RunnerShape) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        num_pages=info.num_pages,
        page_size=info.page_size,
        groups=group_limits(spec),
        max_penalty_slots=shape.max_penalty_slots,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        eos_token_ids=frozenset(info.eos_token_ids),
        rope_original_length=spec.rope_original_length,
        has_recurrent_state=bool(spec.recurrent_layers),
    )
