"""Owns the device: weights, pages, state by slot and the compiled programs; turns Plans into StepResults.

One packed upload, one program and one asynchronous copy back for each step. Knows nothing of requests, stopping or page
ownership. Built by `engine.build`. Next: `runner.step` (the traced code), `runner.pending_step` (what comes back).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.arrays import KVPages, PenaltyState, QuantizedPages, RecurrentState, RecurrentStates, SlotState
from jaxserve.core.buckets import Bucket, Buckets
from jaxserve.core.plan import Plan
from jaxserve.models.load import split_model
from jaxserve.models.spec import ModelSpec
from jaxserve.runner.compile import CompileCounter, Progress, compile_all
from jaxserve.runner.layout import ADMISSION_WORDS, PAGE_WRITE_WORDS, UPDATE_PAGE_WRITES, StepLayout
from jaxserve.runner.pending_step import PendingModelStep
from jaxserve.runner.placement import WEIGHT, WHOLE, Placement, memory_partition
from jaxserve.runner.prepare import PreparedStep, prepare, prepare_penalty_row
from jaxserve.runner.step import StepOutputs, admit, step, update
from pallas_kernels.quantized_kv import is_quantized


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerShape:
    """Every size that is part of the compiled programs.

    Attributes:
        num_pages: Length of each page array, the null page included.
        num_logprobs: Width of the top log-probabilities that a step returns.
        has_full_logprobs: Return the whole vocabulary instead.
        num_token_ids: Ids that may be drawn are below it; None is the whole vocabulary.
    """

    buckets: Buckets
    num_pages: int
    page_size: int
    max_model_len: int
    max_penalty_slots: int
    num_logprobs: int = 20
    has_full_logprobs: bool = False
    num_token_ids: int | None = None

    @property
    def num_slots(self) -> int:
        """Slots with the null slot."""
        return self.buckets.max_num_seqs + 1

    @property
    def pages_per_sequence(self) -> int:
        """Length of a page table."""
        return -(-self.max_model_len // self.page_size)


def page_array_shapes(spec: ModelSpec, shape: RunnerShape, dtype: Any) -> tuple[Any, ...]:
    """One page array for each layer index of a group (see `arrays.KVPages`), with scales where the dtype is one of 8 bits."""
    num_parts, num_kv_heads, head_dim = spec.page_shape
    page = (shape.num_pages, num_parts, num_kv_heads, shape.page_size, head_dim)
    array: Any = jax.ShapeDtypeStruct(page, dtype)
    if is_quantized(dtype):
        array = QuantizedPages(array, cast(Any, jax.ShapeDtypeStruct(page[:-1], jnp.float32)))
    return (array,) * spec.num_page_arrays


def slot_state_shapes(shape: RunnerShape, num_groups: int) -> SlotState:
    """Shapes of the slot state."""

    def array(*per_slot: int) -> Any:
        return jax.ShapeDtypeStruct((shape.num_slots, *per_slot), jnp.int32)

    tables = array(num_groups, shape.pages_per_sequence)
    return SlotState(last_token=array(), length=array(), page_tables=tables, admission=array(ADMISSION_WORDS))


def penalty_state_shapes(shape: RunnerShape, vocab_size: int) -> PenaltyState:
    """Shapes of the penalty state."""
    dtypes = {"output_counts": jnp.int32, "is_in_prompt": jnp.bool_, "logit_bias": jnp.float32, "is_stop": jnp.bool_}
    rows: dict[str, Any] = {name: jax.ShapeDtypeStruct((shape.max_penalty_slots + 1, vocab_size), d) for name, d in dtypes.items()}
    return PenaltyState(**rows)


def recurrent_state_shapes(spec: ModelSpec, num_slots: int) -> RecurrentStates:
    """Shapes of the recurrent layers' states; `num_slots` counts the null slot."""

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((num_slots, *shape), jnp.float32)

    return tuple(
        RecurrentState(
            conv=array(layer.kernel_size - 1, layer.num_key_heads, layer.conv_dim),
            matrix=array(layer.num_value_heads, layer.key_dim, layer.value_dim),
        )
        for layer in spec.recurrent_layers
    )


