"""Configs to specs: both spellings, multimodal wrappers, tensor names, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.registry import FAMILIES, family_of, resolve_spec, supported_architectures
from jaxserve.models.spec import KVGroup, ModelSpec, TensorSpec
from jaxserve.models.tensors import ignored_patterns, logical_tensors

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
MINIMAL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}


def config_of(folder: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((GOLDEN / folder / "config.json").read_text())
    return config


def tensors_of(spec: ModelSpec) -> dict[str, TensorSpec]:
    return {tensor.name: tensor for tensor in logical_tensors(family_of(spec), spec)}


def is_ignored(spec: ModelSpec, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in ignored_patterns(family_of(spec), spec))


def test_fields_of_a_spec() -> None:
    spec = resolve_spec(config_of("llama-tied-gqa3"))
    assert (spec.family, spec.model_type, spec.architectures) == ("llama", "llama", ("LlamaForCausalLM",))
    assert (spec.vocab_size, spec.num_layers, spec.hidden_size) == (320, 2, 54)
    (layer,) = set(spec.layers)
    attention, mlp = layer.attention, layer.mlp
    assert (attention.num_heads, attention.num_kv_heads, attention.num_query_groups, attention.head_dim) == (9, 3, 3, 6)
    assert (attention.has_qkv_bias, attention.has_out_bias, attention.scale) == (False, False, 6**-0.5)
    assert (mlp.size, mlp.activation, mlp.is_gated, mlp.has_bias) == (80, "silu", True, False)
    assert (spec.norm.eps, spec.norm.is_centered, spec.norm.has_bias, spec.head.is_tied) == (1e-5, False, False, True)
    assert (spec.derived_max_model_len, spec.dtype) == (256, "float32")
    assert (spec.bos_token_ids, spec.eos_token_ids) == ((0,), (1,))
    assert spec.kv_groups == (KVGroup((0, 1)),) and spec.kv_groups[0].num_layers == 2
    assert spec.kv_places == ((0, 0), (0, 1))
    assert spec.page_shape == (2, 3, 6) and spec.num_page_arrays == 2
    biased = resolve_spec(config_of("llama-bias")).layers[0]
    assert biased.attention.has_qkv_bias and biased.attention.has_out_bias and biased.mlp.has_bias


def test_head_dim_comes_from_the_config_first() -> None:
    def head_dim(**changes: Any) -> int:
        return resolve_spec(MINIMAL | changes).layers[0].attention.head_dim

    assert (head_dim(), head_dim(head_dim=32), head_dim(head_dim=None)) == (16, 32, 16)


def test_absent_and_null_fields_take_transformers_defaults() -> None:
    spec = resolve_spec(MINIMAL | {"num_key_value_heads": None, "rms_norm_eps": None})
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    assert (attention.num_kv_heads, spec.num_layers, mlp.size, spec.norm.eps) == (4, 32, 11008, 1e-6)
    assert (attention.rope.kind, attention.rope.theta) == ("default", 10_000.0)
    assert (spec.head.is_tied, spec.dtype, spec.eos_token_ids) == (False, None, ())


def test_eos_may_be_a_list() -> None:
    assert resolve_spec(MINIMAL | {"eos_token_id": [7, 9]}).eos_token_ids == (7, 9)


def test_an_untied_head_is_optional_and_a_tied_one_is_not_a_tensor() -> None:
    untied, tied = resolve_spec(MINIMAL), resolve_spec(MINIMAL | {"tie_word_embeddings": True})
    assert tensors_of(untied)["lm_head.weight"].is_optional
    assert [tensor.name for tensor in tensors_of(untied).values() if tensor.is_optional] == ["lm_head.weight"]
    assert "lm_head.weight" not in tensors_of(tied)
    # Some writers keep the shared tensor under the head's name only.
    assert tensors_of(tied)["embed_tokens.weight"].sources[-1].endswith("lm_head.weight")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("layers.3.self_attn.masked_bias", True),
        ("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight", True),
        ("model.vision_tower.patch_embed.weight", True),
        ("multi_modal_projector.linear_1.bias", True),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.layers.0.self_attn.q_proj.weight", False),
        ("model.norm.weight", False),
        ("language_model.model.embed_tokens.weight", False),
    ],
)
def test_ignored_patterns_name_buffers_and_towers_only(name: str, expected: bool) -> None:
    assert is_ignored(resolve_spec(MINIMAL), name) == expected


def test_a_stored_copy_of_a_tied_head_is_ignored() -> None:
    untied, tied = resolve_spec(MINIMAL), resolve_spec(MINIMAL | {"tie_word_embeddings": True})
    for name in ("lm_head.weight", "language_model.lm_head.weight"):
        assert is_ignored(tied, name) and not is_ignored(untied, name)


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model.", "model.language_model.", "language_model."])
def test_weights_are_found_under_every_prefix(prefix: str) -> None:
    spec = resolve_spec(MINIMAL)
    for name in ("embed_tokens.weight", "layers.31.mlp.down_proj.weight", "norm.weight"):
        assert prefix + name in tensors_of(spec)[name].sources


def test_a_multimodal_wrapper_is_its_text_model() -> None:
    text = config_of("llama-bias")
    wrapper = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {key: value for key, value in text.items() if key not in ("architectures", "dtype", "eos_token_id")},
        "torch_dtype": "float32",
        "eos_token_id": 1,
        "vision_config": {"hidden_size": 7},
    }
    assert resolve_spec(wrapper) == resolve_spec(text)


@pytest.mark.parametrize(("change", "window"), [({"sliding_window": None}, None), ({"sliding_window": 64}, 64), ({}, 4096)])
def test_mistral_is_llama_with_a_window(change: dict[str, Any], window: int | None) -> None:
    spec = resolve_spec(config_of("llama-sharded") | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"} | change)
    assert (spec.family, spec.model_type, spec.architectures) == ("llama", "mistral", ("MistralForCausalLM",))
    assert {layer.attention.window for layer in spec.layers} == {window}


def test_a_silent_config_is_known_by_its_model_type() -> None:
    silent = {key: value for key, value in MINIMAL.items() if key != "architectures"}
    for model_type, architecture in (("llama", "LlamaForCausalLM"), ("mistral", "MistralForCausalLM"), ("qwen3", "Qwen3ForCausalLM")):
        assert resolve_spec(silent | {"model_type": model_type, "num_key_value_heads": 4}).architectures == (architecture,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["BertLMHeadModel"], "model_type": "bert"},
            r"BertLMHeadModel.*'bert'.*, LlamaForCausalLM, .*, OPTForCausalLM",
        ),
        ({"architectures": None, "model_type": None}, "Unsupported model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "relu6"}, "hidden_act 'relu6' is not supported; supported: silu"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, got 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0, got -1"),
        ({"eos_token_id": ["a"]}, "eos_token_id must be a token id"),
        ({"text_config": 3}, "text_config must be an object, got 3"),
    ],
)
def test_what_cannot_be_served_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_spec(MINIMAL | change)


def test_activations_have_one_name_for_each_formula() -> None:
    names = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    assert {name: resolve_spec(MINIMAL | {"hidden_act": name}).layers[0].mlp.activation for name in names} == names


def test_supported_architectures_are_listed_and_belong_to_one_family() -> None:
    names = supported_architectures()
    assert list(names) == sorted(names) and len(names) == len(set(names))
    assert {"LlamaForCausalLM", "MistralForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM"} <= set(names)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    types = [model_type for family in FAMILIES for model_type in set(family.architectures.values())]
    assert len(types) == len(set(types)), "a config without architectures has one family"


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("LLaMAForCausalLM", "LlamaForCausalLM"), ("Qwen3MoEForCausalLM", "Qwen3MoeForCausalLM"), ("GPTNeoXForCausal", "GPTNeoXForCausalLM")],
)
def test_the_nearest_supported_architecture_is_named(wrong: str, near: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{wrong}.* The nearest supported one is {near}\. Supported architectures: ") as caught:
        resolve_spec(MINIMAL | {"architectures": [wrong]})
    assert all(name in str(caught.value) for name in supported_architectures())


def test_nothing_near_names_none() -> None:
    with pytest.raises(CheckpointError, match="Unsupported model") as caught:
        resolve_spec(MINIMAL | {"architectures": ["xyz"]})
    assert "nearest" not in str(caught.value)


def test_specs_need_no_jax() -> None:
    code = "import sys, jaxserve.models.registry; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
