"""What the compiled steps of a model with recurrent layers must not hold: copies of their state."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.buckets import Bucket, Buckets
from jaxserve.models.load import load_model
from jaxserve.models.registry import family_of, resolve_spec
from jaxserve.models.tensors import logical_tensors
from jaxserve.runner.runner import ModelRunner, RunnerShape

BUCKETS = Buckets(13, (13,), (150,))
# Sizes that nothing else in the step has.
CHANGES = {
    "linear_key_head_dim": 24, "linear_value_head_dim": 20, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize("bucket", [BUCKETS.all()[0], BUCKETS.all()[-1]], ids=["decode", "mixed"])
def test_states_are_updated_where_they_lie(golden_dir: Path, bucket: Bucket) -> None:
    spec = resolve_spec(json.loads((golden_dir / "qwen3-next" / "config.json").read_text()) | CHANGES)
    shapes = {tensor.name: tensor.shape for tensor in logical_tensors(family_of(spec), spec)}
    device = jax.devices()[0]
    model = load_model(spec, lambda name: np.zeros(shapes[name], np.float32), jnp.float32, device=device, attention="xla")
    shape = RunnerShape(buckets=BUCKETS, num_pages=40, page_size=16, max_model_len=512, max_penalty_slots=4)
    runner = ModelRunner(model, spec, shape, kv_dtype=jnp.float32, device=device)
    compiled = runner.lower(bucket)().compile()
    states = {math.prod(array.shape) for state in runner._shapes[3] for array in state}
    assert len(states) == 2
    made = re.findall(r"= \w+\[([\d,]+)\][^ ]* ([\w-]+)\(", compiled.as_text())
    operations = {operation for dims, operation in made if math.prod(map(int, dims.split(","))) in states}
    assert operations and not operations & {"copy", "copy-start", "convert", "transpose", "select", "broadcast", "concatenate"}
    donated = sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(runner._shapes))
    assert compiled.memory_analysis().alias_size_in_bytes >= donated
    runner.close()
