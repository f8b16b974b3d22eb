"""The benchmark of a mixture of experts with tiny sizes: what it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest

from jaxserve.bench import moe
from jaxserve.errors import ConfigError

TINY = ["--tokens", "4", "--hidden", "8", "--width", "4", "--repeats", "1"]


def test_takes_as_many_experts_as_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert moe.main([*TINY, "--experts", "9"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["experts a token"] for row in report["results"]] == [1, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats is 0; it must be at least 1"),
        (["--tokens", "0"], "--tokens is 0; it must be at least 1"),
        (["--experts", "4", "--top-k", "1", "5"], "--top-k is 1 5; of 4 experts a token can choose 1 to 4"),
        (["--experts", "4", "--top-k", "0"], "--top-k is 0; of 4 experts a token can choose 1 to 4"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        moe.main([*TINY, *arguments])
