"""Models over 8-bit pages: the same as over float32 pages whose keys and values NumPy has rounded before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxserve.arrays import QuantizedPages
from jaxserve.models import kv_cache


def rounded(x: np.ndarray, page_dtype: str) -> np.ndarray:
    """What 8 bits and a scale keep of each vector."""
    x = np.asarray(x, np.float32)
    largest = np.float32(127 if page_dtype == "int8" else 448)
    peak = np.abs(x).max(axis=-1, keepdims=True)
    scale = np.where(peak == 0, np.float32(1), peak / largest).astype(np.float32)
    stored = np.rint(x / scale) if page_dtype == "int8" else (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return (stored * scale).astype(np.float32)


@pytest.mark.parametrize(("name", "page_dtype"), [("gemma2", "uint8"), ("deepseek-v2-lite", "int8")], ids=["groups-fp8", "latent-int8"])
def test_steps_equal_those_over_rounded_keys_and_values(
    golden: Callable[..., Any], sequence_run: Any, monkeypatch: pytest.MonkeyPatch, name: str, page_dtype: str
) -> None:
    checkpoint = golden(name)
    prompt = checkpoint.prompts[0][:24]
    model, write = checkpoint.model(), kv_cache.write_kv
    stored = sequence_run(model, page_dtype)
    whole, last = stored.feed(prompt[:-1]), stored.feed(prompt[-1:])
    assert all(isinstance(pages, QuantizedPages) for pages in stored.pages)

    def write_rounded(pages: Any, k: Any, v: Any, *places: Any, implementation: Any) -> Any:
        def host(x: Any) -> Any:
            return jax.pure_callback(lambda x: rounded(x, page_dtype), jax.ShapeDtypeStruct(x.shape, np.float32), x)

        return write(pages, host(k), None if v is None else host(v), *places, implementation=implementation)

    exact = sequence_run(model)
    unrounded = exact.feed(prompt[:-1])
    monkeypatch.setattr(kv_cache, "write_kv", write_rounded)
    jax.clear_caches()  # layers were traced with the other writing
    by_hand = sequence_run(model)
    np.testing.assert_allclose(by_hand.feed(prompt[:-1]), whole, atol=2e-4, rtol=0)
    np.testing.assert_allclose(by_hand.feed(prompt[-1:]), last, atol=2e-4, rtol=0)
    jax.clear_caches()
    assert np.abs(whole - unrounded).max() > 1e-3, "rounding shows, so the bound above tells one from the other"
