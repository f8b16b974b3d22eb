"""The Mosaic GPU kernels: interpreted against the reference, where every race is a failure, and compiled for an H200 that is not here."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings

from pallas_kernels import deviceless
from pallas_kernels.mosaic_on_cpu import Report, interpreted
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.arg_specs import AttentionArgs, AttentionSpec, make_args, make_sinks
from pallas_kernels.paged_attention.strategies import attention_specs

if (reason := deviceless.unavailable_reason()) is not None:
    pytest.skip(reason, allow_module_level=True)

PAGE_DTYPES = ("bfloat16", "float16")


def attend(spec: AttentionSpec, implementation: str, *args: Any) -> jax.Array:
    return paged_attention(
        *args, is_decode=spec.is_decode, scale=spec.head_dim**-0.5, window=spec.window, chunk=spec.chunk, soft_cap=spec.soft_cap,
        sinks=make_sinks(spec), implementation=implementation,
    )  # fmt: skip


def run(spec: AttentionSpec, args: AttentionArgs) -> tuple[np.ndarray, Report]:
    with interpreted() as report:
        return np.asarray(jax.jit(functools.partial(attend, spec, "mosaic_gpu"))(*args)), report


def check(spec: AttentionSpec, seed: int = 0) -> Report:
    """Float32 outputs of 16-bit inputs within 5e-3 of the largest value."""
    args = make_args(spec, seed)
    out, report = run(spec, args)
    expected = jax.jit(functools.partial(attend, spec, "reference"))(*args)
    largest = float(np.nanmax(np.abs(args.pages[:, -1].astype(np.float32))))
    np.testing.assert_allclose(out, expected, rtol=0, atol=5e-3 * largest)
    assert not out[args.token_row == len(args.kv_length)].any(), "padding tokens give 0"
    return report


def drawn(*, is_decode: bool) -> Any:
    return attention_specs(is_decode=is_decode, page_dtypes=PAGE_DTYPES, max_rows=3, max_length=200, max_tokens=40, has_latent=False)


@settings(max_examples=8, deadline=None, derandomize=True, database=None, phases=[Phase.generate])  # shrinking would take long
@given(spec=drawn(is_decode=True))
def test_mosaic_decode_of_drawn_shapes_equals_reference(spec: AttentionSpec) -> None:
    check(spec)


@settings(max_examples=8, deadline=None, derandomize=True, database=None, phases=[Phase.generate])  # shrinking would take long
@given(spec=drawn(is_decode=False))
def test_mosaic_mixed_steps_of_drawn_shapes_equal_reference(spec: AttentionSpec) -> None:
    check(spec)
