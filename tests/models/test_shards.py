"""Models in shards: what each device computes and holds, which sizes are refused, and what real models take on each device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.models.load import abstract_model, split_model
from jaxserve.models.moe import sort_into_blocks
from jaxserve.models.registry import resolve_spec
from jaxserve.models.shards import Shards, shard_spec, tensor_parts
from jaxserve.models.spec import ModelSpec
from jaxserve.models.tensors import tensor_shapes
from pallas_kernels.grouped_linear.api import NO_COPY

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "vocab_size": 1003}
DENSE = LLAMA | {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
LLAMA_70B = LLAMA | {
    "vocab_size": 128256, "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 28672,
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "num_hidden_layers": 48, "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 100, "num_hidden_layers": 2, "hidden_size": 64,
    "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 96, "num_local_experts": 6, "num_experts_per_tok": 2,
}  # fmt: skip


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return resolve_spec(config)


@functools.cache
def weight_bytes(spec: ModelSpec, shards: Shards) -> int:
    """Of the whole model, or of one of its shards."""
    leaves = split_model(abstract_model(spec, jnp.bfloat16, shards=shards))[1]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) // shards.count


def test_a_device_computes_its_share_of_heads_and_mlp() -> None:
    layer = shard_spec(spec_of(DENSE), Shards(4)).layers[0]
    # Two kv heads for four devices: each is on two.
    assert (layer.attention.num_heads, layer.attention.num_kv_heads, layer.mlp.size) == (2, 1, 24)
    moe = shard_spec(spec_of(MIXTRAL), Shards(2)).layers[0].mlp
    assert (moe.num_experts, moe.size) == (6, 48)
    moe = shard_spec(spec_of(MIXTRAL), Shards(2, has_expert_parallel=True)).layers[0].mlp
    assert (moe.num_experts, moe.size) == (6, 96)


def test_a_tensor_is_cut_where_its_shape_shrinks() -> None:
    parts = tensor_parts(spec_of(DENSE), Shards(4))
    layer = "layers.1."
    assert parts["embed_tokens.weight"][:3] == (0, 251, 4)  # 4 x 251 rows, one of them past the vocabulary
    assert parts[layer + "self_attn.q_proj.weight"][:3] == (0, 16, 4)
    assert parts[layer + "self_attn.k_proj.weight"][:3] == (0, 8, 2)  # one part for two devices
    assert parts[layer + "self_attn.o_proj.weight"][:3] == (1, 16, 4)
    assert parts[layer + "mlp.down_proj.weight"][:3] == (1, 24, 4)
    assert parts[layer + "mlp_norm.weight"].axis is None
    assert not any(part.is_first_only for part in parts.values())


def test_a_bias_is_added_once(golden: Callable[..., Any]) -> None:
    parts = tensor_parts(golden("starcoder2").spec, Shards(2))
    first_only = {name.split(".", 2)[2] for name, part in parts.items() if part.is_first_only}
    assert first_only == {"self_attn.o_proj.bias", "mlp.down_proj.bias"}
    # With expert parallelism an expert's product is whole, and so is its bias.
    for has_expert_parallel in (False, True):
        parts = tensor_parts(golden("gpt-oss").spec, Shards(2, has_expert_parallel))
        assert parts["layers.0.mlp.experts.3.down_proj.bias"].is_first_only is not has_expert_parallel


@pytest.mark.parametrize(
    ("config", "shards", "reason", "remedy"),
    [
        (DENSE, Shards(3), "the model has 8 attention heads, which 3 devices cannot share evenly", "--tensor-parallel-size 2 or 4."),
        (DENSE, Shards(16), "8 attention heads", "--tensor-parallel-size 8."),
        (DENSE | {"num_attention_heads": 6, "num_key_value_heads": 3}, Shards(2), "3 kv heads: 2 devices cannot share", "1 or 3."),
        (DENSE | {"intermediate_size": 100}, Shards(8), "100 units inside an MLP", "4."),
        (MIXTRAL, Shards(4, True), "6 experts, which 4", "2, or leave out --enable-expert-parallel."),
        (MIXTRAL | {"intermediate_size": 98}, Shards(4, True), "6 experts, which 4", "--tensor-parallel-size 2."),
        (DENSE, Shards(2, True), "the model has no experts", "leave out --enable-expert-parallel."),
        (MIXTRAL, Shards(1, True), "tensor_parallel_size is 1", "--tensor-parallel-size, or leave out --enable-expert-parallel."),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(config: dict[str, Any], shards: Shards, reason: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        shard_spec(spec_of(config), shards)
    assert reason in str(refused.value) and str(refused.value).endswith(remedy), refused.value


@pytest.mark.parametrize(("config", "shards"), [(LLAMA_70B, Shards(8)), (QWEN3_30B_A3B, Shards(8)), (QWEN3_30B_A3B, Shards(8, True))])
def test_each_device_holds_its_share_of_a_real_model(config: dict[str, Any], shards: Shards) -> None:
    spec = spec_of(config)
    shapes = dict(tensor_shapes(spec))
    # Counted apart: what every device needs whole, and kv heads that are fewer than the devices.
    apart = {name: math.prod(shape) for name, shape in shapes.items() if "norm" in name or "router" in name}
    kv = {name: math.prod(shape) for name, shape in shapes.items() if "k_proj" in name or "v_proj" in name}
    num_kv_heads = config["num_key_value_heads"]
    cut = sum(map(math.prod, shapes.values())) - sum(apart.values()) - sum(kv.values())
    share = 2 * cut / shards.count + 2 * sum(kv.values()) / min(num_kv_heads, shards.count)
    router = sum(size for name, size in apart.items() if "router" in name)
    held = weight_bytes(spec, shards) - 2 * sum(apart.values()) - 2 * router  # the router is held in float32
    assert share <= held <= 1.05 * share
    assert weight_bytes(spec, shards) <= 1.05 * weight_bytes(spec, Shards()) / shards.count + 2 * sum(apart.values()) + 2 * sum(kv.values())


def test_shapes_alone_are_those_of_the_loaded_model(golden: Callable[..., Any]) -> None:
    for folder in ("llama-bias", "deepseek-v3", "qwen3-next", "gpt-oss", "gpt2"):
        case = golden(folder)
        model_def, weights = split_model(case.model())
        abstract_def, shapes = split_model(abstract_model(case.spec, jnp.float32, platform="cpu", attention="reference"))
        assert model_def == abstract_def
        assert [(w.shape, w.dtype) for w in weights] == [(s.shape, s.dtype) for s in shapes]


def test_experts_of_other_devices_take_no_rows() -> None:
    # Six experts, this device has the first two; the third token is padding.
    expert = np.array([[0, 4], [1, 0], [1, 1], [5, 3]], np.int32)[np.array([0, 1, 3, 2])]
    blocks = jax.jit(partial(sort_into_blocks, num_experts=2, num_all_experts=6))(jnp.asarray(expert), jnp.int32(3))
    size = len(blocks.place) // len(blocks.expert)
    assert int(blocks.num_used) == 2 and blocks.expert[:2].tolist() == [0, 1]
    assert blocks.place[:size].tolist() == [0, 3] + [NO_COPY] * (size - 2)
    assert blocks.place[size : 2 * size].tolist() == [2] + [NO_COPY] * (size - 1)
    assert (blocks.place[2 * size :] == NO_COPY).all()
    assert blocks.is_placed.tolist() == [[True, False], [True, True], [False, False], [False, False]]
