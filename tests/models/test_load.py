"""Loading: fused layouts, casts, what is refused, memory, and the way over the jit border."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.load import load_model, merge_model, split_model, storage_dtype
from jaxserve.models.loader import Loader
from jaxserve.models.registry import family_of, resolve_spec
from jaxserve.models.tensors import logical_tensors


def test_fused_weights_hold_each_part_at_its_place(golden: Callable[..., Any]) -> None:
    case = golden("llama-tied-gqa3")  # K = 3, G = 3, H = 6, D = 54, F = 80
    layer = case.model().layers[1]
    q, k, v = (case.tensors[f"layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    qkv = np.asarray(layer.attention.qkv[...])
    assert qkv.shape == (3, 5, 6, 54)
    for kv_head in range(3):
        for head in range(3):
            row = (kv_head * 3 + head) * 6
            np.testing.assert_array_equal(qkv[kv_head, head], q[row : row + 6])
        np.testing.assert_array_equal(qkv[kv_head, 3], k[kv_head * 6 : kv_head * 6 + 6])
        np.testing.assert_array_equal(qkv[kv_head, 4], v[kv_head * 6 : kv_head * 6 + 6])
    gate_up = np.asarray(layer.mlp.inner[...])
    assert gate_up.shape == (2, 80, 54)
    np.testing.assert_array_equal(gate_up[0], case.tensors["layers.1.mlp.gate_proj.weight"])
    np.testing.assert_array_equal(gate_up[1], case.tensors["layers.1.mlp.up_proj.weight"])


def test_weights_are_cast_to_the_dtype(golden: Callable[..., Any]) -> None:
    case = golden("llama-bias")
    for dtype in (jnp.bfloat16, jnp.float32):
        model = case.model(dtype)
        assert {leaf.dtype for leaf in split_model(model)[1]} == {jnp.dtype(dtype)}
    # XLA:CPU would widen float16 weights in every step.
    assert {leaf.dtype for leaf in split_model(case.model(jnp.float16))[1]} == {jnp.dtype(jnp.float32)}
    assert storage_dtype(jnp.float16, "gpu") == jnp.float16 and storage_dtype(jnp.bfloat16, "cpu") == jnp.bfloat16


def test_a_model_crosses_the_jit_border_as_a_flat_tuple(golden: Callable[..., Any]) -> None:
    model = golden("llama-bias").model()
    model_def, leaves = split_model(model)
    again_def, again = split_model(merge_model(model_def, leaves))
    assert model_def == again_def and hash(model_def) == hash(again_def)
    assert all(a is b for a, b in zip(leaves, again, strict=True))
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    # Embedding, head, final norm; of each layer two norms, four weights, four biases.
    assert len(leaves) == 3 + 2 * 10


def test_weights_go_to_the_device_asked_for(golden: Callable[..., Any]) -> None:
    case = golden("llama-sharded")
    device = jax.devices()[-1]
    model = load_model(case.spec, case.read, jnp.float32, device=device)
    assert {leaf.device for leaf in split_model(model)[1]} == {device}


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.mlp.up_proj.weight", "layers.0.self_attn.k_proj.bias"])
def test_a_missing_tensor_is_named(name: str, golden: Callable[..., Any]) -> None:
    case = golden("llama-bias")
    del case.tensors[name]
    with pytest.raises(CheckpointError, match=name):
        case.model()


def test_a_wrong_shape_is_named(golden: Callable[..., Any]) -> None:
    case = golden("llama-bias")
    case.tensors["layers.0.mlp.up_proj.weight"] = np.zeros((64, 31), np.float32)
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.up_proj.weight has shape \(64, 31\); the config says \(64, 32\)"):
        case.model()


def test_parts_that_leave_a_gap_are_our_bug(golden: Callable[..., Any]) -> None:
    case = golden("llama-bias")
    loader = Loader(case.spec, case.read, np.dtype(np.float32), None)
    parts: dict[str, tuple[int | slice, ...]] = {f"layers.0.mlp.{name}_proj.weight": (i,) for i, name in enumerate(("gate", "up"))}
    assert loader.fused((2, 64, 32), parts).shape == (2, 64, 32)
    del parts["layers.0.mlp.up_proj.weight"]
    with pytest.raises(AssertionError, match=r"\(2, 64, 32\)"):
        loader.fused((2, 64, 32), parts)


def test_the_host_holds_about_one_layer_beside_the_model() -> None:
    config = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "vocab_size": 64, "num_hidden_layers": 12}
    spec = resolve_spec({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **config})
    shapes = {tensor.name: tensor.shape for tensor in logical_tensors(family_of(spec), spec)}
    tracemalloc.start()
    try:
        model = load_model(spec, lambda name: np.zeros(shapes[name], np.float32), jnp.float32)
        # NumPy's buffers are traced; the device's own copies are not, so what is kept by aliasing counts at most once.
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    total = sum(leaf.nbytes for leaf in split_model(model)[1])
    layer = 4 * (4 * 256 * 256 + 3 * 256 * 1024)
    assert total > 11 * layer
    assert peak < total + 1.5 * layer
