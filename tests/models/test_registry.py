"""Configs to specs: both spellings, multimodal wrappers, tensor names, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from jaxserve.errors import CheckpointError
from jaxserve.models.registry import family_of, resolve_spec, supported_architectures
from jaxserve.models.spec import Biases, KVGroup

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
LLAMA_FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("llama*/model*.safetensors"))
MINIMAL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}


def config_of(folder: str, name: str = "config.json") -> dict[str, Any]:
    config: dict[str, Any] = json.loads((GOLDEN / folder / name).read_text())
    return config


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in GOLDEN.glob("llama*/config.legacy.json")))
def test_both_spellings_of_a_config_give_the_same_spec(folder: str) -> None:
    spec = resolve_spec(config_of(folder))
    assert spec == resolve_spec(config_of(folder, "config.legacy.json"))
    assert hash(spec) == hash(resolve_spec(config_of(folder, "config.legacy.json")))


def test_fields_of_a_spec() -> None:
    spec = resolve_spec(config_of("llama-tied-gqa3"))
    assert (spec.family, spec.model_type, spec.architectures) == ("llama", "llama", ("LlamaForCausalLM",))
    assert (spec.vocab_size, spec.num_layers, spec.hidden_size, spec.mlp_size) == (320, 2, 54, 80)
    assert (spec.num_heads, spec.num_kv_heads, spec.num_query_groups, spec.head_dim) == (9, 3, 3, 6)
    assert (spec.norm_eps, spec.activation, spec.biases, spec.is_tied) == (1e-5, "silu", Biases(), True)
    assert (spec.max_position_embeddings, spec.derived_max_model_len, spec.dtype) == (256, 256, "float32")
    assert (spec.bos_token_ids, spec.eos_token_ids) == ((0,), (1,))
    assert spec.kv_groups == (KVGroup((0, 1)),) and spec.kv_groups[0].num_layers == 2
    assert spec.kv_places == ((0, 0), (0, 1))
    assert resolve_spec(config_of("llama-bias")).biases == Biases(qkv=True, attention_out=True, mlp=True)


def test_head_dim_comes_from_the_config_first() -> None:
    assert resolve_spec(MINIMAL).head_dim == 16
    assert resolve_spec(MINIMAL | {"head_dim": 32}).head_dim == 32
    assert resolve_spec(MINIMAL | {"head_dim": None}).head_dim == 16


def test_absent_and_null_fields_take_transformers_defaults() -> None:
    spec = resolve_spec(MINIMAL | {"num_key_value_heads": None})
    assert (spec.num_kv_heads, spec.num_layers, spec.mlp_size, spec.norm_eps) == (4, 32, 11008, 1e-6)
    assert (spec.rope.kind, spec.rope.theta, spec.is_tied, spec.dtype, spec.eos_token_ids) == ("default", 10_000.0, False, None, ())


def test_eos_may_be_a_list() -> None:
    assert resolve_spec(MINIMAL | {"eos_token_id": [7, 9]}).eos_token_ids == (7, 9)


@pytest.mark.parametrize("folder", LLAMA_FOLDERS)
def test_tensors_are_exactly_those_of_the_checkpoint(folder: str) -> None:
    spec = resolve_spec(config_of(folder))
    stored = {}
    for path in (GOLDEN / folder).glob("model*.safetensors"):
        with safe_open(path, "np") as file:
            stored |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if "weight_packed" in str(stored) or "qweight" in str(stored) or "weight_scale" in str(stored):
        pytest.skip("quantized")
    found = {}
    for tensor in family_of(spec).tensors(spec):
        source = next(name for name in tensor.sources if name in stored)
        assert stored[source] == tensor.shape, tensor
        found[source] = tensor.name
    assert found.keys() == stored.keys()
    assert len(set(found.values())) == len(found)


def test_an_untied_head_is_optional_and_a_tied_one_is_not_a_tensor() -> None:
    untied, tied = resolve_spec(MINIMAL), resolve_spec(MINIMAL | {"tie_word_embeddings": True})
    heads = [tensor for tensor in family_of(untied).tensors(untied) if tensor.name == "lm_head.weight"]
    assert [tensor.is_optional for tensor in heads] == [True]
    assert all(tensor.name != "lm_head.weight" for tensor in family_of(tied).tensors(tied))
    # Some writers keep the shared tensor under the head's name only.
    assert family_of(tied).tensors(tied)[0].sources[-1].endswith("lm_head.weight")


@pytest.mark.parametrize(
    ("name", "is_ignored"),
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
def test_ignored_patterns_name_buffers_and_towers_only(name: str, is_ignored: bool) -> None:
    spec = resolve_spec(MINIMAL)
    assert any(re.search(pattern, name) for pattern in family_of(spec).ignored) == is_ignored


def test_a_stored_copy_of_a_tied_head_is_ignored() -> None:
    untied, tied = resolve_spec(MINIMAL), resolve_spec(MINIMAL | {"tie_word_embeddings": True})
    for name in ("lm_head.weight", "language_model.lm_head.weight"):
        assert any(re.search(pattern, name) for pattern in family_of(tied).ignored_patterns(tied))
        assert not any(re.search(pattern, name) for pattern in family_of(untied).ignored_patterns(untied))


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model.", "model.language_model.", "language_model."])
def test_weights_are_found_under_every_prefix(prefix: str) -> None:
    spec = resolve_spec(MINIMAL)
    by_name = {tensor.name: tensor for tensor in family_of(spec).tensors(spec)}
    for name in ("embed_tokens.weight", "layers.31.mlp.down_proj.weight", "norm.weight"):
        assert prefix + name in by_name[name].sources


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


def test_mistral_without_a_window_is_llama() -> None:
    config = config_of("llama-sharded") | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    spec = resolve_spec(config)
    assert (spec.family, spec.model_type, spec.architectures) == ("llama", "mistral", ("MistralForCausalLM",))
    for window in ({"sliding_window": 64}, {}):
        del config["sliding_window"]
        config |= window
        with pytest.raises(CheckpointError, match=r"sliding_window (64|4096)"):
            resolve_spec(config)
        config["sliding_window"] = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, r"GPT2LMHeadModel.*gpt2.*LlamaForCausalLM, MistralForCausalLM"),
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
    assert {name: resolve_spec(MINIMAL | {"hidden_act": name}).activation for name in names} == names


def test_supported_architectures_are_listed() -> None:
    assert supported_architectures() == ("LlamaForCausalLM", "MistralForCausalLM")


def test_specs_need_no_jax() -> None:
    code = "import sys, jaxserve.models.registry; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
