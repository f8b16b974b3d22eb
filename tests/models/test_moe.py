"""Mixtures of experts against brute force over all experts: routing, the blocks that tokens are sorted into, and what comes out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.models import moe as moe_module
from jaxserve.models.mlp import MLP
from jaxserve.models.moe import MAX_BLOCK, MIN_BLOCK, MoE, block_size, route, sort_into_blocks
from jaxserve.models.shards import AXIS, Shards
from jaxserve.models.spec import MoESpec
from pallas_kernels import dispatch, grouped_linear
from pallas_kernels.grouped_linear.api import NO_COPY

USABLE = [name for name, reason in dispatch.available().items() if reason is None]
D, F, E = 16, 12, 8
CUT = ("inner", "down", "inner_bias", "down_bias")
"""Tensors of which each device has its experts' part."""
MIXTRAL = {"num_experts": E, "top_k": 2, "size": F, "activation": "silu", "is_normalized": True}
SPECS = {
    "softmax": MoESpec(**MIXTRAL),
    "softmax, not normalized": MoESpec(**MIXTRAL | {"is_normalized": False, "top_k": 3}),
    "every expert": MoESpec(**MIXTRAL | {"top_k": E}),
    "one expert, input weighted, shared": MoESpec(
        **MIXTRAL | {"is_normalized": False, "top_k": 1}, scoring="sigmoid", is_input_weighted=True, shared_size=20
    ),
    "groups by their best": MoESpec(**MIXTRAL | {"is_normalized": False}, num_groups=4, num_top_groups=2, scale=3.0, shared_size=F),
    "sigmoid, bias for the choice, groups by their best two": MoESpec(
        **MIXTRAL, scoring="sigmoid", has_score_bias=True, num_groups=2, num_top_groups=1, num_group_scores=2, scale=2.5
    ),
    "biases and a bounded activation": MoESpec(**MIXTRAL, has_router_bias=True, has_expert_bias=True, clamp=(1.702, 0.5)),
    "a shared expert with a gate": MoESpec(**MIXTRAL, shared_size=F, has_shared_gate=True),
}


