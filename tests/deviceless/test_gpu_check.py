"""`scripts/gpu_check` with tiny shapes on the CPU, so that it still runs when there is a GPU; and what it carries to such a machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax import export

from jaxserve.bench import gpu_check_kernels as kernels
from jaxserve.bench.gpu_check_model import idle_ns
from pallas_kernels import deviceless
from pallas_kernels.paged_attention.arg_specs import AttentionSpec

pytestmark = pytest.mark.skipif(deviceless.unavailable_reason() is not None, reason=str(deviceless.unavailable_reason()))

ROOT = Path(__file__).parents[2]


def gpu_check(*arguments: str) -> str:
    environment = os.environ | {"PYTHON": sys.executable, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # each tiny program runs once or twice
    done = subprocess.run([ROOT / "scripts" / "gpu_check", *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def test_tiny_deviceless_run_ends_in_one_line_of_json() -> None:
    report = json.loads(gpu_check("--tiny").splitlines()[-1])
    assert all(check["is_right"] for check in report["checks"])
    assert {check["route"] for check in report["checks"]} >= {"xla"}
    assert [level["batch"] for level in report["model"]["xla"]] == [1, 3]
    assert all(level["tokens_per_s"] > 0 and level["ttft_ms"] > 0 for level in report["model"]["xla"])
    assert report["versions"]["jax"] == jax.__version__


def test_exported_kernels_compile_where_jax_triton_is_not_asked(tmp_path: Path) -> None:
    """What --prepare writes is read and compiled for the card by JAX alone."""
    gpu_check("--tiny", "--prepare", str(tmp_path))
    assert (tmp_path / "packages" / "flatbuffers" / "__init__.py").exists()
    files = list(tmp_path.glob("*.stablehlo"))
    assert len(files) == 3
    for path in files:
        exported = export.deserialize(bytearray(path.read_bytes()))
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
        compiled = deviceless.compile_for("H200", exported.call, *shapes)
        assert "triton_kernel_call_ffi" in compiled.as_text()


def test_idle_time_is_what_no_kernel_covers() -> None:
    assert idle_ns([(10, 20), (15, 18), (25, 30), (19, 24), (40, 50)]) == (25 - 24) + (40 - 30)
    assert idle_ns([]) == 0


def test_floor_of_a_layer_by_hand() -> None:
    """Two rows of 1,000 keys, one kv head of 64: 2 x 1,000 x 2 x 64 x 2 bytes, and 2 queries of 2 x 64 read and written."""
    spec = AttentionSpec(
        name="", rows=((1, 1000),) * 2, num_heads=2, num_kv_heads=1, head_dim=64, page_size=16, max_pages=64, page_dtype="bfloat16"
    )
    assert kernels.floor_s(spec) == pytest.approx((512_000 + 2 * 2 * 128 * 2) / 4.3e12)
    prompt = AttentionSpec(
        name="", rows=((4096, 4096),), num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, max_pages=256, page_dtype="bfloat16"
    )
    assert kernels.floor_s(prompt) == pytest.approx(4 * (4096 * 4097 / 2) * 32 * 128 / 0.79e15)
