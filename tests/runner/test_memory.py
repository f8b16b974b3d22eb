"""The memory plan: budgets by hand, the page-count rule, what is remembered, and the longest sequence."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import psutil
import pytest

from jaxserve import cgroup
from jaxserve.cgroup import cpu_quota, memory_headroom
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models.registry import resolve_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.runner.memory import (
    GIB,
    Budget,
    MemoryPlan,
    check_token_budget,
    choose_num_pages,
    fullest,
    kv_budget,
    num_pages_key,
    page_bytes,
    resolve_max_model_len,
    round_num_pages,
    tree_bytes,
)

CONFIG = EngineConfig(model="m")


def llama(**changes: Any) -> ModelSpec:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 128, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", **changes,
    }  # fmt: skip
    return resolve_spec(config)


def windowed(spec: ModelSpec, layers: range) -> ModelSpec:
    """The spec with a window in some of its layers."""
    plain = spec.layers[0]
    other = replace(plain, attention=replace(plain.attention, window=128))
    return replace(spec, layers=tuple(other if i in layers else plain for i in range(spec.num_layers)))


class FakeGPU:
    platform = "gpu"
    device_kind = "Card"

    def __init__(self, limit: int, in_use: int) -> None:
        self._stats = {"bytes_limit": limit, "bytes_in_use": in_use}

    def memory_stats(self) -> dict[str, int]:
        return self._stats


def set_free(monkeypatch: pytest.MonkeyPatch, available: int, headroom: int | None = None) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": available}))
    monkeypatch.setattr(cgroup, "memory_headroom", lambda: headroom)


def test_page_bytes_by_hand() -> None:
    # SmolLM2's pages: 30 layers x (keys, values) x 3 heads x 16 tokens x 64 x 2 bytes.
    assert page_bytes(llama(), 16, jnp.bfloat16) == 30 * 2 * 3 * 16 * 64 * 2
    assert page_bytes(llama(), 16, "int8") == page_bytes(llama(), 16, "uint8") == 30 * 2 * 3 * 16 * (64 + 4), "a float32 scale a vector"
    # Two groups of 15 layers share 15 arrays.
    spec = windowed(llama(), range(15, 30))
    assert [group.num_layers for group in spec.kv_groups] == [15, 15]
    assert page_bytes(spec, 16, jnp.float32) == 15 * 2 * 3 * 16 * 64 * 4


def test_tree_bytes() -> None:
    assert tree_bytes({"a": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16), "b": (jnp.zeros(5, bool),)}) == 29


@pytest.mark.parametrize(
    ("available", "headroom", "expected"),
    [(100 * GIB, None, GIB), (3 * GIB, None, 3 * GIB // 4), (100 * GIB, 2 * GIB, GIB // 2), (GIB, 2 * GIB, GIB // 4)],
)
def test_cpu_default_is_one_gib_or_a_quarter_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, available: int, headroom: int | None, expected: int
) -> None:
    set_free(monkeypatch, available, headroom)
    assert kv_budget(CONFIG, jax.devices("cpu")[0]).size_bytes == expected


def test_one_of_several_engines_takes_of_its_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 100 * GIB)
    taken = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=3 * GIB, shared=GIB))
    monkeypatch.setattr(psutil, "Process", lambda: taken)
    cpu = jax.devices("cpu")[0]
    assert kv_budget(CONFIG, cpu, max_host_bytes=4 * GIB).size_bytes == 2 * GIB // 4
    assert kv_budget(CONFIG, cpu, max_host_bytes=50 * GIB).size_bytes == GIB
    set_free(monkeypatch, GIB)
    assert kv_budget(CONFIG, cpu, max_host_bytes=50 * GIB).size_bytes == GIB // 4
    with pytest.raises(
        ConfigError, match=r"more than is free.*part of this machine's memory is 1\.00 GiB; give a smaller --data-parallel-size"
    ):
        kv_budget(CONFIG, cpu, max_host_bytes=GIB)


def test_devices_that_share_a_model_share_the_memory_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, config = jax.devices("cpu")[0], dataclasses.replace(CONFIG, tensor_parallel_size=4)
    set_free(monkeypatch, 100 * GIB)
    assert kv_budget(config, cpu).size_bytes == GIB // 4
    set_free(monkeypatch, 2 * GIB)
    assert kv_budget(config, cpu, state_bytes=GIB // 4).size_bytes == GIB // 16


def test_the_fullest_gpu_bounds_the_pages() -> None:
    gpus: Any = [FakeGPU(limit=92 * GIB, in_use=in_use * GIB) for in_use in (16, 20, 17)]
    assert fullest(gpus) is gpus[1]
    cpus = jax.devices("cpu")
    assert fullest(cpus) is cpus[0]


def test_gpu_gets_its_share_less_model_state_and_reserve() -> None:
    device: Any = FakeGPU(limit=92 * GIB, in_use=16 * GIB)
    budget = kv_budget(CONFIG, device, state_bytes=GIB, temporaries_bytes=2 * GIB)
    assert budget.size_bytes == (92 - 16 - 1 - 2 - 1) * GIB
    assert "0.92" in budget.reason


def test_state_that_leaves_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 8 * GIB)
    gpu: Any = FakeGPU(limit=8 * GIB, in_use=4 * GIB)
    for device in (jax.devices("cpu")[0], gpu):
        with pytest.raises(ConfigError, match=r"state of sequences takes 9\.00 GiB.*--max-num-seqs"):
            kv_budget(CONFIG, device, state_bytes=9 * GIB)
    assert kv_budget(CONFIG, jax.devices("cpu")[0], state_bytes=6 * GIB).size_bytes == GIB // 2


def test_a_device_that_does_not_tell_its_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGPU(limit=8 * GIB, in_use=4 * GIB)
    monkeypatch.setattr(gpu, "memory_stats", lambda: None)
    with pytest.raises(ConfigError, match="does not tell how much of its memory is free"):
        kv_budget(CONFIG, gpu)


def test_a_configured_size_is_used_and_must_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 8 * GIB)
    config = EngineConfig(model="m", kv_cache_memory_bytes=5 * GIB)
    assert kv_budget(config, jax.devices("cpu")[0]).size_bytes == 5 * GIB
    gpu: Any = FakeGPU(limit=8 * GIB, in_use=4 * GIB)
    with pytest.raises(ConfigError, match=r"5\.00 GiB, but 4\.00 GiB are free.*--kv-cache-memory-bytes"):
        kv_budget(config, gpu)


@pytest.mark.parametrize(
    ("number", "rounded"), [(2, 2), (31, 31), (63, 63), (64, 64), (65, 64), (67, 66), (1000, 992), (1024, 1024), (5825, 5760)]
)
def test_num_pages_is_a_32nd_of_its_power_of_two(number: int, rounded: int) -> None:
    assert round_num_pages(number) == rounded


def test_the_last_number_is_used_again_while_it_fits(tmp_path: Path) -> None:
    def choose(size: int, key: str = "k") -> int:
        return choose_num_pages(CONFIG, Budget(size, "a test"), 10, key=key, cache_directory=tmp_path)

    assert choose(10_000) == 992
    assert choose(10_990) == 992  # 1,099 fit, but 992 has its programs
    assert choose(9_920) == 992
    assert choose(10_990, "other") == 1088
    assert choose(9_919) == 976  # 992 no longer fit
    assert choose(9_990) == 976
    assert choose(20_000) == 1984  # 976 would waste half
    assert json.loads((tmp_path / "num_pages.json").read_text()) == {"k": 1984, "other": 1088}
    assert [path.name for path in tmp_path.iterdir()] == ["num_pages.json"]
    (tmp_path / "num_pages.json").write_text("{broken")
    assert choose(20_000) == 1984


def test_num_pages_can_be_given_and_must_exist(tmp_path: Path) -> None:
    config = EngineConfig(model="m", num_pages=21)
    assert choose_num_pages(config, Budget(10, "x"), 10, key="k", cache_directory=tmp_path) == 21
    assert choose_num_pages(config, Budget(10, "x", 210), 10, key="k", cache_directory=tmp_path) == 21
    with pytest.raises(ConfigError, match="num_pages is 21.*Give --num-pages 20 or fewer"):
        choose_num_pages(config, Budget(10, "x", 209), 10, key="k", cache_directory=tmp_path)
    assert choose_num_pages(CONFIG, Budget(670, "x"), 10, key="k", cache_directory=None) == 66
    for size in (19, -5):
        with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
            choose_num_pages(CONFIG, Budget(size, "x"), 10, key="k", cache_directory=None)


def test_a_cache_that_cannot_be_written_is_only_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    missing = Path("/nonexistent/cache")
    assert choose_num_pages(CONFIG, Budget(640, "x"), 10, key="k", cache_directory=missing) == 64
    assert "cannot remember" in caplog.text


def test_key_follows_what_the_programs_depend_on() -> None:
    cpu = jax.devices("cpu")[0]
    keys = {
        num_pages_key(llama(), CONFIG, jnp.bfloat16, cpu),
        num_pages_key(llama(), CONFIG, jnp.float32, cpu),
        num_pages_key(llama(num_hidden_layers=2), CONFIG, jnp.bfloat16, cpu),
        num_pages_key(llama(), replace(CONFIG, page_size=32), jnp.bfloat16, cpu),
        num_pages_key(llama(), replace(CONFIG, kv_cache_dtype="int8"), jnp.bfloat16, cpu),
        num_pages_key(llama(), replace(CONFIG, kv_cache_dtype="fp8"), jnp.bfloat16, cpu),
        num_pages_key(llama(), replace(CONFIG, kv_cache_memory_bytes=GIB), jnp.bfloat16, cpu),
    }
    assert len(keys) == 7
    assert num_pages_key(llama(), CONFIG, jnp.bfloat16, cpu) in keys


def test_max_model_len() -> None:
    spec = llama()  # 8,192
    assert resolve_max_model_len(CONFIG, spec, 513, max_chunk=512) == (8192, None)
    lowered, message = resolve_max_model_len(CONFIG, spec, 101, max_chunk=512)
    assert lowered == 1600
    assert message is not None
    assert "8,192" in message
    assert "1,600" in message
    given = EngineConfig(model="m", max_model_len=1600)
    assert resolve_max_model_len(given, spec, 101, max_chunk=512) == (1600, None)
    with pytest.raises(ConfigError, match=r"1,600.*hold 1,584 tokens.*--max-model-len 1584"):
        resolve_max_model_len(given, spec, 100, max_chunk=512)
    longer, warning = resolve_max_model_len(EngineConfig(model="m", max_model_len=9000), spec, 1000, max_chunk=512)
    assert longer == 9000
    assert warning is not None
    assert "8,192" in warning


def test_max_model_len_with_windows() -> None:
    """Half of the layers see 128 positions: with a chunk of c tokens they hold 127 + c, in at most (127 + c + 14) // 16 + 1 pages."""
    spec = windowed(llama(), range(15))
    # 100 pages are 59 and 41: 512 tokens of a chunk beside the window touch 41 pages.
    assert resolve_max_model_len(CONFIG, spec, 101, max_chunk=512)[0] == 59 * 16
    # 88 and 12.
    assert resolve_max_model_len(CONFIG, spec, 101, max_chunk=48)[0] == 88 * 16
    # As long as nothing falls out, both halves hold everything.
    assert resolve_max_model_len(CONFIG, spec, 81, max_chunk=512)[0] == 40 * 16
    with pytest.raises(ConfigError, match=r"2,000.*hold 1,408 tokens"):
        resolve_max_model_len(EngineConfig(model="m", max_model_len=2000), spec, 101, max_chunk=48)
    # Windows alone: a sequence may be as long as the model allows.
    assert resolve_max_model_len(CONFIG, windowed(llama(), range(30)), 42, max_chunk=512) == (8192, None)
    assert resolve_max_model_len(CONFIG, windowed(llama(), range(30)), 41, max_chunk=512)[0] == 40 * 16


