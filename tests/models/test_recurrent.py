"""A Qwen3-Next recurrent layer against NumPy that reads the source's fused tensors, its spec, and where its state lies."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, softplus

from jaxserve.arrays import RecurrentState
from jaxserve.convert.match import match_tensors
from jaxserve.convert.source import SourceTensor
from jaxserve.errors import CheckpointError
from jaxserve.models.load import load_model
from jaxserve.models.recurrent import RecurrentInputs
from jaxserve.models.registry import family_of, resolve_spec
from jaxserve.models.spec import KVGroup, MLPSpec, ModelSpec
from jaxserve.models.tensors import ignored_patterns, logical_tensors
from jaxserve.runner.runner import recurrent_state_shapes

D = 12


@pytest.fixture
def config(golden_dir: Path) -> dict[str, Any]:
    return json.loads((golden_dir / "qwen3-next" / "config.json").read_text())


def random_source(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Tensors of every name and shape that a checkpoint of the spec has."""
    rng = np.random.default_rng(0)
    shapes = {t.sources[0]: t.shape if t.cut is None else t.cut.source_shape for t in logical_tensors(family_of(spec), spec)}
    return {name: rng.normal(scale=0.4, size=shape).astype(np.float32) for name, shape in shapes.items()}


def layer_of(spec: ModelSpec, source: dict[str, np.ndarray]) -> Any:
    """Layer 0's delta net, its tensors found as conversion finds them."""
    tensors = {
        name: SourceTensor(name, array.shape, array.dtype, "F32", array.nbytes, lambda a, b, array=array: array[a:b])
        for name, array in source.items()
    }
    family = family_of(spec)
    pairs, _ = match_tensors(logical_tensors(family, spec), tensors, ignored_patterns(family, spec))
    arrays = {wanted.name: tensor.read_rows(0, tensor.shape[0]) for wanted, tensor in pairs}
    return load_model(spec, arrays.__getitem__, jnp.float32, attention="reference").layers[0].attention


def expected(x: np.ndarray, source: dict[str, np.ndarray], heads: tuple[int, int], dims: tuple[int, int], eps: float) -> np.ndarray:
    """Qwen3NextGatedDeltaNet.forward of one sequence, in float64, step by step as it stands there."""
    w = {name.removeprefix("model.layers.0.linear_attn."): a.astype(np.float64) for name, a in source.items() if "layers.0.linear" in name}
    (num_k, num_v), (dk, dv), length = heads, dims, len(x)
    groups = num_v // num_k
    qkvz = (x @ w["in_proj_qkvz.weight"].T).reshape(length, num_k, 2 * dk + 2 * dv * groups)
    ba = (x @ w["in_proj_ba.weight"].T).reshape(length, num_k, 2 * groups)
    q, k, v, z = np.split(qkvz, [dk, 2 * dk, 2 * dk + groups * dv], axis=2)
    b, a = (part.reshape(length, num_v) for part in np.split(ba, 2, axis=2))
    mixed = np.concatenate([part.reshape(length, -1) for part in (q, k, v)], axis=1)
    kernel = w["conv1d.weight"][:, 0]
    padded = np.concatenate([np.zeros((kernel.shape[1] - 1, mixed.shape[1])), mixed])
    mixed = np.stack([(padded[t : t + kernel.shape[1]] * kernel.T).sum(axis=0) for t in range(length)])
    mixed = mixed * expit(mixed)
    q, k, v = np.split(mixed, [num_k * dk, 2 * num_k * dk], axis=1)
    q, k = (part.reshape(length, num_k, dk).repeat(groups, axis=1) for part in (q, k))
    q, k = (part / np.sqrt((part * part).sum(axis=-1, keepdims=True) + 1e-6) for part in (q, k))
    v, z = v.reshape(length, num_v, dv), z.reshape(length, num_v, dv)
    decay = -np.exp(w["A_log"]) * softplus(a + w["dt_bias"])
    state, out = np.zeros((num_v, dk, dv)), np.zeros((length, num_v, dv))
    for t in range(length):
        state *= np.exp(decay[t])[:, None, None]
        known = (state * k[t][:, :, None]).sum(axis=1)
        state += k[t][:, :, None] * ((v[t] - known) * expit(b[t])[:, None])[:, None]
        out[t] = (state * q[t][:, :, None]).sum(axis=1) * dk**-0.5
    out = out / np.sqrt((out * out).mean(axis=-1, keepdims=True) + eps) * w["norm.weight"] * z * expit(z)
    return out.reshape(length, -1) @ w["out_proj.weight"].T


