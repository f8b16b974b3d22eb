"""Measured sizes: found by device and shape class, tried without files, written without losing others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pallas_kernels import tuning
from pallas_kernels.tuning import Launch


@dataclass(frozen=True)
class Sizes:
    tile: int = 64
    num_warps: int = 4


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuning, "ROOT", tmp_path)
    monkeypatch.setattr(tuning, "device_kind", lambda: "NVIDIA H200 (SXM)")
    (tmp_path / "op").mkdir()
    tuning._read.cache_clear()
    return tmp_path


def test_shapes_near_each_other_are_one_class() -> None:
    name = tuning.shape_class("decode", rounded={"rows": 17, "keys": 1}, head_dim=80)
    assert name == "decode head_dim=80 rows<=32 keys<=1"
    assert name == tuning.shape_class("decode", rounded={"rows": 32, "keys": 1}, head_dim=80)
    assert name != tuning.shape_class("decode", rounded={"rows": 33, "keys": 1}, head_dim=80)


def test_without_a_file_computed_sizes_stay() -> None:
    assert tuning.tuned("op", "fast", "decode", Sizes(tile=8)) == Sizes(tile=8)
    assert tuning.fastest("op", "NVIDIA H200 (SXM)") is None


def test_what_was_written_is_used_for_its_device_and_class_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuning.write("op", "NVIDIA H200 (SXM)", {Launch("op", "fast", "decode"): {"tile": 128}}, "fast", {"jax": "0"})
    assert path == root / "op" / "tuning" / "nvidia-h200-sxm.json"
    assert tuning.tuned("op", "fast", "decode", Sizes()) == Sizes(tile=128)
    assert tuning.tuned("op", "fast", "prefill", Sizes()) == Sizes()
    assert tuning.tuned("op", "other", "decode", Sizes()) == Sizes()
    assert tuning.fastest("op", "NVIDIA H200 (SXM)") == "fast"
    monkeypatch.setattr(tuning, "device_kind", lambda: "cpu")
    assert tuning.tuned("op", "fast", "decode", Sizes()) == Sizes()


def test_writing_keeps_other_classes(root: Path) -> None:
    for name, tile in (("a", 1), ("b", 2), ("a", 3)):
        tuning.write("op", "Card", {Launch("op", "fast", name): {"tile": tile}}, None, {})
    assert '"tile": 3' in tuning.file_of("op", "Card").read_text()
    assert '"tile": 2' in tuning.file_of("op", "Card").read_text()
    assert '"tile": 1' not in tuning.file_of("op", "Card").read_text()


def test_a_size_that_the_implementation_does_not_have_is_an_error() -> None:
    tuning.write("op", "NVIDIA H200 (SXM)", {Launch("op", "fast", "decode"): {"warps": 128}}, None, {})
    with pytest.raises(ValueError, match=r"nvidia-h200-sxm\.json has sizes that fast does not know: warps"):
        tuning.tuned("op", "fast", "decode", Sizes())


def test_no_sizes_take_out_what_was_known() -> None:
    for sizes in ({"tile": 128}, {}):
        tuning.write(
            "op", "NVIDIA H200 (SXM)", {Launch("op", "fast", "decode"): sizes, Launch("op", "fast", "prefill"): {"tile": 8}}, None, {}
        )
    assert tuning.tuned("op", "fast", "decode", Sizes()) == Sizes()
    assert tuning.tuned("op", "fast", "prefill", Sizes()) == Sizes(tile=8)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"fastest": 3}', '{"sizes": []}', '{"sizes": {"fast": []}}', '{"sizes": {"fast": {"decode": 8}}}',
     '{"sizes": {"fast": {"decode": {"tile": 0}}}}',
     '{"sizes": {"fast": {"decode": {"tile": "8"}}}}', '{"sizes": {"fast": {"decode": {"tile": 8.5}}}}'],
)  # fmt: skip
def test_a_damaged_file_is_an_error_that_names_it(root: Path, text: str) -> None:
    path = tuning.file_of("op", "NVIDIA H200 (SXM)")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=r"nvidia-h200-sxm\.json (is not JSON|has no measurements).*; delete it, or measure again"):
        tuning.tuned("op", "fast", "decode", Sizes())


def test_a_trial_replaces_files_and_tells_what_was_asked() -> None:
    launch = Launch("op", "fast", "decode")
    tuning.write("op", "NVIDIA H200 (SXM)", {launch: {"tile": 128}}, None, {})
    with tuning.trial({launch: {"num_warps": 8}}) as trial:
        assert tuning.tuned("op", "fast", "decode", Sizes()) == Sizes(num_warps=8)
        assert tuning.tuned("op", "fast", "prefill", Sizes(tile=16)) == Sizes(tile=16)
    assert trial.asked == {launch: Sizes(), Launch("op", "fast", "prefill"): Sizes(tile=16)}
    assert tuning.tuned("op", "fast", "decode", Sizes()) == Sizes(tile=128)