class ModelRunner:
    """The device side of one engine. `compile` must be called before the first `run`.

    Args:
        model: From one of the loaders of `models.load`; one of shapes alone can be lowered and nothing else.
        spec: What one device computes, which is the model's own spec.
        shape: Sizes of the programs; those of one device where the model is in shards.
        kv_dtype: Of the pages.
        device: Where everything lives, where there is no mesh.
        mesh: The devices that share it.
    """

    def __init__(
        self, model: Any, spec: ModelSpec, shape: RunnerShape, *, kv_dtype: Any, device: jax.Device | None = None, mesh: Mesh | None = None
    ) -> None:
        self.spec, self.shape = spec, shape
        self._placement, self._partition = Placement(device, mesh), memory_partition(spec)
        self._graphdef, self._weights = split_model(model)
        parts = (
            page_array_shapes(spec, shape, kv_dtype),
            slot_state_shapes(shape, len(spec.kv_groups)),
            penalty_state_shapes(shape, spec.vocab_size),
            recurrent_state_shapes(spec, shape.num_slots),
        )
        self._shapes = self._placement.whole(self._partition, parts)
        self._layouts = {bucket: StepLayout(bucket, len(spec.kv_groups), shape.page_size) for bucket in shape.buckets.all()}
        self.compiles = CompileCounter()
        self._steps: dict[Bucket, Any] = {}
        self._update: Callable[..., Any]
        self._admit: Callable[..., Any]
        self._pages: KVPages
        self._slots: SlotState
        self._penalties: PenaltyState
        self._states: RecurrentStates

    def compile(self, progress: Progress | None = None, *, num_threads: int = 2) -> tuple[int, int]:
        """Compiles every program, allocates pages and state, and runs each program once on padding.

        Returns how many programs there are, and how many of them came from the persistent cache.
        """
        programs: dict[Any, Any] = {bucket: self.lower(bucket) for bucket in self.shape.buckets.all()}
        programs["update"], programs["admit"] = self._lower_update(), self._lower_admit()
        num_hits = self.compiles.num_cache_hits
        compiled = compile_all(programs, progress, num_threads=num_threads)
        num_cached = self.compiles.num_cache_hits - num_hits
        self._update, self._admit = compiled.pop("update"), compiled.pop("admit")
        self._steps = compiled
        self.reset()
        self._warm_up()
        return len(programs), num_cached

    def lower(self, bucket: Bucket) -> Callable[[], Any]:
        """A function that lowers the bucket's program by shapes alone (its `.compile()` gives HLO text and memory figures)."""
        layout, shape = self._layouts[bucket], self.shape
        function = partial(step, self._graphdef, layout, shape.num_logprobs, shape.has_full_logprobs, num_token_ids=shape.num_token_ids)
        weights = tuple(self._placement.placed(WEIGHT, weight) for weight in self._weights)
        inputs, outputs = (WEIGHT, *self._partition, WHOLE), (*self._partition, WHOLE)
        program = self._placement.program(function, inputs, outputs, donated=(1, 2, 3, 4))
        return self._lowering(program, weights, *self._shapes, jax.ShapeDtypeStruct((layout.size,), jnp.int32))

    @property
    def temporaries_bytes(self) -> int:
        """Temporaries of the compiled step that needs most."""
        return max(program.memory_analysis().temp_size_in_bytes for program in self._steps.values())

    @property
    def num_late_compiles(self) -> int:
        """Programs compiled by steps, after warm-up."""
        return self.compiles.late_compiles

    def run(self, plan: Plan) -> PendingModelStep:
        """Dispatches a plan; the tokens are copied back while the host goes on."""
        bucket = self.shape.buckets.choose(plan)
        prepared = self._prepare(plan, bucket)
        with self.compiles.watch():
            for admission in plan.admissions:
                if admission.penalty_slot is not None:
                    row = prepare_penalty_row(admission, self.spec.vocab_size)
                    self._penalties = self._admit(self._penalties, np.int32(admission.penalty_slot), *row)
            for writes in prepared.updates:
                self._slots = self._update(self._slots, writes)
            outputs = self._dispatch(bucket, prepared.packed)
            return PendingModelStep(plan, bucket, outputs, prepared.wants_logprobs)

    def reset(self) -> None:
        """Allocates pages and all state by slot afresh, dropping what was there."""
        self._drop_state()
        self._pages, self._slots, self._penalties, self._states = jax.tree.map(self._placement.zeros, self._shapes)

    def close(self) -> None:
        """Frees weights, pages and state on the device."""
        self.compiles.close()
        self._drop_state()
        for weight in self._weights:
            weight.delete()
        self._weights, self._steps = (), {}

    def _drop_state(self) -> None:
        # Freed before the new arrays are made: both would not fit.
        for name in ("_pages", "_slots", "_penalties", "_states"):
            for array in jax.tree.leaves(self.__dict__.pop(name, ())):
                array.delete()

    def _dispatch(self, bucket: Bucket, packed: np.ndarray) -> StepOutputs:
        program = self._steps[bucket]
        memory = self._pages, self._slots, self._penalties, self._states
        self._pages, self._slots, self._penalties, self._states, outputs = program(self._weights, *memory, packed)
        return outputs

    def _prepare(self, plan: Plan, bucket: Bucket) -> PreparedStep:
        null_slot, null_penalty_slot = self.shape.num_slots - 1, self.shape.max_penalty_slots
        return prepare(plan, self._layouts[bucket], null_slot=null_slot, null_penalty_slot=null_penalty_slot)

    def _lower_update(self) -> Callable[[], Any]:
        program = self._placement.program(update, WHOLE, WHOLE, donated=0)
        return self._lowering(program, self._shapes[1], jax.ShapeDtypeStruct((UPDATE_PAGE_WRITES, PAGE_WRITE_WORDS), jnp.int32))

    def _lower_admit(self) -> Callable[[], Any]:
        program = self._placement.program(admit, WHOLE, WHOLE, donated=0)
        vocab = self.spec.vocab_size
        row = [jax.ShapeDtypeStruct((vocab,), d) for d in (jnp.int32, jnp.bool_, jnp.float32, jnp.bool_)]
        return self._lowering(program, self._shapes[2], jax.ShapeDtypeStruct((), jnp.int32), *row)

    def _lowering(self, program: Any, *arguments: Any) -> Callable[[], Any]:
        """Lowers by shapes; those that say nothing of where they live, a step's inputs, are whole on every device."""

        def placed(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return shape if shape.sharding is not None else self._placement.placed(WHOLE, shape)

        def lower() -> Any:
            with self._placement.lowering():
                return program.lower(*jax.tree.map(placed, arguments))

        return lower

    def _warm_up(self) -> None:
        """Runs each program once on padding alone: first calls are slow, and a program that cannot run must fail at start-up."""
        for bucket in self._steps:
            self._dispatch(bucket, self._prepare(Plan(step_id=0, rows=()), bucket).packed)
        jax.block_until_ready(self._slots)
