"""The choice of an implementation: by platform, capability and needs, with what is missing in words."""

from __future__ import annotations

import pytest

from pallas_kernels import dispatch, tuning
from pallas_kernels.dispatch import Device, Needs
from pallas_kernels.linear import xla as xla_linear
from pallas_kernels.paged_attention import cpu_native

CPU, A100, H200 = Device("cpu"), Device("gpu", (8, 0)), Device("gpu", (9, 0))


@pytest.fixture(autouse=True)
def _all_software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_missing", lambda implementation: None)


def test_each_device_gets_its_best() -> None:
    assert dispatch.choose(CPU) == ("cpu_native", "native code for this CPU")
    assert dispatch.choose(A100) == ("triton", "the default for GPUs of capability 8.0")
    assert dispatch.choose(H200, Needs(window=7), Needs()) == ("triton", "the default for GPUs of capability 9.0")
    assert dispatch.choose(Device("tpu")) == ("xla", "triton lacks: an NVIDIA GPU, this is a tpu")


def test_an_old_gpu_takes_the_portable_path() -> None:
    name, reason = dispatch.choose(Device("gpu", (7, 5)))
    assert name == "xla"
    assert reason.startswith("triton lacks: ")
    assert "7.5" in reason


def test_each_lack_is_named_once_for_all_layers() -> None:
    needs = [Needs(page_size=4), Needs(page_size=4, window=4), Needs(head_dim=1000)]
    reason = dispatch.lacks("mosaic_gpu", H200, *needs)
    assert reason is not None
    assert reason.count("page_size 4") == 1
    assert reason.count("1000") == 1
    assert "8.0" in (dispatch.lacks("mosaic_gpu", A100) or "")
    assert dispatch.lacks("mosaic_gpu", H200) is None
    assert "shared memory" in (dispatch.lacks("mosaic_gpu", H200, Needs(head_dim=208, q_dtype="float32")) or "")
    assert dispatch.lacks("cpu_native", H200) == "a CPU, this is a gpu"
    assert dispatch.lacks("triton", CPU) == "an NVIDIA GPU, this is a cpu"
    assert dispatch.lacks("xla", CPU, *needs) is None


def test_missing_software_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(cpu_native, "unavailable_reason", lambda: "no C++ compiler")
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert dispatch.choose(CPU) == ("xla", "cpu_native lacks: a native build (no C++ compiler)")
    assert dispatch.choose(H200) == ("xla", "triton lacks: the packages triton and jax-triton (extra cuda12)")
    with pytest.raises(ValueError, match=r"'cpu_native' cannot run here: it lacks a native build \(no C\+\+ compiler\)"):
        dispatch.load("paged_attention", "cpu_native")
    with pytest.raises(ValueError, match="'triton' cannot run here: it lacks the packages"):
        dispatch.load("linear", "triton")


def test_an_operation_without_the_implementation_takes_the_portable_one() -> None:
    assert dispatch.load("linear", "triton") is xla_linear.linear
    for operation in ("paged_attention", "write_kv", "linear", "grouped_linear"):
        for implementation in dispatch.IMPLEMENTATIONS:
            assert callable(dispatch.load(operation, implementation)), (operation, implementation)


def test_unknown_implementation_names_the_choices() -> None:
    for call in (lambda: dispatch.load("linear", "magic"), lambda: dispatch.lacks("magic", CPU)):
        with pytest.raises(ValueError, match="choose one of cpu_native, mosaic_gpu, triton, xla, reference"):
            call()


def test_describes_a_jax_device() -> None:
    class Card:
        platform = "gpu"
        compute_capability = "12.1"
        device_kind = "NVIDIA Something"

    assert dispatch.this_device(Card()) == Device("gpu", (12, 1), "NVIDIA Something")
    assert dispatch.this_device() == Device("cpu", None, "cpu")


def test_what_was_measured_fastest_is_taken_where_it_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "fastest", lambda operation, kind: "mosaic_gpu" if kind == "Card" else None)
    card = Device("gpu", (9, 0), "Card")
    assert dispatch.choose(card) == ("mosaic_gpu", "measured to be the fastest on Card")
    assert dispatch.choose(card, Needs(num_parts=1))[0] == "triton"
    assert dispatch.choose(H200)[0] == "triton"


def test_a_fastest_implementation_that_does_not_exist_is_an_error_that_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "fastest", lambda operation, kind: "magic")
    with pytest.raises(ValueError, match=r"nvidia-h200\.json has a fastest implementation that does not exist: 'magic'"):
        dispatch.choose(Device("gpu", (9, 0), "NVIDIA H200"))
