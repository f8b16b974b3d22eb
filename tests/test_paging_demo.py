"""The demo's first run against figures that follow from the lengths: mean 500, half a page lost per request."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "paging_demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paging_demo", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_exponential_lengths_in_pages_of_16(demo: ModuleType) -> None:
    figures = demo.fill_pool(demo.draw_lengths("exp", 0), 16)
    assert figures["requests_that_fit_reserving_the_maximum"] == 256
    assert figures["ratio"] == pytest.approx(2**20 / 508 / 256, rel=0.03)
    assert figures["waste"] == pytest.approx(7.5 / 508, abs=0.002)
    assert figures["page_table_bytes"] == pytest.approx(2**16 * 4, rel=0.01)


def test_the_largest_pages_waste_a_third_and_the_smallest_nothing(demo: ModuleType) -> None:
    lengths = demo.draw_lengths("exp", 0)
    assert 0.3 < demo.fill_pool(lengths, 512)["waste"] < 0.4
    assert demo.fill_pool(lengths, 1)["waste"] == 0


@pytest.mark.parametrize("page_size", [16, 64, 512])
def test_nothing_is_gained_when_every_request_takes_the_maximum(demo: ModuleType, page_size: int) -> None:
    figures = demo.fill_pool(demo.draw_lengths("max", 0), page_size)
    assert (figures["requests_that_fit"], figures["ratio"], figures["waste"]) == (256, 1.0, 0.0)


def test_a_reader_that_has_enough_is_no_traceback() -> None:
    command = [sys.executable, str(SCRIPT), "--lengths", "max", "--page-size", "512"]
    environ = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 1
