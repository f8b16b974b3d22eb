"""What XLA makes of a step: no copy of a weight or of the pages, tables computed once, pages written in place."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.models.load import load_model, merge_model, split_model
from jaxserve.models.registry import family_of, resolve_spec
from jaxserve.models.tensors import logical_tensors

# Sizes whose products are all different, so that a weight is known by its number of elements. Heads 9 over 3, head dim 8.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 104,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 176,
    "vocab_size": 1000,
    "num_hidden_layers": 2,
}
NUM_PAGES, PAGE_SIZE = 37, 8
ALLOWED = {"parameter", "bitcast", "get-tuple-element", "tuple", "while"}


def compiled_step(is_tied: bool, dtype: Any, sequence_run: Any, num_tokens: int) -> tuple[Any, list[jax.Array], jax.Array]:
    """The compiled step, its weights and one page array."""
    spec = resolve_spec(CONFIG | {"tie_word_embeddings": is_tied})
    shapes = {tensor.name: tensor.shape for tensor in logical_tensors(family_of(spec), spec)}
    model = load_model(spec, lambda name: jnp.ones(shapes[name], jnp.float32), dtype, attention="xla")
    run = sequence_run(model)
    model_def, weights = split_model(model)
    pages = tuple(jnp.zeros((NUM_PAGES, 2, 3, PAGE_SIZE, 8), dtype) for _ in range(spec.num_layers))
    ctx = run.inputs(num_tokens)

    def step(weights: Any, pages: Any, tokens: jax.Array, ctx: Any) -> Any:
        model = merge_model(model_def, weights)
        hidden, pages, _ = model.forward(tokens, ctx, pages, is_decode=num_tokens == 1)
        return model.logits(hidden), pages

    tokens = jnp.zeros(ctx.position.shape, jnp.int32)
    return jax.jit(step, donate_argnums=1).lower(weights, pages, tokens, ctx).compile(), list(weights), pages[0]


def operations(hlo: str) -> Iterator[tuple[str, int]]:
    """Operation and number of elements of every array-valued instruction, those inside fusions too."""
    for line in hlo.splitlines():
        if match := re.match(r"\s*(?:ROOT )?%\S+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(", line):
            yield match[2], math.prod(int(size) for size in match[1].split(","))


@pytest.mark.parametrize(
    ("dtype", "is_tied", "num_tokens"),
    [("float32", True, 1), ("bfloat16", True, 1), ("float16", True, 1), ("bfloat16", False, 20), ("float32", False, 20)],
)
def test_no_weight_or_page_array_is_copied(dtype: str, is_tied: bool, num_tokens: int, sequence_run: Any) -> None:
    step, weights, pages = compiled_step(is_tied, jnp.dtype(dtype), sequence_run, num_tokens)
    hlo = step.as_text()
    weight_sizes = {leaf.size for leaf in weights if leaf.ndim > 1}
    assert len(weight_sizes) == 5  # qkv, out, gate and up, down, and the embedding which is of the head's size
    offending = Counter((kind, size) for kind, size in operations(hlo) if size in weight_sizes and kind not in ALLOWED)
    assert not offending
    # The scatter and the fusion that wraps it write in place: the donated array is the result.
    page_kinds = {kind for kind, size in operations(hlo) if size == pages.size}
    assert page_kinds <= ALLOWED | {"scatter", "fusion"}
    assert step.memory_analysis().alias_size_in_bytes == 2 * pages.nbytes


def test_rotary_tables_are_computed_once(sequence_run: Any) -> None:
    step, _, _ = compiled_step(True, jnp.bfloat16, sequence_run, 20)
    assert len(re.findall(r" cosine\(", step.as_text())) == 1
