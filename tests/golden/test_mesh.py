"""Golden models shared by 2, 4 and 8 devices of the CPU: the tokens, what each device holds, and what the devices tell one another."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.models.registry import resolve_spec
from jaxserve.models.tensors import tensor_shapes

CASES = {
    "starcoder2/2/built/int8": {},
    "gpt2/2/dealt": {},
    "mixtral/4/experts/odd/dealt": {"vocab_size": 319},
    "deepseek-v3/8/twice/dealt": {"num_attention_heads": 8, "num_key_value_heads": 8},
}
"""Dense with biases, over pages of 8 bits, whose rounding moves none of these tokens; learned positions; experts dealt out, and a
vocabulary that cannot be; latent attention, with experts that are cut. Each with what of its config is changed."""
WHOLE = re.compile(r"norm|router|positions|q_a_proj|kv_a_proj|(o|down)_proj\.bias")
"""Tensors that every device holds."""


@pytest.fixture(scope="module")
def results(golden_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `mesh_run.py` found, by case."""
    command = [sys.executable, Path(__file__).with_name("mesh_run.py"), ",".join(CASES), golden_dir, tmp_path_factory.mktemp("converted")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return {result["case"]: result for result in map(json.loads, ran.stdout.splitlines())}


@pytest.fixture(params=CASES)
def result(request: pytest.FixtureRequest, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One case's."""
    return results[request.param]


def spec_and_count(result: dict[str, Any], golden_dir: Path) -> tuple[Any, int]:
    folder, count = result["case"].split("/")[:2]
    config = json.loads((golden_dir / folder / "config.json").read_text())
    return resolve_spec(config | CASES[result["case"]]), int(count)


def test_the_tokens_are_those_of_one_device(result: dict[str, Any], golden_dir: Path) -> None:
    expected = json.loads((golden_dir / result["case"].split("/")[0] / "expected.json").read_text())
    assert result["tokens"] == [tokens[:24] for tokens in expected["greedy"]]


def num_parts(name: str, spec: Any, count: int) -> int:
    """Parts that a tensor is cut into."""
    if WHOLE.search(name):
        return 1
    is_kv = re.search(r"self_attn\.[kv]_proj", name) is not None
    return min(count, spec.layers[0].attention.num_kv_heads) if is_kv else count


def test_each_device_holds_its_share_of_the_weights(result: dict[str, Any], golden_dir: Path) -> None:
    spec, count = spec_and_count(result, golden_dir)
    share = sum(4 * math.prod(shape) / num_parts(name, spec, count) for name, shape in tensor_shapes(spec))
    assert share <= result["weights_bytes"] <= 1.05 * share


def test_devices_read_their_parts_and_nothing_twice(result: dict[str, Any], golden_dir: Path) -> None:
    if "built" in result["case"]:
        assert not result["num_read"]  # by the checkpoint itself, which does not count
        return
    spec, count = spec_and_count(result, golden_dir)
    wanted = {}
    for name, shape in tensor_shapes(spec):
        # Each device that shares a kv head with others reads it; keys' and values' matrices of latent attention lie in one tensor.
        times = 1 if WHOLE.search(name) else 2 if "kv_b_proj" in name else count // num_parts(name, spec, count)
        wanted[name] = times * math.prod(shape)
    assert result["num_read"] == wanted


def test_each_device_holds_its_heads_of_the_pages(result: dict[str, Any], golden_dir: Path) -> None:
    spec, count = spec_and_count(result, golden_dir)
    num_parts, num_kv_heads, head_dim = spec.page_shape  # latent vectors count as one head
    bytes_of_one = head_dim + 4 if "int8" in result["case"] else 4 * head_dim  # a scale beside the 8-bit numbers
    assert result["pages_bytes"] == bytes_of_one * spec.num_page_arrays * 128 * num_parts * max(1, num_kv_heads // count) * 16


def test_devices_add_up_twice_a_layer_and_gather_the_logits(result: dict[str, Any], golden_dir: Path) -> None:
    """Where tokens are dealt out, they are gathered as often as they are added up: for attention, for the MLP, and at the end. Of
    the logits greedy steps gather the largest, others all: a branch each."""
    spec, count = spec_and_count(result, golden_dir)
    sums = 2 * spec.num_layers + 1
    assert len(result["collectives"]) >= 2
    for num_tokens, collectives in result["collectives"]:
        is_dealt = "dealt" in result["case"] and num_tokens % count == 0
        wanted = {"reduce-scatter": sums, "all-gather": sums + 2} if is_dealt else {"all-reduce": sums, "all-gather": 2}
        assert collectives == wanted


def test_an_engine_says_by_how_many_it_is_shared(results: dict[str, dict[str, Any]]) -> None:
    result = results["starcoder2/2/built/int8"]
    size, kv_cache_bytes, device = result["info"]
    assert size == 2 and kv_cache_bytes == result["pages_bytes"] and device.startswith("2 x cpu")
