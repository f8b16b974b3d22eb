"""GGUF: header damage, every tensor type, config, names, and what is refused."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxserve.convert import convert
from jaxserve.convert.gguf_config import generation_config, hugging_face_config
from jaxserve.convert.gguf_file import read_gguf_file
from jaxserve.convert.gguf_names import LAYOUTS
from jaxserve.convert.read_gguf import read_gguf
from jaxserve.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FILE = GOLDEN / "llama3-rope-gguf-q4_0" / "model-Q4_0.gguf"

METADATA = {
    "general.architecture": "llama",
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
SHAPES = {"token_embd.weight": (320, 64)}


# ---- The file


def test_metadata_equals_the_gguf_package():
    metadata, tensors = read_gguf_file(FILE)
    reader = gguf.GGUFReader(FILE)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert metadata == fields
    assert {name: (tensor.shape, tensor.type_name, tensor.offset, tensor.num_bytes) for name, tensor in tensors.items()} == {
        t.name: (tuple(int(n) for n in t.shape[::-1]), t.tensor_type.name, t.data_offset, t.n_bytes) for t in reader.tensors
    }


def test_every_truncation_is_an_error(tmp_path):
    content = FILE.read_bytes()
    path = tmp_path / "model.gguf"
    # Densely through the header, coarsely through the tensors.
    for size in [*range(200), *range(200, 7000, 37), *range(7000, len(content), 5003), len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="truncated"):
            read_gguf_file(path)


def test_part_of_a_split_file(tmp_path):
    path = tmp_path / "model-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="is one of 3 parts"):
        read_gguf(path)


@pytest.mark.parametrize("seed", range(40))
def test_damaged_header_never_crashes(tmp_path, seed):
    content = bytearray(FILE.read_bytes())
    rng = np.random.default_rng(seed)
    for position in rng.integers(4, 6900, size=20):
        content[position] = rng.integers(256)
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with suppress(CheckpointError):  # any other exception fails the test
        read_gguf(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(CheckpointError, match=r"not a GGUF file: it begins with b'GGML'"):
        convert(path, tmp_path / "out")
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(CheckpointError, match="GGUF version 1; supported: 2 and 3"):
        convert(path, tmp_path / "out")


FLOATS = {"F32", "F16", "BF16", "F64"}
QUANTIZED = sorted(kind.name for kind in gguf.quants._type_traits if kind.name not in FLOATS)


@pytest.mark.parametrize("type_name", [*sorted(FLOATS), *QUANTIZED])
def test_every_type_is_read_in_pieces_as_in_one(tmp_path, type_name):
    kind = GGMLQuantizationType[type_name]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    shape = (7, 2 * block if block > 1 else 64)
    raw = np.random.default_rng(0).integers(0, 256, (shape[0], shape[1] // block * block_bytes), np.uint8)
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = read_gguf_file(path)[1]["t"]
    assert tensor.shape == shape
    with np.errstate(all="ignore"):
        pieces = np.concatenate([tensor.read_rows(0, 3), tensor.read_rows(3, 7)])
        if type_name == "F64":
            expected = raw.view(np.float64).astype(np.float32)
        else:
            expected = gguf.dequantize(raw.view(np.float32) if type_name == "F32" else raw, kind)
    assert pieces.dtype == tensor.dtype
    np.testing.assert_array_equal(pieces.astype(np.float32), expected)


def test_type_that_gguf_cannot_dequantize(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", np.zeros((4, 32), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="type I32 of t cannot be dequantized"):
        read_gguf(path)


# ---- Config and names


def test_names():
    name = LAYOUTS["llama"].hugging_face_name
    assert name("token_embd.weight") == "model.embed_tokens.weight"
    assert name("blk.12.attn_output.bias") == "model.layers.12.self_attn.o_proj.bias"
    assert name("output.weight") == "lm_head.weight"
    assert name("blk.0.attn_q_norm.weight") == "blk.0.attn_q_norm.weight"
    assert name("blk.3.ffn_gate.5.weight") == "model.layers.3.block_sparse_moe.experts.5.w1.weight"
    assert name("blk.3.ffn_norm.weight") == "model.layers.3.post_attention_layernorm.weight"
    assert LAYOUTS["llama"].expert_name("blk.3.ffn_down_exps.weight", 5) == "model.layers.3.block_sparse_moe.experts.5.w2.weight"
    assert LAYOUTS["llama"].expert_name("blk.3.ffn_down.weight", 5) is None
    # The same part is another norm in another architecture.
    assert LAYOUTS["gemma2"].hugging_face_name("blk.3.ffn_norm.weight") == "model.layers.3.pre_feedforward_layernorm.weight"


def test_config_defaults():
    config = hugging_face_config(METADATA, SHAPES, {})
    assert config["num_key_value_heads"] == 4 and config["head_dim"] == 16 and config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["tie_word_embeddings"] and config["vocab_size"] == 320 and not config["attention_bias"]
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_config_values():
    changes = {
        "llama.attention.head_count_kv": [2, 2],
        "llama.attention.key_length": 32,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 5e5,
    }
    shapes = SHAPES | {"output.weight": (320, 64), "blk.0.attn_q.bias": (64,)}
    config = hugging_face_config(METADATA | changes | {"llama.attention.value_length": 32}, shapes, {"rope_freqs.weight": [1.0, 8.0]})
    assert config["num_key_value_heads"] == 2 and config["head_dim"] == 32
    assert not config["tie_word_embeddings"] and config["attention_bias"]
    expected = {"rope_type": "default", "rope_theta": 500000.0, "freq_divisors": [1.0, 8.0], "partial_rotary_factor": 0.5}
    assert config["rope_parameters"] == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 1.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling(changes, expected):
    config = hugging_face_config(METADATA | {f"llama.{key}": value for key, value in changes.items()}, SHAPES, {})
    assert config["rope_parameters"] == {"rope_theta": 10000.0} | expected


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"general.architecture": "bert"}, r"architecture 'bert' is not supported; supported: llama, qwen2, qwen3"),
        ({"llama.attention.sliding_window": 512}, r"llama\.attention\.sliding_window is not supported, and may change"),
        ({"llama.feed_forward_length": [96, 128]}, "differs between layers"),
        ({"llama.attention.value_length": 8}, "key_length and value_length differ"),
        ({"llama.rope.scaling.type": "longrope"}, r"rope\.scaling\.type 'longrope'"),
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
    ],
)
def test_config_that_cannot_be_honoured(changes, match):
    metadata = {key: value for key, value in (METADATA | changes).items() if value is not None}
    with pytest.raises(CheckpointError, match=match):
        hugging_face_config(metadata, SHAPES, {})


def test_generation_config_holds_every_end():
    assert generation_config(METADATA) == {"bos_token_id": 1, "eos_token_id": 2}
    both = METADATA | {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.padding_token_id": 4}
    assert generation_config(both) == {"bos_token_id": 1, "pad_token_id": 4, "eos_token_id": [2, 9]}
