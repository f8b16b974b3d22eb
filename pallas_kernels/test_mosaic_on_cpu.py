"""The interpreter of Mosaic GPU kernels: what it must notice, in the smallest kernels that do it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_on_cpu import Race, interpreted

SIDE = 64


def product(*, waits_for_copy: bool = True, commits: bool = True, waits_for_reader: bool = True, from_registers: bool = False) -> jax.Array:
    """2 x the square of ones: a warpgroup multiplies a tile that the other copied, twice, and each step can be left out."""

    def body(source: Any, out: Any, tile: Any, left: Any, result: Any, filled: Any, used: Any) -> None:
        warpgroup = jax.lax.axis_index("warpgroup")

        @pl.when(warpgroup == 1)
        def _fetch() -> None:
            plgpu.copy_gmem_to_smem(source, tile, filled.at[0])
            if waits_for_reader:
                plgpu.barrier_wait(used)
            plgpu.copy_gmem_to_smem(source, tile, filled.at[1])

        @pl.when(warpgroup == 0)
        def _multiply() -> None:
            ones = plgpu.layout_cast(jnp.ones((SIDE, SIDE), jnp.bfloat16), plgpu.Layout.WGMMA)
            left[...] = ones
            if commits:
                plgpu.commit_smem()

            def multiply(acc: Any) -> jax.Array:
                plgpu.wgmma(acc, ones if from_registers else left, tile)
                return acc[...]

            total = plgpu.layout_cast(jnp.zeros((SIDE, SIDE), jnp.float32), plgpu.Layout.WGMMA)
            for turn in range(2):
                if waits_for_copy:
                    plgpu.barrier_wait(filled.at[turn])
                total += pl.run_scoped(multiply, plgpu.ACC((SIDE, SIDE)))
                if turn == 0 and waits_for_reader:
                    plgpu.barrier_arrive(used)
            result[...] = total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result, out)
            plgpu.wait_smem_to_gmem(0)

    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    operand = plgpu.SMEM((SIDE, SIDE), jnp.bfloat16, transforms=(tiling((8, 64)), swizzle(128)))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32),
        scratch_types=[operand, operand, plgpu.SMEM((SIDE, SIDE), jnp.float32), plgpu.Barrier(num_barriers=2), plgpu.Barrier()],
        num_threads=2,
        thread_name="warpgroup",
    )
    out: jax.Array = kernel(jnp.ones((SIDE, SIDE), jnp.bfloat16))
    return out.block_until_ready()


@pytest.mark.parametrize("from_registers", [False, True])
def test_mosaic_product_is_right_and_counted(from_registers: bool) -> None:
    with interpreted() as report:
        out = product(from_registers=from_registers)
    np.testing.assert_array_equal(out, np.full((SIDE, SIDE), 2.0 * SIDE))
    assert (report.read_bytes, report.written_bytes) == (2 * SIDE * SIDE * 2, SIDE * SIDE * 4)


@pytest.mark.parametrize("left_out", ["waits_for_copy", "commits", "waits_for_reader"])
def test_mosaic_race_with_an_operand_is_an_error(left_out: str) -> None:
    with pytest.raises(Race), interpreted():
        product(**{left_out: False})
