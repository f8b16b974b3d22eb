"""The benchmark of the kernels, on CPU with tiny shapes and a clock that is made up: what is tried, kept and written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxserve.bench import kernels
from jaxserve.errors import ConfigError
from pallas_kernels import dispatch, tuning
from pallas_kernels.paged_attention import xla

DECODE = kernels._shape(2, 1, 32, 2, 1, 8)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "paged_attention").mkdir()
    monkeypatch.setattr(tuning, "ROOT", tmp_path)
    tuning._read.cache_clear()
    monkeypatch.setattr(kernels, "shapes", lambda platform: (DECODE,))
    monkeypatch.setattr(xla, "TUNABLES", {"decode": {"rows": (0, 1, 8), "scores": (2048,)}})
    return tmp_path


def clock(run: Callable[[], jax.Array]) -> float:
    """A second; half of it with 8 rows at once, a quarter with 1 row, a little less with other scores. The program runs all the same."""
    run().block_until_ready()
    sizes = [] if tuning._trial is None else list(tuning._trial.sizes.values())
    seconds = 1.0
    for size in sizes:
        seconds *= {8: 0.5, 1: 0.25}.get(size.get("rows", 0), 1.0) * (0.99 if "scores" in size else 1.0)
    return seconds


def test_prints_a_card_and_a_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--layers", "2", "--implementation", "xla", "--implementation", "reference"], clock) == 0
    out = capsys.readouterr().out
    assert "decode 2x1 of 32" in out
    report = json.loads(out.splitlines()[-1])
    assert report["benchmark"] == "kernels"
    [row] = report["results"]
    assert row["xla us"] == row["reference us"] == 0.5e6, "a second for two layers"


def test_tuning_keeps_what_is_faster_and_the_next_program_uses_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows 0 cannot be compiled, 1 is the best, and 1 % less for other scores is noise."""
    assert kernels.main(["--tune", "--layers", "1", "--implementation", "xla"], clock) == 0
    [path] = root.glob("paged_attention/tuning/*.json")
    written = json.loads(path.read_text())
    [(shape_class, sizes)] = written["sizes"]["xla"].items()
    assert shape_class.startswith("decode ")
    assert sizes == {"rows": 1}
    assert written["fastest"] is None, "one implementation alone is no comparison"
    assert tuning.tuned("paged_attention", "xla", shape_class, xla.Sizes()) == xla.Sizes(rows=1)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["results"][0]["xla us"] == 0.25e6
    assert report["written to"] == str(path)


@pytest.mark.parametrize("factor", [2.0, 1.03])
def test_sizes_that_change_the_output_are_not_kept(monkeypatch: pytest.MonkeyPatch, root: Path, factor: float) -> None:
    """The mean of a thousand values is near 0: 3 % of it are less than what an output of 1 may be off."""
    monkeypatch.setattr(kernels, "shapes", lambda platform: (kernels._shape(2, 1, 1024, 2, 1, 8),))
    exact = xla._accumulate

    def wrong(state: xla._Softmax, scores: jax.Array, v: jax.Array) -> xla._Softmax:
        is_trial = tuning._trial is not None and any(size.get("rows") for size in tuning._trial.sizes.values())
        return exact(state, scores, v * factor if is_trial else v)

    monkeypatch.setattr(xla, "_accumulate", wrong)
    assert kernels.main(["--tune", "--layers", "1", "--implementation", "xla"], clock) == 0
    [path] = root.glob("paged_attention/tuning/*.json")
    assert json.loads(path.read_text())["sizes"] == {}


def test_the_fastest_served_every_shape() -> None:
    seconds = {"a": {"x": 1.0, "y": 3.0, "z": 0.1}, "b": {"x": 4.0, "y": 1.0}}
    assert kernels._fastest(seconds) == "y"


def test_tuning_again_takes_out_sizes_that_are_no_longer_the_best(root: Path) -> None:
    assert kernels.main(["--tune", "--layers", "1", "--implementation", "xla"], clock) == 0
    [path] = root.glob("paged_attention/tuning/*.json")
    assert json.loads(path.read_text())["sizes"] != {}
    assert kernels.main(["--tune", "--layers", "1", "--implementation", "xla"], lambda run: 1.0) == 0
    assert json.loads(path.read_text())["sizes"] == {}


def test_a_shape_that_an_implementation_does_not_serve_is_null(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has no NaN."""
    odd = kernels._shape(1, 1, 32, 2, 1, 16)
    monkeypatch.setattr(kernels, "shapes", lambda platform: (DECODE, odd))
    monkeypatch.setattr(dispatch, "lacks", lambda name, device, *needs: "a head" if name == "reference" and needs == (odd.needs,) else None)
    assert kernels.main(["--layers", "1", "--implementation", "xla", "--implementation", "reference"], clock) == 0
    card, line = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert " - |" in card
    assert "NaN" not in line
    assert [row["reference us"] for row in json.loads(line)["results"]] == [1e6, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats is 0; it must be at least 1"),
        (["--layers", "-1"], "--layers is -1; it must be at least 1"),
        (["--shape", "nosuch"], "--shape nosuch: no shape is named so. There are: decode 2x1 of 32"),
        (["--implementation", "triton"], "--implementation triton serves none of these shapes here; it lacks: an NVIDIA GPU"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kernels.main(arguments, clock)


def test_a_file_that_cannot_be_added_to_is_said_before_anything_is_measured(root: Path) -> None:
    path = tuning.file_of("paged_attention", "cpu")
    path.parent.mkdir()
    path.write_text("{")

    def never(run: Callable[[], jax.Array]) -> float:
        raise AssertionError("measured")

    with pytest.raises(ConfigError, match=r"--tune cannot keep what it would find: .*cpu\.json is not JSON"):
        kernels.main(["--tune", "--layers", "1"], never)
