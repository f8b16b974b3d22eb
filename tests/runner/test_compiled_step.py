"""What the compiled steps of a real model's shapes must not hold: copies or conversions of a weight or of a page array."""

from __future__ import annotations

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.buckets import Buckets
from jaxserve.models.load import load_model
from jaxserve.models.registry import family_of, resolve_spec
from jaxserve.models.tensors import logical_tensors
from jaxserve.runner.runner import ModelRunner, RunnerShape

# SmolLM2-135M's widths with two layers: enough for XLA to choose as it does for all thirty.
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "num_hidden_layers": 2, "hidden_size": 576,
    "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 100000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NUM_PAGES = 160


def make_runner(dtype, buckets, attention, num_pages=NUM_PAGES):
    spec = resolve_spec(json.loads(json.dumps(CONFIG)))
    shapes = {tensor.name: tensor.shape for tensor in logical_tensors(family_of(spec), spec)}
    model = load_model(spec, lambda name: np.zeros(shapes[name], np.float32), dtype, device=jax.devices()[0], attention=attention)
    shape = RunnerShape(buckets=buckets, num_pages=num_pages, page_size=16, max_model_len=512, max_penalty_slots=4)
    return ModelRunner(model, spec, shape, kv_dtype=dtype, device=jax.devices()[0])


def moved_shapes(hlo):
    """Element counts of every array that a copy, convert or transpose instruction produces."""
    found = re.findall(r"= \w+\[([\d,]*)\][^ ]* (copy|convert|transpose|copy-start)\(", hlo)
    return [(math.prod(map(int, dims.split(","))) if dims else 1, op) for dims, op in found]


@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_no_weight_or_page_array_is_copied_or_converted(dtype, is_decode):
    buckets = Buckets(8, (8,), (64,))
    runner = make_runner(dtype, buckets, "xla")
    bucket = next(b for b in buckets.all() if b.is_decode is is_decode)
    compiled = runner.lower(bucket)().compile()
    spec = runner.spec
    pages = NUM_PAGES * math.prod(spec.page_shape) * 16
    weights = {w.size for w in runner._weights if w.ndim > 1}
    # Not every array of that many elements is a weight, but none of the step's own arrays has as many.
    too_large = [(size, op) for size, op in moved_shapes(compiled.as_text()) if size == pages or size in weights]
    assert too_large == []
    penalty = runner._shapes[2].output_counts.size
    assert [(size, op) for size, op in moved_shapes(compiled.as_text()) if size == penalty] == []
    # Donation reaches the compiler: pages, slots and penalties are updated where they lie.
    state = sum(math.prod(s.shape) * s.dtype.itemsize for part in runner._shapes for s in part)
    assert compiled.memory_analysis().alias_size_in_bytes >= state


def test_temporaries_do_not_depend_on_the_number_of_pages():
    """Memory is planned from a program compiled with hardly any pages."""
    buckets = Buckets(8, (8,), (64,))
    bucket = buckets.all()[-1]
    sizes = [
        make_runner(jnp.bfloat16, buckets, "xla", num_pages).lower(bucket)().compile().memory_analysis().temp_size_in_bytes
        for num_pages in (2, NUM_PAGES)
    ]
    assert sizes[1] <= sizes[0] * 1.05
