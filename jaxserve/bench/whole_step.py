"""Whole steps of a model, lowered for NVIDIA cards that are not here: what the memory plan forecasts, and the program itself.

No weights are read and no device is touched: everything goes by shape (`models.load.abstract_model`, `pallas_kernels.deviceless`). Needs
the `gates` extra. Next: `bench.hlo`, which reads the programs; `bench.roofline`; `tests/deviceless`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import jax

from jaxserve.config import EngineConfig
from jaxserve.core.buckets import Bucket, Buckets
from jaxserve.models.load import abstract_model, split_model
from jaxserve.models.shards import Shards
from jaxserve.models.spec import ModelSpec
from jaxserve.runner.memory import MIN_PAGES, MemoryPlan, choose_num_pages, kv_budget, page_bytes, tree_bytes
from jaxserve.runner.runner import ModelRunner, RunnerShape, penalty_state_shapes, recurrent_state_shapes, slot_state_shapes
from pallas_kernels import deviceless

DTYPE = "bfloat16"


@dataclass(frozen=True)
class WholeStep:
    """A model on cards that are not here.

    Attributes:
        spec: The whole model.
        card: A name of `deviceless.CARDS`.
        num_devices: Tensor parallel.
        max_num_seqs, max_num_tokens: Of a step.
        max_model_len: Width of the page tables in tokens.
        attention: Implementation of the kernels.
    """

    spec: ModelSpec
    card: str = "H200"
    num_devices: int = 1
    max_num_seqs: int = 256
    max_num_tokens: int = 8192
    max_model_len: int = 32768
    page_size: int = 16
    attention: str = "triton"

    @cached_property
    def model(self) -> Any:
        """What one device computes; its arrays are shapes."""
        return abstract_model(self.spec, DTYPE, shards=Shards(self.num_devices), attention=self.attention)

    @cached_property
    def shape(self) -> RunnerShape:
        """Sizes of the programs, with hardly any pages."""
        return RunnerShape(
            buckets=Buckets.build(max_num_seqs=self.max_num_seqs, max_num_tokens=self.max_num_tokens, ratio=2),
            num_pages=MIN_PAGES,
            page_size=self.page_size,
            max_model_len=self.max_model_len,
            max_penalty_slots=64,
        )

    @property
    def decode_bucket(self) -> Bucket:
        """The largest of its family."""
        return next(bucket for bucket in reversed(self.shape.buckets.all()) if bucket.is_decode)

    @property
    def mixed_bucket(self) -> Bucket:
        """The largest of its family."""
        return max(self.shape.buckets.all(), key=lambda bucket: (bucket.tokens, bucket.logits_rows))

    @property
    def weights_bytes(self) -> int:
        """Of one device."""
        return tree_bytes(split_model(self.model)[1]) // self.num_devices

    @property
    def state_bytes(self) -> int:
        """Slots and penalties, whole on every device."""
        return tree_bytes((slot_state_shapes(self.shape, len(self.spec.kv_groups)), penalty_state_shapes(self.shape, self.spec.vocab_size)))

    @property
    def recurrent_bytes(self) -> int:
        """Recurrent state of one device."""
        return tree_bytes(recurrent_state_shapes(self.model.spec, self.shape.num_slots))

    def lower(self, bucket: Bucket, num_pages: int) -> jax.stages.Lowered:
        """The bucket's program, by the code that lowers it for a device that is here."""
        mesh = deviceless.mesh(self.card, self.num_devices)
        runner = ModelRunner(self.model, self.model.spec, replace(self.shape, num_pages=num_pages), kv_dtype=DTYPE, mesh=mesh)
        try:
            lowered: jax.stages.Lowered = runner.lower(bucket)()
            return lowered
        finally:
            runner.compiles.close()

    def plan(self, temporaries_bytes: int) -> MemoryPlan:
        """What start-up would plan for one device with these temporaries, all memory being free but for the weights."""
        config = EngineConfig(model="", page_size=self.page_size)
        limit = int(deviceless.CARDS[self.card].memory_bytes * config.gpu_memory_utilization)
        stats = {"bytes_limit": limit, "bytes_in_use": self.weights_bytes}
        device: Any = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
        state_bytes = self.state_bytes + self.recurrent_bytes
        budget = kv_budget(config, device, state_bytes=state_bytes, temporaries_bytes=temporaries_bytes)
        bytes_per_page = page_bytes(self.model.spec, self.page_size, DTYPE)
        return MemoryPlan(
            weights_bytes=self.weights_bytes,
            state_bytes=self.state_bytes,
            recurrent_bytes=self.recurrent_bytes,
            temporaries_bytes=temporaries_bytes,
            page_bytes=bytes_per_page,
            num_pages=choose_num_pages(config, budget, bytes_per_page, key="", cache_directory=None),
            page_size=self.page_size,
            reason=budget.reason,
        )
