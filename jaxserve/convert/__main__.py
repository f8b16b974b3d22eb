"""`python -m jaxserve.convert SRC DST`: the command line of a conversion. Messages go to stderr; errors are one line."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from jaxserve.checkpoint_report import size
from jaxserve.convert.pipeline import convert
from jaxserve.errors import ERROR_PREFIX, JaxserveError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a conversion, shared with `jaxserve convert`."""
    parser.add_argument("src", metavar="SRC", help="a Hugging Face directory (safetensors), a GGUF file, or a hub id such as org/name")
    parser.add_argument("dst", metavar="DST", help="directory to make")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="type of the converted weights; auto keeps the stored types, and float32 for what GGUF has quantized (default: auto)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub id (default: main)")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is a converted checkpoint")


def run(arguments: argparse.Namespace) -> int:
    """Converts as the parsed flags say; the exit status."""
    # Weights never go to a device here, and starting one would take its memory from a server that runs beside.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # A termination runs the clean-up too.
    signal.signal(signal.SIGTERM, _exit)
    started = time.monotonic()
    progress = _Terminal()
    try:
        convert(
            arguments.src,
            arguments.dst,
            dtype=arguments.dtype,
            revision=arguments.revision,
            overwrite=arguments.overwrite,
            progress=progress,
        )
    except JaxserveError as error:
        progress.end_line()
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        progress.end_line()
        print("interrupted; nothing is left behind", file=sys.stderr)
        return 130
    progress.end_line()
    print(f"converted to {arguments.dst} in {time.monotonic() - started:.1f} s", file=sys.stderr)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and converts."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxserve.convert", description="Convert a checkpoint to the Orbax form that jaxserve reads."
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


def _exit(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


class _Terminal:
    """Progress on stderr: one line that is rewritten on a terminal, else a line for every tenth."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._started: float | None = None
        self._shown = 0.0
        self._is_line_open = False
        # Rates are counted from the first piece: importing Orbax takes seconds.
        self._first = 0

    def note(self, line: str) -> None:
        self.end_line()
        print(line, file=sys.stderr, flush=True)

    def advance(self, done_bytes: int, total_bytes: int, name: str) -> None:
        if self._started is None:
            self._started, self._first = time.monotonic(), done_bytes
        seconds = time.monotonic() - self._started
        is_last = done_bytes == total_bytes
        if self._is_terminal:
            if seconds - self._shown < 0.1 and not is_last:
                return
            self._shown = seconds
        else:
            if done_bytes / total_bytes - self._shown < 0.1 and not is_last:
                return
            self._shown = done_bytes / total_bytes
        rate = size(int((done_bytes - self._first) / max(seconds, 1e-3)))
        text = f"{100 * done_bytes // total_bytes:3d} %  {size(done_bytes)} of {size(total_bytes)}, {rate}/s, {name}"
        if self._is_terminal:
            print(f"\r{text:<79.79}", end="", file=sys.stderr, flush=True)
            self._is_line_open = True
        else:
            print(text, file=sys.stderr, flush=True)

    def end_line(self) -> None:
        """Leaves the line that is being rewritten."""
        if self._is_line_open:
            print(file=sys.stderr)
            self._is_line_open = False


if __name__ == "__main__":
    sys.exit(main())
