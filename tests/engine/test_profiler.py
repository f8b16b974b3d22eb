"""One trace at a time, by the real jax.profiler."""

from pathlib import Path

import pytest
from jax import profiler as jax_profiler

from jaxserve.engine.profiler import Profiler
from jaxserve.errors import InvalidRequest


def test_a_trace_is_written_where_it_was_asked_for(tmp_path: Path) -> None:
    profiler = Profiler(jax_profiler)
    with pytest.raises(InvalidRequest, match="no trace is running"):
        profiler.stop()
    profiler.start(f"{tmp_path}/new/traces")
    with pytest.raises(InvalidRequest, match=f"a trace into {tmp_path}/new/traces is running; stop it first"):
        profiler.start("/elsewhere")
    assert profiler.stop() == f"{tmp_path}/new/traces"
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    profiler = Profiler(jax_profiler)
    with pytest.raises(InvalidRequest, match="cannot trace into"):
        profiler.start(f"{tmp_path}/file/traces")
    with pytest.raises(InvalidRequest, match="no directory is given"):
        profiler.start("")
    with pytest.raises(InvalidRequest, match="no trace is running"):
        profiler.stop()


def test_a_process_without_jax_says_so() -> None:
    with pytest.raises(InvalidRequest, match="this engine has no profiler"):
        Profiler().start("/traces")