@pytest.mark.parametrize(
    ("heads", "dims", "kernel", "chunks"),
    [((2, 6), (5, 3), 4, (9, 1, 1, 2, 5)), ((3, 3), (4, 8), 2, (1, 1, 70, 1)), ((1, 2), (6, 6), 6, (3, 2, 1, 1, 4))],
)
def test_a_layer_gives_what_the_source_says(
    config: dict[str, Any], heads: tuple[int, int], dims: tuple[int, int], kernel: int, chunks: tuple[int, ...]
) -> None:
    sizes = {"linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1], "linear_key_head_dim": dims[0],
             "linear_value_head_dim": dims[1], "linear_conv_kernel_dim": kernel, "hidden_size": D, "rms_norm_eps": 1e-3}  # fmt: skip
    spec = resolve_spec(config | sizes)
    source = random_source(spec)
    layer = layer_of(spec, source)
    x = np.random.default_rng(1).normal(size=(sum(chunks), D)).astype(np.float32)
    # Row 0 is a neighbour's single token, row 1 the sequence, row 2 padding; slot 3 is the null slot. No slot holds a number yet.
    states = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), recurrent_state_shapes(spec, 4))[0]
    run = jax.jit(lambda x, inputs, states, is_decode: layer(x, inputs, states, is_decode=is_decode), static_argnums=3)
    start, parts = 0, []
    for size in chunks:
        is_decode = size == 1
        num_tokens = 3 if is_decode else 80
        padded = np.zeros((num_tokens, D), np.float32)
        padded[0], padded[1 : 1 + size] = 7.0, x[start : start + size]
        inputs = RecurrentInputs(
            row_start=jnp.array([0, 1, 1 + size, 1 + size], jnp.int32),
            row_slot=jnp.array([2, 0, 3], jnp.int32),
            token_row=jnp.array([0] + [1] * size + [3] * (num_tokens - size - 1), jnp.int32),
            is_first=jnp.array([True, start == 0, True]),
        )
        out, states = run(padded, inputs, states, is_decode)
        parts.append(np.asarray(out)[1 : 1 + size])
        start += size
    np.testing.assert_allclose(np.concatenate(parts), expected(x, source, heads, dims, 1e-3), rtol=1e-4, atol=1e-4)
    assert isinstance(states, RecurrentState) and np.isnan(states.matrix[1]).all(), "a slot without a row is not touched"


def test_only_attention_has_pages(config: dict[str, Any]) -> None:
    types = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    spec = resolve_spec(config | {"num_hidden_layers": 4, "layer_types": types})
    assert spec.kv_groups == (KVGroup((0, 3)),) and spec.num_page_arrays == 2 and spec.page_shape == (2, 2, 16)
    assert spec.kv_places == ((0, 0), None, None, (0, 1)) and len(spec.recurrent_layers) == 2
    state = recurrent_state_shapes(spec, 5)[0]
    assert state.conv.shape == (5, 3, 2, 32) and state.matrix.shape == (5, 4, 8, 8) and state.matrix.dtype == jnp.float32


def test_where_the_config_is_silent(config: dict[str, Any]) -> None:
    spec = resolve_spec({k: v for k, v in config.items() if k not in ("layer_types", "mlp_only_layers")} | {"num_hidden_layers": 9})
    assert [place is not None for place in spec.kv_places] == [i in (3, 7) for i in range(9)]
    dense = resolve_spec(config | {"mlp_only_layers": [1]})
    assert [isinstance(layer.mlp, MLPSpec) for layer in dense.layers] == [False, True, False]
    assert all(isinstance(layer.mlp, MLPSpec) for layer in resolve_spec(config | {"num_experts": 0}).layers)


def test_layers_that_predict_further_tokens_are_left_out(config: dict[str, Any]) -> None:
    spec = resolve_spec(config)
    source = random_source(spec) | {"mtp.layers.0.mlp.gate.weight": np.zeros((4, 32), np.float32)}
    assert math.isfinite(layer_of(spec, source).norm.spec.eps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "full_attention at least once"),
        ({"layer_types": ["full_attention"] * 2}, "for each of 3 layers"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "linear_attention or full_attention"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 must be a multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1 at least 2"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_spec(config | changes)
