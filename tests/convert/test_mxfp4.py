"""MXFP4 experts of GPT-OSS: values by hand, and a golden checkpoint packed, converted and compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint import open_checkpoint
from jaxserve.convert import convert
from jaxserve.convert.mxfp4 import unpacked
from jaxserve.convert.read_safetensors import read_directory
from jaxserve.errors import CheckpointError


def write(folder: Path, tensors: dict[str, np.ndarray], config: dict | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def packed(values: np.ndarray) -> dict[str, np.ndarray]:
    """`[E, inputs, rows]` as blocks and scales; values must be multiples that 4 bits hold after a common scale of 1."""
    rows = np.ascontiguousarray(values.swapaxes(1, 2))
    codes = rows.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(*rows.shape[:2], -1, 16, 2)
    scales = np.full(codes.shape[:3], 127, np.uint8)
    return {"_blocks": codes[..., 0] | codes[..., 1] << 4, "_scales": scales}


def test_values_by_hand(tmp_path: Path) -> None:
    blocks = np.zeros((1, 2, 1, 16), np.uint8)
    blocks[0, 0, 0, 0] = 0x21  # low half first: 1 is 0.5, 2 is 1.0
    blocks[0, 1, 0, 15] = 0xF7  # 7 is 6.0, 15 is -6.0
    scales = np.array([[[128], [126]]], np.uint8)  # times 2, times a half
    source = unpacked(read_directory(write(tmp_path / "m", {"w_blocks": blocks, "w_scales": scales})))
    assert list(source.tensors) == ["w"]
    tensor = source.tensors["w"]
    assert (tensor.shape, tensor.stored_type) == ((1, 32, 2), "MXFP4")
    values = tensor.read_rows(0, 1)[0]
    assert values[:2, 0].tolist() == [1.0, 2.0] and values[30:, 1].tolist() == [3.0, -3.0]
    assert np.count_nonzero(values) == 4


@pytest.mark.parametrize("damage", ["scales", "shape", "dtype"])
def test_pairs_that_do_not_fit_are_named(tmp_path: Path, damage: str) -> None:
    tensors = {"w_blocks": np.zeros((2, 4, 1, 16), np.uint8), "w_scales": np.zeros((2, 4, 1), np.uint8)}
    if damage == "scales":
        del tensors["w_scales"]
    elif damage == "shape":
        tensors["w_scales"] = np.zeros((2, 3, 1), np.uint8)
    else:
        tensors["w_scales"] = tensors["w_scales"].astype(np.float32)
    with pytest.raises(CheckpointError, match="w_blocks and w_scales"):
        unpacked(read_directory(write(tmp_path / "m", tensors)))


def test_a_packed_checkpoint_converts_to_its_values(golden_dir: Path, tmp_path: Path) -> None:
    source = golden_dir / "gpt-oss"
    config = json.loads((source / "config.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 32, "quantization_config": {"quant_method": "mxfp4"}}
    rng = np.random.default_rng(0)
    tensors = {name: array for name, array in load_file(source / "model.safetensors").items() if ".experts." not in name}
    plain = dict(tensors)
    choices = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        for name, shape in (("gate_up_proj", (4, 32, 64)), ("down_proj", (4, 32, 32))):
            values = rng.choice(choices, shape)
            plain[prefix + name] = values
            tensors |= {prefix + name + suffix: part for suffix, part in packed(values).items()}
            plain[prefix + name + "_bias"] = tensors[prefix + name + "_bias"] = rng.standard_normal((4, shape[2])).astype(np.float32)
    for name, content in (("packed", tensors), ("plain", plain)):
        folder = write(
            tmp_path / name, content, config if name == "packed" else {k: v for k, v in config.items() if k != "quantization_config"}
        )
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(source / file, folder / file)
        convert(folder, tmp_path / f"{name}-out")
    ours, want = open_checkpoint(tmp_path / "packed-out"), open_checkpoint(tmp_path / "plain-out")
    assert ours.names == want.names
    for name in want.names:
        np.testing.assert_array_equal(ours.read(name), want.read(name), err_msg=name)
