"""Whole steps compiled for an H200 with none here: what they launch, copy, keep in place, send and hold.

The programs are those that start-up compiles on such a card, of real sizes with as many pages as fit. Compiling needs no weights.
"""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest

from jaxserve.bench.hlo import Instruction, Module
from jaxserve.models.load import split_model
from jaxserve.models.registry import family_of, resolve_spec
from jaxserve.models.tensors import logical_tensors
from pallas_kernels import deviceless
from tests.deviceless.conftest import CONFIGS, MODELS, Programs

pytestmark = pytest.mark.skipif(deviceless.unavailable_reason() is not None, reason=str(deviceless.unavailable_reason()))

FAMILIES = ("decode", "mixed")
MIB = 1 << 20
PARAMETERS = {"llama-3.1-8b": 8.03e9, "llama-3.1-70b": 70.6e9, "qwen3-30b-a3b": 30.5e9, "gemma-3-27b": 27.0e9, "deepseek-v2-lite": 15.7e9}
"""As their publishers count them; of Gemma the text model."""


@pytest.mark.parametrize("name", MODELS)
def test_config_has_the_published_number_of_parameters(name: str) -> None:
    spec = resolve_spec(json.loads((CONFIGS / f"{name}.json").read_text()))
    assert sum(math.prod(t.shape) for t in logical_tensors(family_of(spec), spec)) == pytest.approx(PARAMETERS[name], rel=2e-3)


def kernel_names(module: Module) -> Counter[str]:
    """How often a program calls each kernel: ours by name, others by target."""
    return Counter(_kernel_name(call) for call in module.custom_calls())


def _kernel_name(call: Instruction) -> str:
    target = call.attribute("custom_call_target")
    return deviceless.triton_kernel(call.payload("opaque"))[0] if target == "triton_kernel_call_ffi" else target


def num_weights(programs: Programs) -> int:
    return len(split_model(programs.step.model)[1])


def num_page_arrays(programs: Programs) -> int:
    return programs.step.spec.num_page_arrays


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_one_kernel_in_each_layer(programs: Programs, family: str) -> None:
    """Mixed steps attend with rows of one token and tiles of many in two launches; sums of split rows are added in one more."""
    names, num_layers = kernel_names(programs.module(family)), programs.step.spec.num_layers
    assert names["attend"] == (1 if family == "decode" else 2) * num_layers, names
    assert names["add_splits"] in (0, num_layers), names


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_are_written_once_in_each_layer(programs: Programs, family: str) -> None:
    """By our kernel, or by one scatter into the page array."""
    module, num_layers = programs.module(family), programs.step.spec.num_layers
    page_elements = programs.plan.num_pages * math.prod(programs.step.model.spec.page_shape) * programs.step.page_size
    scatters = [i for i in module.everything() if i.opcode == "scatter" and math.prod(i.shapes[0].dims) == page_elements]
    assert kernel_names(module)["write"] + len(scatters) == num_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_no_page_array_is_gathered(programs: Programs, family: str) -> None:
    first = num_weights(programs)
    pages = range(first, first + num_page_arrays(programs))
    gathered = [(i.name, origin) for i, origin in programs.module(family).gathered() if origin in pages]
    assert not gathered


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_the_shape_of_weights_or_pages_is_copied(programs: Programs, family: str) -> None:
    last = num_weights(programs) + num_page_arrays(programs)
    copies = [(i.name, i.shapes, origin) for i, origin in programs.module(family).copies(MIB) if origin < last]
    assert not copies


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_computed_twice_to_save_memory(programs: Programs, family: str) -> None:
    """XLA would do so, as pages fill the card on purpose."""
    assert not [i.name for i in programs.module(family).everything() if ".remat" in i.name]


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_and_state_are_written_in_place(programs: Programs, family: str) -> None:
    plan = programs.plan
    aliased = programs.compiled(family).memory_analysis().alias_size_in_bytes
    assert aliased >= plan.kv_bytes + plan.state_bytes + plan.recurrent_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_device_is_not_asked_to_wait_for_the_host(programs: Programs, family: str) -> None:
    """One executable is the whole step: nothing in it goes out and comes back."""
    opcodes = {i.opcode for _, i in programs.module(family).launched()}
    assert not opcodes & {"infeed", "outfeed", "send", "recv"}
    assert not [name for name in kernel_names(programs.module(family)) if "callback" in name]


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_is_what_the_plan_forecast(programs: Programs, family: str) -> None:
    plan, memory = programs.plan, programs.compiled(family).memory_analysis()
    forecast = plan.weights_bytes + plan.state_bytes + plan.recurrent_bytes + plan.temporaries_bytes + plan.kv_bytes
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    assert needed <= 1.05 * forecast
    if family == "mixed":  # the largest step, which the plan is about
        assert needed == pytest.approx(forecast, rel=0.05)
        assert memory.temp_size_in_bytes == pytest.approx(plan.temporaries_bytes, rel=0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_devices_tell_each_other_sums_and_tokens_only(programs: Programs, family: str) -> None:
    """Two sums a layer and one of the embedding, dealt out and gathered again; besides, in a branch each, all logits or the largest."""
    module, step = programs.module(family), programs.step
    bucket = step.decode_bucket if family == "decode" else step.mixed_bucket
    collectives = Counter(i.opcode.removesuffix("-start") for i in module.collectives())
    if step.num_devices == 1:
        assert not collectives
        return
    num_sums = 2 * step.spec.num_layers + 1
    assert collectives.keys() == {"reduce-scatter", "all-gather"}
    assert collectives["reduce-scatter"] <= num_sums
    gathered = [i for i in module.collectives() if "all-gather" in i.opcode]
    tokens = [i for i in gathered if (bucket.tokens, step.spec.hidden_size) in [shape.dims for shape in i.shapes]]
    assert len(tokens) <= num_sums
    rest = [max(shape.num_bytes for shape in i.shapes) for i in gathered if i not in tokens]
    assert len(rest) <= 2
    assert not [i for i in module.computations[module.entry].values() if i in gathered and i not in tokens]
    assert all(size <= 4 * bucket.logits_rows * (step.spec.vocab_size + step.num_devices) for size in rest)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_steps_read_logits_and_write_none(programs: Programs, family: str) -> None:
    """The branch with no others inside writes the largest logits of tiles, and gathers the largest of each device."""
    module, step = programs.module(family), programs.step
    bucket = step.decode_bucket if family == "decode" else step.mixed_bucket
    branches = [
        [i for _, i in module.launched(conditional.attribute(name).lstrip("%"))]
        for conditional in module.computations[module.entry].values()
        if conditional.opcode == "conditional"
        for name in ("true_computation", "false_computation")
    ]
    (greedy,) = [branch for branch in branches if not any(i.opcode == "conditional" for i in branch)]
    logits_bytes = 4 * bucket.logits_rows * step.spec.vocab_size // step.num_devices
    written = [i for i in greedy if i.opcode not in ("parameter", "get-tuple-element", "bitcast", "tuple")]
    assert max(i.num_bytes for i in written) <= logits_bytes / 8