def random_weights(spec: MoESpec, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"router": (E, D), "inner": (E, 2 * F, D), "down": (E, D, F)}
    if spec.has_router_bias:
        shapes["router_bias"] = (E,)
    if spec.has_score_bias:
        shapes["score_bias"] = (E,)
    if spec.has_expert_bias:
        shapes |= {"inner_bias": (E, 2 * F), "down_bias": (E, D)}
    if spec.shared_size is not None:
        shapes |= {"shared_inner": (2, spec.shared_size, D), "shared_down": (D, spec.shared_size)}
    if spec.has_shared_gate:
        shapes["shared_gate"] = (1, D)
    return {name: (0.5 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def module(spec: MoESpec, weights: Mapping[str, np.ndarray], backend: str) -> MoE:
    arrays = {name: jnp.asarray(array) for name, array in weights.items()}
    shared = None
    if spec.shared_size is not None:
        shared = MLP(spec.activation, arrays.pop("shared_inner"), arrays.pop("shared_down"), backend=backend)
    return MoE(spec, **arrays, shared=shared, backend=backend)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def choice_of(spec: MoESpec, x: np.ndarray, weights: Mapping[str, np.ndarray]) -> dict[int, float]:
    """The experts of one token and their weights, from the definition."""
    logits = weights["router"].astype(np.float64) @ x + weights.get("router_bias", 0.0)
    scores = sigmoid(logits) if spec.scoring == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    ranked = scores + weights.get("score_bias", 0.0)
    groups = [range(start, start + E // spec.num_groups) for start in range(0, E, E // spec.num_groups)]
    groups.sort(key=lambda group: -sum(sorted(ranked[e] for e in group)[-spec.num_group_scores :]))
    allowed = [e for group in groups[: spec.num_top_groups] for e in group]
    chosen = sorted(allowed, key=lambda e: -ranked[e])[: spec.top_k]
    total = sum(scores[e] for e in chosen) if spec.is_normalized else 1.0
    return {e: spec.scale * scores[e] / total for e in chosen}


def output_of(spec: MoESpec, x: np.ndarray, weights: Mapping[str, np.ndarray]) -> np.ndarray:
    """What one token gets, by all its experts one after the other."""

    def silu_gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        gated = gate @ x
        return down @ (gated * sigmoid(gated) * (up @ x))

    def expert(e: int, x: np.ndarray) -> np.ndarray:
        inner = weights["inner"][e].astype(np.float64) @ x + (weights["inner_bias"][e] if spec.has_expert_bias else 0.0)
        gate, up = inner[:F], inner[F:]
        if spec.clamp is None:
            hidden = gate * sigmoid(gate) * up
        else:
            alpha, limit = spec.clamp
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            hidden = gate * sigmoid(alpha * gate) * (up + 1)
        return weights["down"][e] @ hidden + (weights["down_bias"][e] if spec.has_expert_bias else 0.0)

    x = x.astype(np.float64)
    choice = choice_of(spec, x, weights)
    out = sum(expert(e, w * x) if spec.is_input_weighted else w * expert(e, x) for e, w in choice.items())
    if spec.shared_size is not None:
        gate, up = weights["shared_inner"].astype(np.float64)
        shared = silu_gated(x, gate, up, weights["shared_down"])
        out = out + (shared * sigmoid(weights["shared_gate"][0] @ x) if spec.has_shared_gate else shared)
    return np.asarray(out)


def inputs(num_tokens: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_tokens, D)).astype(np.float32)


@pytest.mark.parametrize("name", SPECS)
def test_routing_against_its_definition(name: str) -> None:
    spec, x = SPECS[name], inputs(50)
    weights = random_weights(spec)
    biases = [None if (bias := weights.get(key)) is None else jnp.asarray(bias) for key in ("router_bias", "score_bias")]
    chosen = jax.jit(partial(route, spec))(jnp.asarray(x), jnp.asarray(weights["router"]), *biases)
    assert chosen.expert.shape == chosen.weight.shape == (50, spec.top_k) and chosen.weight.dtype == jnp.float32
    for t in range(50):
        expected = choice_of(spec, x[t], weights)
        assert set(np.asarray(chosen.expert[t]).tolist()) == set(expected)
        for e, weight in zip(np.asarray(chosen.expert[t]), np.asarray(chosen.weight[t]), strict=True):
            assert weight == pytest.approx(expected[int(e)], rel=1e-4)


def test_the_bias_for_the_choice_does_not_weigh() -> None:
    spec = MoESpec(num_experts=3, top_k=1, size=F, activation="silu", scoring="sigmoid", has_score_bias=True)
    router = jnp.array([[2.0], [1.0], [0.0]])
    chosen = route(spec, jnp.ones((1, 1)), router, None, jnp.array([0.0, 0.0, 5.0]))
    assert chosen.expert.tolist() == [[2]]
    assert chosen.weight.tolist() == [[0.5]]


def test_routing_is_in_float32_whatever_the_activations() -> None:
    # In bfloat16 the two experts' logits would be equal, and the first would win.
    spec = MoESpec(num_experts=2, top_k=1, size=F, activation="silu")
    chosen = route(spec, jnp.ones((1, 1), jnp.bfloat16), jnp.array([[1.0], [1.0 + 1e-4]]), None, None)
    assert chosen.expert.tolist() == [[1]] and chosen.weight.dtype == jnp.float32


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "size"),
    [(1, 1, 8, MIN_BLOCK), (8, 2, 8, MIN_BLOCK), (32, 2, 8, 8), (33, 2, 8, 16), (512, 8, 128, 32), (4096, 2, 8, MAX_BLOCK)],
)
def test_block_size_follows_the_share_of_an_expert(num_tokens: int, top_k: int, num_experts: int, size: int) -> None:
    assert block_size(num_tokens, top_k, num_experts) == size


sort_compiled = jax.jit(sort_into_blocks, static_argnums=2)


def test_eight_of_64_experts_multiply_less_than_a_third_of_the_rows_of_all() -> None:
    rows = {}
    for top_k in (8, 64):
        expert = np.argsort(np.random.default_rng(0).standard_normal((256, 64)), axis=-1)[:, :top_k].astype(np.int32)
        rows[top_k] = int(sort_compiled(expert, jnp.int32(256), 64).num_used) * block_size(256, top_k, 64)
    assert rows[64] == 256 * 64
    assert 256 * 8 <= rows[8] <= 0.3 * rows[64]


@pytest.mark.parametrize(("num_all", "top_k", "num_experts"), [(1, 1, 4), (7, 2, 4), (24, 3, 5), (64, 2, 2), (6, 4, 64)])
@given(seed=st.integers(0, 2**32), skew=st.sampled_from([0.0, 1.0, 30.0]), share=st.floats(0, 1))
@settings(max_examples=30, deadline=None)  # the first example compiles
def test_every_copy_has_a_row_of_its_own_in_a_block_of_its_expert(
    num_all: int, top_k: int, num_experts: int, seed: int, skew: float, share: float
) -> None:
    rng = np.random.default_rng(seed)
    # With skew all tokens want about the same experts.
    ranking = rng.standard_normal((num_all, num_experts)) + skew * np.arange(num_experts)
    expert = np.argsort(-ranking, axis=-1)[:, :top_k].astype(np.int32)
    num_tokens = round(share * num_all)
    place, block_expert, num_used, is_placed = map(np.asarray, sort_compiled(expert, jnp.int32(num_tokens), num_experts))

    size = block_size(num_all, top_k, num_experts)
    counts = np.bincount(expert[:num_tokens].reshape(-1), minlength=num_experts)
    assert num_used == sum(-(-count // size) for count in counts) <= len(block_expert)
    assert len(place) == len(block_expert) * size
    (rows,) = np.nonzero(place != NO_COPY)
    assert sorted(place[rows].tolist()) == list(range(num_tokens * top_k)), "each copy once, none of padding"
    assert (rows < num_used * size).all()
    np.testing.assert_array_equal(block_expert[rows // size], expert.reshape(-1)[place[rows]])
    np.testing.assert_array_equal(is_placed, np.broadcast_to((np.arange(num_all) < num_tokens)[:, None], expert.shape))
    assert (np.diff(block_expert[:num_used]) >= 0).all(), "an expert's weights are read once"
    assert ((block_expert >= 0) & (block_expert < num_experts)).all()


@pytest.mark.parametrize(
    ("name", "backend"), [(name, "xla") for name in SPECS] + [("a shared expert with a gate", name) for name in USABLE if name != "xla"]
)
def test_output_is_that_of_every_expert_in_turn(name: str, backend: str) -> None:
    spec, weights = SPECS[name], random_weights(SPECS[name])
    x, num_tokens = inputs(24), 21
    moe = module(spec, weights, backend)
    expected = np.stack([output_of(spec, token, weights) for token in x[:num_tokens]])

    step = jax.jit(lambda x, num_tokens: moe(x, num_tokens), compiler_options={"xla_backend_optimization_level": 0})
    out = np.asarray(step(x, jnp.int32(num_tokens)))
    np.testing.assert_allclose(out[:num_tokens], expected, rtol=1e-4, atol=1e-4)
    # What padding tokens hold changes no bit; nor does a real token that is not finite, but for itself.
    other = x.copy()
    other[num_tokens:] = np.nan
    np.testing.assert_array_equal(np.asarray(step(other, jnp.int32(num_tokens)))[:num_tokens], out[:num_tokens])
    other[0], other[5] = np.nan, np.inf
    spoiled = np.asarray(step(other, jnp.int32(num_tokens)))[:num_tokens]
    good = [t for t in range(num_tokens) if t not in (0, 5)]
    np.testing.assert_array_equal(spoiled[good], out[good])
    assert not np.isfinite(spoiled[[0, 5]]).any()


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", ["every expert", "one expert, input weighted, shared", "biases and a bounded activation"])
def test_what_nobody_computed_reaches_nothing(name: str, num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some implementations leave rows of the products undefined: those of padding tokens, and of experts that other devices have."""
    spec, x = replace(SPECS[name], shared_size=None), jnp.asarray(inputs(24))
    weights = random_weights(spec)
    shards = Shards(num_devices, has_expert_parallel=num_devices > 1)

    def parts(key: str, array: np.ndarray) -> jax.Array:
        return jnp.asarray(array.reshape(num_devices, -1, *array.shape[1:]) if key in CUT else np.stack([array] * num_devices))

    def step() -> np.ndarray:
        def one_device(arrays: dict[str, jax.Array]) -> jax.Array:
            return MoE(spec, **arrays, backend="xla", shards=shards)(x, jnp.int32(21))

        of_devices = jax.jit(jax.vmap(one_device, axis_name=AXIS))({key: parts(key, array) for key, array in weights.items()})
        return np.asarray(of_devices.sum(axis=0))

    def hostile(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *where: jax.Array, copies: int = 1, **options: Any) -> jax.Array:
        place, block_expert, num_used = where
        size = place.shape[0] // block_expert.shape[0]
        used = jnp.where(jnp.arange(place.shape[0]) < num_used * size, place, NO_COPY)
        is_computed = jnp.zeros(x.shape[0] * copies, jnp.bool_).at[used].set(True, mode="drop")
        return jnp.where(is_computed[:, None], grouped_linear(x, weight, bias, *where, copies=copies, **options), jnp.nan)

    expected = step()
    whole = np.stack([output_of(spec, token, weights) for token in np.asarray(x[:21])])
    np.testing.assert_allclose(expected[:21], whole, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(moe_module, "grouped_linear", hostile)
    np.testing.assert_array_equal(step(), expected)


def test_narrow_activations_keep_their_dtype() -> None:
    spec = SPECS["a shared expert with a gate"]
    weights = random_weights(spec)
    narrow = {name: array if "router" in name else array.astype(jnp.bfloat16) for name, array in weights.items()}
    x = inputs(10)
    moe = module(spec, narrow, "xla")
    out = jax.jit(lambda x: moe(x, jnp.int32(10)))(jnp.asarray(x, jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    expected = np.stack([output_of(spec, token, weights) for token in np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)])
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.05 * np.abs(expected).max())


def test_no_array_holds_every_token_for_every_expert() -> None:
    num_tokens, experts, d, f = 64, 32, 16, 24
    weights = [jnp.zeros(shape) for shape in ((experts, d), (experts, 2 * f, d), (experts, d, f))]
    moe = MoE(MoESpec(num_experts=experts, top_k=2, size=f, activation="silu"), *weights, backend="xla")
    graphdef, state = nnx.split(moe)
    step = jax.jit(lambda state, x, n: nnx.merge(graphdef, state)(x, n))
    text = step.lower(state, jnp.zeros((num_tokens, d)), jnp.int32(num_tokens)).compile().as_text()
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"(?:f32|bf16)\[([0-9,]+)\]", text)]
    assert max(sizes) >= experts * 2 * f * d, "the weights are in the program"
    assert max(size for size in sizes if size not in (experts * 2 * f * d, experts * d * f)) < num_tokens * experts * f / 2