@pytest.mark.parametrize(
    ("wanted", "num_kv_tokens", "message"),
    [
        (None, 100, None),
        (512, 100, None),
        (4096, 100_000, None),
        (4097, 100_000, r"is 4,097, more than a step can use: 4 sequences of 1,024 are 4,096. Give --max-num-batched-tokens 4096 or less"),
        (10_000_000, 3000, r"is 10,000,000, more than a step can use: all KV pages hold 3,000. Give --max-num-batched-tokens 3000 or less"),
    ],
)
def test_a_budget_that_no_step_can_fill_is_refused(wanted: int | None, num_kv_tokens: int, message: str | None) -> None:
    config = replace(CONFIG, max_num_batched_tokens=wanted)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        check_token_budget(config, default=512, max_num_seqs=4, max_model_len=1024, num_kv_tokens=num_kv_tokens)


def test_plan_as_a_table() -> None:
    plan = MemoryPlan(
        weights_bytes=270 << 20, state_bytes=5 << 20, temporaries_bytes=20 << 20, page_bytes=1 << 20, num_pages=101, page_size=16,
        reason="a test",
    )  # fmt: skip
    lines = plan.table().splitlines()
    assert [line.split()[0] for line in lines] == ["weights", "sampling", "temporaries", "KV", "total"]
    assert "396.0 MiB" in lines[-1]
    assert "101 pages of 16 = 1,600 tokens" in lines[3]
    assert "temporaries" not in replace(plan, temporaries_bytes=0).table()


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_cgroup_v2_limits_at_every_level(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/outer/memory.max": str(4 * GIB),
        "sys/fs/cgroup/outer/memory.current": str(3 * GIB),
        "sys/fs/cgroup/outer/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
        "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/memory.current": str(3 * GIB),
    }
    write_files(tmp_path, files)
    assert cpu_quota(tmp_path) == 1.5
    assert memory_headroom(tmp_path) == GIB + GIB // 2


def test_cgroup_v1_in_a_container_and_no_cgroup(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert memory_headroom(tmp_path) is None
    # The path is the host's; inside, the mount itself is the container's group.
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 4}",
    }
    write_files(tmp_path, files)
    assert cpu_quota(tmp_path) == 2.5
    assert memory_headroom(tmp_path) == GIB + GIB // 4
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712")
    (tmp_path / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us").write_text("-1")
    assert cpu_quota(tmp_path) is None
    assert memory_headroom(tmp_path) is None
