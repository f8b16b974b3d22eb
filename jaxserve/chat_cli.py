"""`jaxserve chat` and `jaxserve complete`: a conversation, or continuations of texts, at a terminal or in a pipe.

At a terminal there is a prompt with editing and history; Ctrl-C stops the answer and not the program, Ctrl-D ends it. Elsewhere each line
of standard input is a turn, and only answers are printed. Knows no flags (`cli`) and no protocol (`answer_source`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from jaxserve.answer_source import AnswerSource, Message, Write
from jaxserve.errors import ERROR_PREFIX, JaxserveError

HELP = "Ctrl-C stops an answer, Ctrl-D or /exit ends; /reset forgets the conversation."
Ask = Callable[[str, Write], str | None]


class Conversation:
    """The messages of a chat so far, and the next turn of it."""

    def __init__(self, source: AnswerSource, system: str | None) -> None:
        self._source = source
        self._first: list[Message] = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        """Forgets all but the system message."""
        self.messages = list(self._first)

    def ask(self, text: str, write: Write) -> str | None:
        """One turn. What was answered until an interrupt stays in the history; a turn that failed does not."""
        pieces: list[str] = []

        def write_and_keep(piece: str) -> None:
            pieces.append(piece)
            write(piece)

        question: Message = {"role": "user", "content": text}
        try:
            return self._source.chat([*self.messages, question], write_and_keep)
        except JaxserveError:
            pieces.clear()
            raise
        finally:
            if pieces:
                self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]


def run_chat(source: AnswerSource, system: str | None, message: str | None) -> int:
    """A conversation; with `message`, that one turn of it. Returns the exit status."""
    conversation = Conversation(source, system)
    return _run(conversation.ask, conversation.reset, message)


def run_complete(source: AnswerSource, prompt: str | None) -> int:
    """Continues each text that is given; with `prompt`, that one. Returns the exit status."""
    return _run(source.complete, lambda: None, prompt)


def _run(ask: Ask, reset: Callable[[], None], message: str | None) -> int:
    is_interactive = message is None and sys.stdin.isatty() and sys.stdout.isatty()
    if is_interactive:
        print(HELP, file=sys.stderr)
    lines = [message] if message is not None else _typed_lines() if is_interactive else _piped_lines()
    for line in lines:
        if message is None and line.strip() == "/exit":
            break
        if message is None and line.strip() == "/reset":
            reset()
        elif is_interactive:
            _answer_interactively(ask, line)
        else:
            ask(line, _write)
            _write("\n")
    return 0


def _answer_interactively(ask: Ask, line: str) -> None:
    """An answer, or one line about why there is none; Ctrl-C ends it early."""
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        _write(text)

    reason = None
    try:
        reason = ask(line, write)
    except KeyboardInterrupt:
        reason = "stopped"
    except JaxserveError as error:
        _end_line(written)
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        return
    _end_line(written)
    if reason not in ("stop", None):
        print({"length": "[ended: no more tokens allowed]"}.get(reason, f"[{reason}]"), file=sys.stderr)


def _typed_lines() -> Iterator[str]:
    """Lines typed at the prompt, until Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` editing and history
    while True:
        try:
            line = input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if line.strip():
            yield line


def _piped_lines() -> Iterator[str]:
    # Read one at a time, not by a buffer's worth: whoever writes may wait for an answer before the next line.
    while line := sys.stdin.readline():
        if text := line.rstrip("\r\n"):
            yield text


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _end_line(written: Sequence[str]) -> None:
    if "".join(written[-1:])[-1:] not in ("", "\n"):
        _write("\n")
