"""Golden checkpoints as models, and one sequence's steps over a small page array."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.arrays import AttentionInputs, KVPages, QuantizedPages
from jaxserve.convert.match import match_tensors
from jaxserve.convert.read_safetensors import read_directory
from jaxserve.models.decoder import Decoder
from jaxserve.models.load import load_model, merge_model, split_model
from jaxserve.models.registry import family_of, resolve_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.models.tensors import ignored_patterns, logical_tensors
from jaxserve.runner.runner import recurrent_state_shapes

PAGE_SIZE = 8
PAGES_PER_ROW = 12


@pytest.fixture(scope="module", autouse=True)
def released_programs() -> Iterator[None]:
    """Compiled programs take memory maps, of which Linux gives a process 65,530: a module leaves none behind."""
    yield
    jax.clear_caches()


@dataclass(frozen=True)
class Golden:
    """One folder: spec, tensors by logical name, prompts, expected logits and greedy tokens."""

    spec: ModelSpec
    tensors: dict[str, np.ndarray]
    prompts: list[list[int]]
    logits: list[np.ndarray]
    expected: dict[str, Any]

    def read(self, name: str) -> np.ndarray:
        """What a converted checkpoint would give."""
        return self.tensors[name]

    def model(self, dtype: Any = jnp.float32, attention: str | None = "reference") -> Decoder:
        """The model, with the oracle's attention unless another is named."""
        return load_model(self.spec, self.read, dtype, attention=attention)


@pytest.fixture(scope="session")
def golden(golden_dir: Path) -> Callable[..., Golden]:
    """Loads a golden folder by name, its tensors found as conversion finds them; `overrides` change its config."""

    def load(name: str, **overrides: Any) -> Golden:
        folder = golden_dir / name
        source = read_directory(folder)
        spec = resolve_spec({**source.config, **overrides})
        family = family_of(spec)
        pairs, _ = match_tensors(logical_tensors(family, spec), source.tensors, ignored_patterns(family, spec))
        tensors = {wanted.name: tensor.read_rows(0, tensor.shape[0]) for wanted, tensor in pairs}
        expected = json.loads((folder / "expected.json").read_text())
        arrays = load_file(folder / "expected.safetensors")
        logits = [arrays[f"logits_{i}"] for i in range(len(expected["prompts"]))]
        return Golden(spec, tensors, expected["prompts"], logits, expected)

    return load


class SequenceRun:
    """Runs one sequence step by step in row 0 of two; row 1 is padding. Its pages, of each group its own, are in a scrambled order.

    A step of one token is a decode step (T = B = 2); a longer one is padded to 64 tokens.
    """

    def __init__(self, model: Decoder, page_dtype: str = "") -> None:
        self.model, self.page_dtype = model, page_dtype
        num_groups = len(model.spec.kv_groups)
        self.num_pages = 2 * PAGES_PER_ROW * num_groups
        pages = np.random.default_rng(0).permutation(np.arange(1, self.num_pages, dtype=np.int32))
        self.page_tables = pages[: PAGES_PER_ROW * num_groups].reshape(num_groups, PAGES_PER_ROW)
        model_def, self.weights = split_model(model)

        def step(is_decode: bool, weights: Any, tokens: jax.Array, ctx: AttentionInputs, *memory: Any) -> tuple[jax.Array, Any]:
            model = merge_model(model_def, weights)
            hidden, *memory = model.forward(tokens, ctx, *memory, is_decode=is_decode)
            return model.logits(hidden), memory

        # Compiling takes nearly all the time; what LLVM does not optimize runs fast enough.
        self.step = jax.jit(step, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
        self.start()

    def start(self, rope_length: int = 0) -> None:
        """Begins a new sequence, admitted at `rope_length` tokens, in pages and a slot of NaN: no token may read one unwritten."""
        spec = self.model.spec
        num_parts, num_kv_heads, head_dim = spec.page_shape
        shape = (self.num_pages, num_parts, num_kv_heads, PAGE_SIZE, head_dim)
        page: Any = jnp.full(shape, jnp.nan, self.model.dtype)
        if self.page_dtype:  # numbers of 127, all bits of a NaN in fp8
            page = QuantizedPages(jnp.full(shape, 127, self.page_dtype), jnp.full(shape[:-1], jnp.nan, jnp.float32))
        self.pages: KVPages = tuple(jax.tree.map(jnp.copy, page) for _ in range(spec.num_page_arrays))
        self.states = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), recurrent_state_shapes(spec, 2))
        self.length, self.rope_length = 0, rope_length

    def inputs(self, num_tokens: int) -> AttentionInputs:
        """The arrays of a step of the next `num_tokens` tokens, as `runner` would fill them."""
        size = 2 if num_tokens == 1 else 64
        position = np.zeros(size, np.int32)
        position[:num_tokens] = np.arange(self.length, self.length + num_tokens)
        is_real = np.arange(size) < num_tokens
        end = self.length + num_tokens
        return AttentionInputs(
            row_start=jnp.array([0, num_tokens, num_tokens], jnp.int32),
            row_slot=jnp.array([0, 1], jnp.int32),
            kv_length=jnp.array([end, 0], jnp.int32),
            page_tables=jnp.array(np.stack([self.page_tables, np.zeros_like(self.page_tables)])),
            token_row=jnp.array(np.where(is_real, 0, 2), jnp.int32),
            position=jnp.array(position),
            rope_length=jnp.full(size, self.rope_length, jnp.int32),
            write_page=jnp.array(np.where(is_real, self.page_tables[:, position // PAGE_SIZE], 0), jnp.int32),
            write_offset=jnp.array(position % PAGE_SIZE),
        )

    def feed(self, tokens: list[int]) -> np.ndarray:
        """Computes the tokens in one step. Returns their logits `[len(tokens), V]`."""
        ctx = self.inputs(len(tokens))
        padded = jnp.zeros(ctx.position.shape[0], jnp.int32).at[: len(tokens)].set(jnp.array(tokens, jnp.int32))
        logits, (self.pages, self.states) = self.step(len(tokens) == 1, self.weights, padded, ctx, self.pages, self.states)
        self.length += len(tokens)
        return np.asarray(logits)[: len(tokens)]


@pytest.fixture(scope="session")
def sequence_run() -> type[SequenceRun]:
    """The class above, for tests (test files import nothing from here)."""
    return SequenceRun
