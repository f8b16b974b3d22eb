"""A model's name becomes the path of a converted checkpoint, converted once: keys, locks, versions, permissions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from jaxserve.checkpoint import FORMAT_VERSION, open_checkpoint
from jaxserve.convert import convert, resolve
from jaxserve.convert.resolve import resolve_model
from jaxserve.errors import CheckpointError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch):
    """Conversions run in this process, which spares starting JAX, and are counted."""
    seen = []

    def run(source, destination, arguments, environment, progress):
        seen.append(source)
        convert(source, destination, dtype=arguments[arguments.index("--dtype") + 1])

    monkeypatch.setattr(resolve, "_run_conversion", run)
    return seen


def test_converted_checkpoint_is_returned_as_it_is(converted, cache):
    assert resolve_model(converted("llama-bias")) == converted("llama-bias")
    assert not cache.exists()


def test_what_does_not_exist(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist, and is not a hub id"):
        resolve_model(tmp_path / "nothing.gguf")
    with pytest.raises(CheckpointError, match="revision v1 is for hub ids"):
        resolve_model(tmp_path, revision="v1")
    with pytest.raises(CheckpointError, match="name is empty"):
        resolve_model("")
    # The message of the process that converts arrives as it is, and only once.
    lines = []
    with pytest.raises(CheckpointError, match=r"^\S+ holds no config\.json: it is not a Hugging Face checkpoint\.$"):
        resolve_model(tmp_path, progress=lines.append)
    assert not any("config.json" in line for line in lines)


def test_one_process_converts_and_the_other_waits(broken, cache):
    source = broken("llama-tied-gqa3")
    code = f"""
from jaxserve.convert.resolve import resolve_model
print(resolve_model({str(source)!r}, progress=lambda line: print(line, flush=True)))
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    assert sum(any(line.startswith("converting ") for line in lines) for lines in outputs) == 1
    assert open_checkpoint(outputs[0][-1]).manifest.num_tensors > 0


def test_source_and_dtype_are_the_key(broken, conversions):
    source = broken("llama-tied-gqa3")
    first = resolve_model(source)
    assert resolve_model(source) == first and len(conversions) == 1
    half = resolve_model(source, dtype="bfloat16")
    assert half != first and open_checkpoint(half).manifest.dtype == "bfloat16"
    os.utime(source / "model.safetensors", ns=(1, 1))
    assert resolve_model(source) not in (first, half) and len(conversions) == 3


def test_unreadable_cache_entry_is_made_again(broken, conversions):
    source = broken("llama-tied-gqa3")
    path = resolve_model(source)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format_version": 0}))
    # Left by a process that was killed.
    shutil.copytree(path, path.parent / f".{path.name}.tmp-1")
    assert resolve_model(source) == path and len(conversions) == 2
    assert open_checkpoint(path).manifest.format_version == FORMAT_VERSION
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]


def test_resolving_loads_no_jax(converted):
    code = f"""
import sys
from jaxserve.convert.resolve import resolve_model
resolve_model({str(converted("llama-bias"))!r})
assert "jax" not in sys.modules and "orbax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
