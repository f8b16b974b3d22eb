"""The reader of compiled programs, on programs whose copies, bytes and operations can be said by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxserve.bench import hlo
from jaxserve.bench.hlo import Cost

GATHER_AND_COPY = """HloModule step, is_scheduled=true

%fused (param_0: bf16[64,128], param_1: s32[4]) -> f32[4,1,128] {
  %param_0 = bf16[64,128]{1,0} parameter(0)
  %param_1 = s32[4]{0} parameter(1)
  %gather.1 = bf16[4,1,128]{2,1,0} gather(%param_0, %param_1), offset_dims={1,2}, collapsed_slice_dims={}, slice_sizes={1,128}
  ROOT %convert.1 = f32[4,1,128]{2,1,0} convert(%gather.1)
}

%widened (param_0.1: bf16[64,128]) -> f32[64,128] {
  %param_0.1 = bf16[64,128]{1,0} parameter(0)
  %bitcast.1 = bf16[64,128]{1,0} bitcast(%param_0.1)
  ROOT %convert.2 = f32[64,128]{1,0} convert(%bitcast.1)
}

%body (state: (s32[], bf16[64,128])) -> (s32[], bf16[64,128]) {
  %state = (s32[], bf16[64,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %w = bf16[64,128]{1,0} get-tuple-element(%state), index=1
  %copy.1 = bf16[64,128]{0,1} copy(%w)
  ROOT %tuple.1 = (s32[], bf16[64,128]{1,0}) tuple(%i, %w)
}

%condition (state.1: (s32[], bf16[64,128])) -> pred[] {
  %state.1 = (s32[], bf16[64,128]{1,0}) parameter(0)
  ROOT %constant.9 = pred[] constant(true)
}

ENTRY %main (x: bf16[8,128], weight: bf16[64,128], index: s32[4]) -> f32[4,1,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %weight = bf16[64,128]{1,0} parameter(1)
  %index = s32[4]{0} parameter(2)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[64,128]{1,0}) tuple(%zero, %weight)
  %loop = (s32[], bf16[64,128]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %wide = f32[64,128]{1,0} fusion(%weight), kind=kLoop, calls=%widened
  %call = bf16[8,64]{1,0} custom-call(%x, %weight), custom_call_target="ours", backend_config={opaque = "a\\9C\\"b)"}
  ROOT %alls = f32[4,1,128]{2,1,0} fusion(%weight, %index), kind=kLoop, calls=%fused
}
"""


@pytest.fixture(scope="module")
def module() -> hlo.Module:
    return hlo.parse(GATHER_AND_COPY)


def test_copies_are_followed_to_the_parameter_through_fusions_and_loops(module: hlo.Module) -> None:
    assert [(i.name, origin) for i, origin in module.copies(1)] == [("copy.1", 1), ("wide", 1)]
    assert not module.copies(64 * 128 * 4 + 1)


def test_gathers_name_the_array_that_they_read(module: hlo.Module) -> None:
    assert [(i.name, origin) for i, origin in module.gathered()] == [("gather.1", 1)]


def test_a_custom_call_carries_bytes(module: hlo.Module) -> None:
    [call] = module.custom_calls()
    assert call.attribute("custom_call_target") == "ours"
    assert call.payload("opaque") == b'a\x9c"b)'


def test_bytes_by_hand(module: hlo.Module) -> None:
    """A loop copies a weight three times; a fusion widens it; another reads four of its rows and their numbers."""
    weight = 64 * 128 * 2
    loop, widened, rows = 3 * 2 * weight, weight + 2 * weight, 4 * 128 * 2 + 16 + 4 * 128 * 4
    assert module.cost(custom_call=lambda _: Cost(7.0, 11.0)) == Cost(loop + widened + rows + 7, 11)
    assert module.cost().num_bytes == loop + widened + rows + 8 * 128 * 2 + weight + 8 * 64 * 2


SUM_OF_PARTS = """HloModule step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%piece (parts: f32[8,64,160]) -> bf16[64,16] {
  %parts = f32[8,64,160]{2,1,0} parameter(0)
  %nothing = f32[] constant(0)
  %whole = f32[64,160]{1,0} reduce(%parts, %nothing), dimensions={0}, to_apply=%add
  %narrow = bf16[64,160]{1,0} convert(%whole)
  %heads = bf16[64,5,32]{2,1,0} bitcast(%narrow)
  %head = bf16[64,1,32]{2,1,0} slice(%heads), slice={[0:64], [4:5], [0:32]}
  %left = bf16[64,1,16]{2,1,0} slice(%head), slice={[0:64], [0:1], [0:16]}
  ROOT %out = bf16[64,16]{1,0} SHAPE
}

ENTRY %main (x: f32[8,64,160]) -> bf16[64,16] {
  %x = f32[8,64,160]{2,1,0} parameter(0)
  ROOT %kernel = bf16[64,16]{1,0} fusion(%x), kind=kLoop, calls=%piece
}
"""


@pytest.mark.parametrize(("result", "used"), [("bitcast(%left)", 16), ("add(%left, %other)", 32), ("add(%left, %all)", 160)])
def test_of_a_sum_only_the_elements_that_are_used_are_loaded(result: str, used: int) -> None:
    """Eight parts are added and cut twice. The last line takes the half that was cut out, both halves, or all there was too."""
    other = "%other = bf16[64,1,16]{2,1,0} slice(%head), slice={[0:64], [0:1], [16:32]}\n  "
    everything = "%all = bf16[64,160]{1,0} negate(%narrow)\n  "
    lines = (other if "%other" in result else "") + (everything if "%all" in result else "")
    text = SUM_OF_PARTS.replace("ROOT %out", lines + "ROOT %out").replace("SHAPE", result)
    assert hlo.parse(text).cost().num_bytes == 8 * 64 * used * 4 + 64 * 16 * 2


def test_operations_of_a_compiled_product() -> None:
    """Two products, one of them in a loop of five turns."""

    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5, lambda _, y: jnp.tanh(y @ w), x) @ w

    text = jax.jit(chain).lower(jnp.ones((64, 256)), jnp.ones((256, 256))).compile().as_text()
    assert hlo.parse(text).cost().num_operations == 6 * 2 * 64 * 256 * 256


def test_a_loop_of_unknown_length_is_an_error_unless_somebody_knows_it() -> None:
    module = hlo.parse(GATHER_AND_COPY.replace(', backend_config={"known_trip_count":{"n":"3"}}', ""))
    with pytest.raises(ValueError, match="how often loop runs"):
        module.cost()
    once, twice = (module.cost(trips=lambda _, turns=turns: turns).num_bytes for turns in (1, 2))
    assert twice - once == 2 * 64 * 128 * 2
