"""What each of several engines may take of a machine, on machines made up here."""

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.serve import shares as module
from jaxserve.serve.shares import Share, shares


@pytest.fixture
def cores_and_memory(monkeypatch):
    monkeypatch.setattr(module, "nvidia_driver", lambda: None)
    monkeypatch.setattr(module, "usable_cores", lambda: 7)
    monkeypatch.setattr(module, "free_memory", lambda: 1000)


@pytest.fixture
def eight_gpus(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(module, "nvidia_driver", lambda: "570.1")
    monkeypatch.setattr(module, "cuda_plugin", lambda: "xla_cuda12")
    monkeypatch.setattr(module, "visible_gpus", lambda: ["0", "1", "2", "3", "GPU-4", "5", "6", "7"])


def test_one_engine_takes_what_it_finds_of_a_cpu(cores_and_memory):
    assert shares(EngineConfig(model="m"), 1) == [Share()]


def test_one_engine_leaves_the_gpus_alone_that_it_does_not_need(eight_gpus):
    assert shares(EngineConfig(model="m"), 1) == [Share(environment={"CUDA_VISIBLE_DEVICES": "0"})]
    assert shares(EngineConfig(model="m", tensor_parallel_size=2), 1) == [Share(environment={"CUDA_VISIBLE_DEVICES": "0,1"})]
    for size in (8, 16):
        assert shares(EngineConfig(model="m", tensor_parallel_size=size), 1) == [Share()]


def test_on_the_cpu_threads_and_memory_are_cut_into_equal_parts(cores_and_memory):
    assert shares(EngineConfig(model="m"), 3) == [Share(num_threads=2, max_host_bytes=333)] * 3
    assert shares(EngineConfig(model="m"), 9) == [Share(num_threads=1, max_host_bytes=111)] * 9
    assert shares(EngineConfig(model="m", num_threads=5), 2) == [Share(num_threads=5, max_host_bytes=500)] * 2


def test_each_engine_sees_gpus_of_its_own(eight_gpus):
    assert [one.environment for one in shares(EngineConfig(model="m"), 2)] == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    four = shares(EngineConfig(model="m", tensor_parallel_size=2), 4)
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in four] == ["0,1", "2,3", "GPU-4,5", "6,7"]
    assert {(one.num_threads, one.max_host_bytes) for one in four} == {(None, None)}


def test_too_few_gpus_are_refused_with_the_way_out(eight_gpus):
    with pytest.raises(ConfigError, match=r"size is 5 and tensor_parallel_size 2: .* 10 GPUs.* are 8.*--data-parallel-size 4"):
        shares(EngineConfig(model="m", tensor_parallel_size=2), 5)
    with pytest.raises(ConfigError, match=r"data_parallel_size is 9 .*--data-parallel-size 8"):
        shares(EngineConfig(model="m"), 9)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 16, and there are 8 GPUs"):
        shares(EngineConfig(model="m", tensor_parallel_size=16), 2)


def test_on_a_machine_with_gpus_the_cpu_may_be_wanted(eight_gpus):
    assert shares(EngineConfig(model="m", device="cpu"), 2)[0].environment == {}
