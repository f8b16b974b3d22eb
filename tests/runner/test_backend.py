"""Choosing the kernels for a model: what its layers need, and a forced choice that cannot serve them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.registry import resolve_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.runner.backend import choose_backend, layer_needs, page_dtype
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Needs

CPU = jax.devices("cpu")[0]
A100: Any = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="A")
H200: Any = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="H")


def golden(directory: Path, name: str) -> ModelSpec:
    return resolve_spec(json.loads((directory / name / "config.json").read_text()))


def choose(spec: ModelSpec, device: Any, dtype: str = "bfloat16", backend: str = "auto") -> tuple[str, str]:
    return choose_backend(EngineConfig(model="m", attention_backend=backend), spec, dtype, device)


def test_needs_are_those_of_each_kind_of_layer(golden_dir: Path) -> None:
    [windowed, full] = sorted(layer_needs(golden(golden_dir, "gemma2"), 16, "float32"), key=lambda needs: needs.window is None)
    spec = golden(golden_dir, "gemma2").paged_attention
    assert windowed == Needs(
        head_dim=spec.head_dim, group=2, page_dtype="float32", q_dtype="float32", window=windowed.window, soft_cap=full.soft_cap
    )
    assert windowed.window is not None
    assert full.soft_cap == spec.soft_cap == 2.0
    [latent] = layer_needs(golden(golden_dir, "deepseek-v2-lite"), 32, "bfloat16")
    assert (latent.num_parts, latent.page_size, latent.group) == (1, 32, golden(golden_dir, "deepseek-v2-lite").paged_attention.num_heads)
    assert all(needs.has_sinks for needs in layer_needs(golden(golden_dir, "gpt-oss"), 16, "bfloat16"))
    assert len(layer_needs(golden(golden_dir, "qwen3-next"), 16, "bfloat16")) == 1, "recurrent layers have no pages"


def test_a_forced_one_that_can_serve_is_taken(golden_dir: Path) -> None:
    assert choose(golden(golden_dir, "qwen3"), CPU, backend="xla") == ("xla", "asked for with attention_backend")


def test_a_forced_one_that_cannot_serve_names_what_it_lacks(golden_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_missing", lambda implementation: None)
    spec = golden(golden_dir, "deepseek-v2-lite")
    with pytest.raises(ConfigError, match=r"attention_backend is triton.* lacks: an NVIDIA GPU, this is a cpu\. .*cpu_native, xla, ref"):
        choose(spec, CPU, backend="triton")
    with pytest.raises(ConfigError, match=r"mosaic_gpu lacks: .*8\.0.* take one of triton, xla, reference"):
        choose(spec, A100, backend="mosaic_gpu")
    with pytest.raises(ConfigError, match=r"mosaic_gpu lacks: .*float32.*"):
        choose(golden(golden_dir, "qwen3"), H200, dtype="float32", backend="mosaic_gpu")
    [plain] = layer_needs(golden(golden_dir, "qwen3"), 16, "bfloat16", page_dtype("fp8_e4m3", "bfloat16"))
    assert (plain.page_dtype, plain.q_dtype) == ("uint8", "bfloat16")
    assert [page_dtype(name, "bfloat16") for name in ("auto", "float32", "int8", "fp8")] == ["bfloat16", "float32", "int8", "uint8"]
    with pytest.raises(ConfigError, match=r"cpu_native lacks: a CPU, this is a gpu"):
        choose(spec, H200, backend="cpu_native")


def test_a_gpu_takes_triton_by_itself(golden_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_missing", lambda implementation: None)
    for name in ("qwen3", "gemma2", "deepseek-v2-lite", "gpt-oss", "llama4-text"):
        assert choose(golden(golden_dir, name), A100)[0] == "triton", name
