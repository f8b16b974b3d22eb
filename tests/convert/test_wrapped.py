"""Text models inside multimodal checkpoints load as the text models that they are: the same spec, the same tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint import open_checkpoint
from jaxserve.convert import convert
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import resolve_spec

# Golden folder, the wrapper's architecture and model_type, what stands before the text model's tensors (and before its head), and
# whether the text config names its architecture.
WRAPPERS = [
    ("gemma3-text", "Gemma3ForConditionalGeneration", "gemma3", "language_model.", "language_model.", False),
    ("gemma3-text", "Gemma3ForConditionalGeneration", "gemma3", "model.language_model.", "", False),
    ("mistral-swa", "Mistral3ForConditionalGeneration", "mistral3", "language_model.", "language_model.", False),
    ("mistral-swa", "LlavaForConditionalGeneration", "llava", "model.language_model.", "", True),
    ("llama4-text", "Llama4ForConditionalGeneration", "llama4", "language_model.", "language_model.", False),
    ("qwen2", "LlavaForConditionalGeneration", "llava", "language_model.", "language_model.", True),
    ("qwen3-moe", "SomethingForConditionalGeneration", "something", "model.language_model.", "", False),
]
VISION = {
    "vision_tower.vision_model.embeddings.patch_embedding.weight": (8, 3, 2, 2),
    "model.vision_tower.blocks.0.attn.qkv.weight": (24, 8),
    "visual.patch_embed.proj.weight": (8, 3),
    "multi_modal_projector.linear_1.weight": (8, 8),
    "model.multi_modal_projector.mm_soft_emb_norm.weight": (8,),
    "image_newline": (8,),
}


def renamed(name: str, body: str, head: str) -> str:
    """The name in the wrapper: the new layout drops the text model's own `model.`, the old one keeps it."""
    if name.startswith("lm_head."):
        return head + name
    return body + (name.removeprefix("model.") if body.startswith("model.") else name)


def wrap(source: Path, target: Path, architecture: str, model_type: str, body: str, head: str, is_named: bool) -> None:
    """A multimodal checkpoint around a text model."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    text = json.loads((source / "config.json").read_text())
    if not is_named:
        del text["architectures"]
    outer: dict[str, Any] = {"architectures": [architecture], "model_type": model_type, "text_config": text}
    outer |= {"vision_config": {"hidden_size": 8, "model_type": "vision"}, "image_token_index": 9}
    outer |= {key: text.pop(key) for key in ("dtype", "bos_token_id", "eos_token_id") if key in text}
    (target / "config.json").write_text(json.dumps(outer))
    weights = {renamed(name, body, head): array for name, array in load_file(source / "model.safetensors").items()}
    vision = {name: np.ones(shape, np.float32) for name, shape in VISION.items()}
    save_file(weights | vision, target / "model.safetensors")


@pytest.mark.parametrize(("folder", "architecture", "model_type", "body", "head", "is_named"), WRAPPERS)
def test_wrapped_is_the_text_model(golden_dir, converted, tmp_path, folder, architecture, model_type, body, head, is_named):
    source = golden_dir / folder
    wrap(source, tmp_path / "wrapped", architecture, model_type, body, head, is_named)
    convert(tmp_path / "wrapped", tmp_path / "out")
    plain, wrapped = open_checkpoint(converted(folder)), open_checkpoint(tmp_path / "out")
    assert resolve_spec(wrapped.config) == resolve_spec(plain.config)
    assert wrapped.eos_token_ids == plain.eos_token_ids
    assert wrapped.names == plain.names
    for name in plain.names:
        np.testing.assert_array_equal(wrapped.read(name), plain.read(name), err_msg=name)
    assert sum(left.count for left in wrapped.manifest.ignored) >= len(VISION)


def test_a_tensor_of_no_known_part_is_named(golden_dir, tmp_path):
    wrap(golden_dir / "qwen2", tmp_path / "wrapped", "LlavaForConditionalGeneration", "llava", "language_model.", "", True)
    weights = load_file(tmp_path / "wrapped" / "model.safetensors")
    save_file(weights | {"language_model.extra.weight": np.ones((2,), np.float32)}, tmp_path / "wrapped" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 unexpected: language_model\.extra\.weight"):
        convert(tmp_path / "wrapped", tmp_path / "out")
