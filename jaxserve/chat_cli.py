"""`jaxserve chat` and `jaxserve complete`: a conversation, or continuations of texts, at a terminal or in a pipe.

At a terminal there is a prompt with editing and history; Ctrl-C stops the answer and not the program, Ctrl-D ends it. Elsewhere each line
of standard input is a turn, and only answers are printed. Knows no flags (`cli`) and no protocol (`answer_source`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import TextIOWrapper

from jaxserve.answer_source import AnswerSource, Message, Write
from jaxserve.errors import ERROR_PREFIX, InvalidRequest, JaxserveError

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
    if message is not None:
        _answer(ask, message)
    elif sys.stdin.isatty() and sys.stdout.isatty():
        _converse(ask, reset)
    else:
        _answer_lines(ask, reset)
    return 0


def _answer_lines(ask: Ask, reset: Callable[[], None]) -> None:
    """Turns from a pipe or a file, until its end or /exit; InvalidRequest where it holds none."""
    line = None
    for line in _piped_lines():
        if line.strip() == "/exit":
            break
        if line.strip() == "/reset":
            reset()
        else:
            _answer(ask, line)
    if line is None:
        raise InvalidRequest("standard input is empty: give a line there or as an argument.")


def _answer(ask: Ask, text: str) -> None:
    """An answer and the end of its line, and nothing else."""
    ask(text, _write)
    _write("\n")


def _converse(ask: Ask, reset: Callable[[], None]) -> None:
    """Turns at a terminal, until Ctrl-D or /exit. Ctrl-C, whenever it comes, leads back to the prompt."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` editing and history
    print(HELP, file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
            if line == "/exit":
                return
            if line == "/reset":
                reset()
            elif line:
                _answer_at_terminal(ask, line)
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)


def _answer_at_terminal(ask: Ask, text: str) -> None:
    """An answer, or one line about why there is none; Ctrl-C ends it early."""
    last = "\n"

    def write(piece: str) -> None:
        nonlocal last
        last = piece[-1:] or last
        _write(piece)

    note = None
    try:
        reason = ask(text, write)
        if reason not in ("stop", None):
            note = "[ended: no more tokens allowed]" if reason == "length" else f"[ended: {reason}]"
    except KeyboardInterrupt:
        note = "[stopped]"
    except JaxserveError as error:
        note = f"{ERROR_PREFIX}{error}"
    if last != "\n":
        _write("\n")
    if note is not None:
        print(note, file=sys.stderr)


def _piped_lines() -> Iterator[str]:
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    # Read one at a time, not by a buffer's worth: whoever writes may wait for an answer before the next line.
    while line := sys.stdin.readline():
        if text := line.rstrip("\r\n"):
            yield text


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
