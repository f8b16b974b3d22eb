"""Log lines: their two forms, levels, the request's id, exceptions and warnings."""

import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest

from jaxserve.logs import announce, request_id, set_up_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Takes what was written to stderr, which is no terminal; logging is as before afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("jaxserve")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield lambda: capsys.readouterr().err
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    logging.captureWarnings(False)


def test_off_a_terminal_each_line_is_an_object(stderr):
    set_up_logging()
    logging.getLogger("jaxserve.engine").info("ready at %s\nsecond line\u2028\x85\udc80", "here")
    [line] = stderr().splitlines()
    record = json.loads(line)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record.pop("time"))
    assert isinstance(record.pop("process"), int)
    assert record == {"level": "INFO", "logger": "jaxserve.engine", "message": "ready at here\nsecond line\u2028\x85\udc80"}


@pytest.mark.usefixtures("stderr")
def test_on_a_terminal_lines_are_text(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    set_up_logging()
    logging.getLogger("jaxserve.engine").info("ready")
    assert re.fullmatch(r"20\S+ \S+ INFO jaxserve.engine: ready\n", terminal.getvalue())


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_given_format_is_taken_and_lines_come_once(stderr, log_format):
    for _ in range(2):
        set_up_logging(log_format)
    logging.getLogger("jaxserve").info("one")
    written = stderr()
    assert written.count("one") == 1
    assert written.startswith("{") == (log_format == "json")


def test_we_speak_from_info_on_and_others_from_warning_on(stderr):
    set_up_logging("json")
    for name in ("jaxserve.x", "other"):
        logging.getLogger(name).debug("debug")
        logging.getLogger(name).info("info")
        logging.getLogger(name).warning("warning")
    heard = [(record["logger"], record["message"]) for record in map(json.loads, stderr().splitlines())]
    assert heard == [("jaxserve.x", "info"), ("jaxserve.x", "warning"), ("other", "warning")]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_line_names_its_request(stderr, log_format):
    set_up_logging(log_format)
    token = request_id.set("cmpl-7")
    try:
        logging.getLogger("jaxserve").warning("slow")
    finally:
        request_id.reset(token)
    logging.getLogger("jaxserve").warning("other")
    slow, other = stderr().splitlines()
    if log_format == "json":
        assert json.loads(slow)["request_id"] == "cmpl-7"
    else:
        assert slow.endswith("slow (request 'cmpl-7')")
    assert "cmpl-7" not in other


def test_a_line_names_its_process_where_there_are_several_of_a_kind(stderr):
    set_up_logging("json", "engine 1")
    logging.getLogger("jaxserve.engine").info("ready")
    assert json.loads(stderr())["part"] == "engine 1"
    set_up_logging("text", "engine 1")
    logging.getLogger("jaxserve.engine").info("ready")
    assert stderr().endswith("INFO engine 1, jaxserve.engine: ready\n")


def test_exceptions_and_warnings_are_records(stderr):
    set_up_logging("json")
    try:
        raise ValueError("a bad\nvalue")
    except ValueError:
        logging.getLogger("jaxserve").exception("it failed")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old way", DeprecationWarning, stacklevel=1)
    failure, warning = map(json.loads, stderr().splitlines())
    assert failure["message"] == "it failed"
    assert failure["exception"].startswith("Traceback")
    assert failure["exception"].endswith("ValueError: a bad\nvalue")
    assert (warning["logger"], warning["level"]) == ("py.warnings", "WARNING")
    assert "old way" in warning["message"]


def test_announcements_are_plain_text_or_a_record_a_line(stderr):
    text = "  weights      0.25 s\n\n  done"
    set_up_logging("text")
    announce(text)
    assert stderr() == text + "\n"
    set_up_logging("json")
    announce(text)
    assert [json.loads(line)["message"] for line in stderr().splitlines()] == ["weights 0.25 s", "done"]
