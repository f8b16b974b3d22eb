"""Choosing the kernels for a model: what its layers need, and a forced choice that cannot serve them."""

from __future__ import annotations

import json
from dataclasses import fields
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
from pallas_kernels.paged_attention import triton

CPU = jax.devices("cpu")[0]
A100: Any = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="A")
H200: Any = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="H")
PAGES = next(field.metadata["choices"] for field in fields(EngineConfig) if field.name == "kv_cache_dtype")


def golden(directory: Path, name: str) -> ModelSpec:
    return resolve_spec(json.loads((directory / name / "config.json").read_text()))


def choose(spec: ModelSpec, device: Any, dtype: str = "bfloat16", backend: str = "auto", pages: str = "auto") -> tuple[str, str]:
    return choose_backend(EngineConfig(model="m", attention_backend=backend, kv_cache_dtype=pages), spec, dtype, device)


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
    with pytest.raises(ConfigError, match=r"cpu_native lacks: a CPU, this is a gpu"):
        choose(spec, H200, backend="cpu_native")


def test_pages_have_the_dtype_that_was_asked_for(golden_dir: Path) -> None:
    [plain] = layer_needs(golden(golden_dir, "qwen3"), 16, "bfloat16", page_dtype("fp8_e4m3", "bfloat16"))
    assert (plain.page_dtype, plain.q_dtype) == ("uint8", "bfloat16")
    assert [page_dtype(name, "bfloat16") for name in ("auto", "float32", "int8", "fp8")] == ["bfloat16", "float32", "int8", "uint8"]


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("backend", ["cpu_native", "xla", "reference"])
def test_pages_of_every_dtype_are_served_on_a_cpu(golden_dir: Path, monkeypatch: pytest.MonkeyPatch, backend: str, pages: str) -> None:
    monkeypatch.setattr(dispatch, "_missing", lambda implementation: None)
    assert choose(golden(golden_dir, "gemma2"), CPU, backend=backend, pages=pages)[0] == backend


@pytest.mark.parametrize("pages", PAGES)
def test_pages_of_every_dtype_are_served_on_a_gpu(golden_dir: Path, monkeypatch: pytest.MonkeyPatch, pages: str) -> None:
    monkeypatch.setattr(dispatch, "_missing", lambda implementation: None)
    for name in ("gemma2", "deepseek-v2-lite"):
        assert choose(golden(golden_dir, name), A100, pages=pages)[0] == "triton"
        assert choose(golden(golden_dir, name), A100, backend="triton", pages=pages)[0] == "triton"


def test_a_forced_one_without_pages_of_a_dtype_says_so(golden_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_missing", lambda implementation: None)
    monkeypatch.setattr(triton, "lacks", lambda needs, _: "uint8 pages" if needs.page_dtype == "uint8" else None)
    spec = golden(golden_dir, "qwen3")
    with pytest.raises(
        ConfigError,
        match=r"model with kv_cache_dtype fp8 here; triton lacks: uint8 pages\. .*xla, reference; or leave kv_cache_dtype at auto\.$",
    ):
        choose(spec, A100, backend="triton", pages="fp8")
    assert choose(spec, A100, backend="triton", pages="int8")[0] == choose(spec, A100, backend="triton")[0] == "triton"
    assert choose(spec, A100, pages="fp8") == ("xla", "triton lacks: uint8 pages")


def test_a_dtype_of_pages_is_no_way_out_of_another_lack(golden_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_missing", lambda implementation: None)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype int8 here; mosaic_gpu lacks: .*latent.* take one of triton, xla, reference\.$"):
        choose(golden(golden_dir, "deepseek-v2-lite"), H200, backend="mosaic_gpu", pages="int8")


def test_a_gpu_takes_triton_by_itself(golden_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_missing", lambda implementation: None)
    for name in ("qwen3", "gemma2", "deepseek-v2-lite", "gpt-oss", "llama4-text"):
        assert choose(golden(golden_dir, name), A100)[0] == "triton", name
