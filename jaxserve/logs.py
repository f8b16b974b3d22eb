"""Log lines of the processes of a server: to stderr, text on a terminal, else one JSON object a line. Imports nothing of jaxserve.

A library that embeds jaxserve sets up its own logging; only commands and their children call `set_up_logging`. The doors put the id of
the request that a task serves into `request_id`, and every line written on its behalf carries it. What a request says is never
logged but by `serve.request_log`.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

logger = logging.getLogger("jaxserve")

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that this task serves, as its client knows it."""

_HANDLER_NAME = "jaxserve"


def set_up_logging(log_format: str = "auto", part: str = "") -> None:
    """Our lines from INFO on, everybody else's and Python's warnings from WARNING on, all to stderr; a second call replaces the first.

    Args:
        log_format: "text", "json", or "auto": text when stderr is a terminal.
        part: What this process is among several of its kind, such as "engine 1": every line says so. Empty where there is but one.
    """
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if handler.get_name() == _HANDLER_NAME:
            root.removeHandler(handler)
    is_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(JsonFormatter(part) if is_json else TextFormatter(part))
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("jaxserve").setLevel(logging.INFO)
    logging.captureWarnings(True)


def announce(text: str, level: int = logging.INFO) -> None:
    """Tells whoever started this process something: as it is where log lines are text, a record for each line where they are JSON."""
    if not any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        print(text, file=sys.stderr, flush=True)
        return
    for line in text.splitlines():
        if words := " ".join(line.split()):
            logger.log(level, "%s", words)


class TextFormatter(logging.Formatter):
    """A line for people, with the request's id at its end."""

    def __init__(self, part: str = "") -> None:
        super().__init__(f"%(asctime)s %(levelname)s {part + ', ' if part else ''}%(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without the exception."""
        given = request_id.get()
        return super().formatMessage(record) + (f" (request {given!r})" if given else "")


class JsonFormatter(logging.Formatter):
    """One JSON object: time (UTC), level, logger, message, process, and part, request_id and exception where there are any."""

    def __init__(self, part: str = "") -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        if self._part:
            line["part"] = self._part
        if given := request_id.get():
            line["request_id"] = given
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)  # ASCII: some characters end a line for some readers
