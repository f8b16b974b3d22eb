"""`jaxserve chat` and `complete` as a person and a pipe meet them: a pseudo-terminal, against a server and with a model in process."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli import main

# Makes its standard input the controlling terminal, as a shell would, so that Ctrl-C arrives as a signal.
LAUNCH = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
TIMEOUT_S = 150.0
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


class Terminal:
    """A command at a pseudo-terminal."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-c", LAUNCH, sys.executable, "-m", "jaxserve", *arguments]
        environ = {**os.environ, "TERM": "dumb", **environ}
        self._process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environ)
        os.close(slave)
        self._text = ""
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # a terminal whose programs have ended
            while data := os.read(self._master, 4096):
                with self._arrived:
                    self._text += data.decode("utf-8", "replace")
                    self._arrived.notify_all()

    def type(self, keys: str) -> None:
        """Presses keys."""
        os.write(self._master, keys.encode())

    def expect(self, pattern: str) -> str:
        """Waits for the pattern and takes everything up to its end."""
        with self._arrived:
            found: list[re.Match[str]] = []

            def is_there() -> bool:
                found[:] = filter(None, [re.search(pattern, self._text, re.DOTALL)])
                return bool(found)

            assert self._arrived.wait_for(is_there, TIMEOUT_S), f"no {pattern!r} in {self._text!r}"
            taken, self._text = self._text[: found[0].end()], self._text[found[0].end() :]
            return taken

    def press_ctrl_c_until(self, pattern: str) -> None:
        """Presses Ctrl-C, again after a while: where Python is just about to wait for a key, it notices the first only with the next."""
        end = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, self._text, re.DOTALL):
            assert time.monotonic() < end, f"no {pattern!r} in {self._text!r}"
            self.type("\x03")
            with self._arrived:
                self._arrived.wait_for(lambda: re.search(pattern, self._text, re.DOTALL), 2.0)
        self.expect(pattern)

    def end(self) -> int:
        """Waits for the program to end by itself; its status."""
        return self._process.wait(TIMEOUT_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(TIMEOUT_S)
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Any]:
    terminals: list[Terminal] = []

    def start(*arguments: str, **environ: str) -> Terminal:
        terminals.append(Terminal(*arguments, **environ))
        return terminals[-1]

    yield start
    for one in terminals:
        one.close()


@pytest.fixture(scope="module")
def checkpoint(golden_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny real model with a chat template."""
    path = tmp_path_factory.mktemp("chat") / "tiny"
    shutil.copytree(golden_dir / "llama3-rope", path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def slow_server(fresh_server: Any) -> Any:
    """Answers of 150 tokens take three seconds."""
    fresh_server.runner.step_s = 0.02
    return fresh_server


def run(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxserve", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, **environ})


def completion(server: Any, prompt: str, num_tokens: int) -> str:
    """The text that the counting model gives after a prompt."""
    ids = server.tokenizer.encode(prompt)
    return server.tokenizer.decode(ids + server.output_ids(ids, num_tokens))[len(prompt) :]


def test_ctrl_c_stops_the_answer_and_not_the_program(slow_server: Any, terminal: Any) -> None:
    chat = terminal("chat", "--url", slow_server.http, "--temperature", "0", "--min-tokens", "150", "--max-tokens", "150")
    chat.expect("> ")
    chat.type("hello\n")
    chat.expect("hello\r\n.+")  # the echo, and the beginning of an answer
    chat.type("\x03")
    chat.expect(r"\[stopped\]\r\n> ")
    slow_server.wait_until_idle(2.0)
    num_steps = slow_server.runner.num_steps
    assert num_steps < 150, "the request was aborted, not read to its end"
    slow_server.runner.step_s = 0.0
    chat.type("and now?\n")
    chat.expect(r"\[ended: no more tokens allowed\]\r\n> ")
    assert slow_server.runner.num_steps >= num_steps + 150, "the second turn had an answer of its own"
    chat.type("\x04")
    assert chat.end() == 0


def test_ctrl_c_at_the_prompt_gives_another_one(server: Any, terminal: Any) -> None:
    chat = terminal("complete", "--url", server.http, "--temperature", "0", "--max-tokens", "3")
    chat.expect("> ")
    chat.type("half a line")
    chat.expect("half a line")
    chat.press_ctrl_c_until("\r\n> ")
    chat.type("a prompt\n")
    chat.expect(r"\[ended: no more tokens allowed\]\r\n> ")
    chat.type("\x04")
    assert chat.end() == 0


def test_history_is_sent_and_reset_forgets_it(fresh_server: Any, terminal: Any) -> None:
    chat = terminal("chat", "--url", fresh_server.http, "alias", "--temperature", "0", "--max-tokens", "4")
    prompts: list[int] = []
    add = fresh_server.engine.add
    fresh_server.engine.add = lambda request: (prompts.append(len(request.prompt_token_ids)), add(request))[1]
    for line in ("hello", "hello", "/reset", "hello"):
        chat.expect("> ")
        chat.type(f"{line}\n")
    chat.expect("> ")
    chat.type("/exit\n")
    assert chat.end() == 0
    assert prompts[0] == prompts[2] < prompts[1]


def test_a_turn_that_fails_is_one_line_and_the_next_one_works(fresh_server: Any, terminal: Any) -> None:
    chat = terminal("chat", "--url", fresh_server.http, "--system", "not allowed by the template")
    chat.expect("> ")
    chat.type("hello\n")
    chat.expect(r"jaxserve: error: [^\n]*no system role here[^\n]*\r\n> ")
    chat.type("hello\n")
    chat.expect(r"no system role here[^\n]*\r\n> ")
    chat.type("\x04")
    assert chat.end() == 0


def test_pipes_get_answers_only(server: Any) -> None:
    prompts = ["a prompt", "another one"]
    flags = ("--temperature", "0", "--max-tokens", "6")
    result = run("complete", "--url", server.http + "/v1/", *flags, stdin="".join(f"{prompt}\n" for prompt in prompts))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "".join(completion(server, prompt, 6) + "\n" for prompt in prompts)
    assert result.stderr == ""
    one = run("complete", "--url", server.http, *flags, "--prompt", prompts[0])
    assert one.stdout == completion(server, prompts[0], 6) + "\n"


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_an_empty_pipe_is_an_error(server: Any, command: str) -> None:
    result = run(command, "--url", server.http, stdin="\n")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("jaxserve: error: standard input is empty") and result.stderr.count("\n") == 1


def test_one_message(server: Any) -> None:
    result = run("chat", "--url", server.http, "--temperature", "0", "--max-tokens", "6", "--message", "/reset", stdin="not read\n")
    ids = server.tokenizer.encode("<s>user: /reset<|im_end|>assistant: ", add_special_tokens=False)
    prompt, whole = (server.tokenizer.decode(each, True) for each in (ids, ids + server.output_ids(ids, 6)))
    assert (result.stdout, result.returncode) == (whole.removeprefix(prompt) + "\n", 0), result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["chat", "--url", "{url}", "nothing", "--message", "a"], 2, "the model 'nothing' does not exist"),
        (["complete", "--url", "{url}", "--prompt", "a", "--max-tokens", "-1"], 2, "max_tokens is -1"),
        (["complete", "--url", "{url}", "--prompt", "a", "--min-tokens", "5", "--max-tokens", "300", "--top-k", "-2"], 2, "top_k is -2"),
        (["chat", "--url", "http://127.0.0.1:9", "--message", "a"], 1, "cannot reach http://127.0.0.1:9/v1: "),
        (["chat", "--url", "127.0.0.1:8000"], 2, "--url is '127.0.0.1:8000'; it must be such as http://127.0.0.1:8000."),
        (["chat", "--url", "http://[::1"], 2, "--url is 'http://[::1'; it must be such as http://127.0.0.1:8000."),
        (["chat", "--url", "{url}", "--api-key", "kлюч"], 2, "the API key holds characters other than printable ASCII"),
        (["chat", "--url", "{url}", "--api-key", "k\ney"], 2, "the API key holds characters other than printable ASCII"),
        (["chat"], 2, "neither MODEL nor --url is given"),
        (["chat", "m", "--api-key", "k"], 2, "--api-key is for a server"),
        (["chat", "--url", "{url}", "--dtype", "float32"], 2, "--dtype is a setting of an engine"),
        (["complete", "--url", "{url}", "--config", "x.yaml"], 2, "--config is a setting of an engine"),
        (["chat", "m", "--mesage", "a"], 2, "unknown argument '--mesage'. Did you mean --message?"),
    ],
)
def test_errors_are_one_line(server: Any, arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument.format(url=server.http) for argument in arguments]) == status
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if not line.startswith("  ")]  # but for the stages of start-up
    assert captured.out == ""
    assert len(errors) == 1
    assert errors[0].startswith("jaxserve: error: ") and message in errors[0]


def test_the_key_comes_from_the_flag_or_a_variable(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxserve import answer_source

    sent: list[Any] = []

    class Source(answer_source.ServerSource):
        def __init__(self, url: str, model: str | None, api_key: str | None, sampling: dict[str, Any]) -> None:
            sent.append(api_key)
            super().__init__(url, model, api_key, sampling)

    monkeypatch.setattr(answer_source, "ServerSource", Source)
    command = ["complete", "--url", server.http, "--prompt", "a", "--max-tokens", "1"]
    monkeypatch.setenv("OPENAI_API_KEY", "third")
    assert main(command) == 0
    monkeypatch.setenv("JAXSERVE_API_KEY", "second,other")
    assert main(command) == 0
    assert main([*command, "--api-key", "first"]) == 0
    assert sent == ["third", "second", "first"]
    assert "first" not in capsys.readouterr().err


def test_a_model_in_process(checkpoint: Path, terminal: Any) -> None:
    """Progress, an answer that Ctrl-C stops, another turn, and the same from a pipe; one engine for each of the two."""
    small = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "8000", "--kv-cache-memory-bytes", "4MiB")
    flags = ("--dtype", "float32", "--temperature", "0", "--attention-backend", "xla", *small)
    chat = terminal("chat", str(checkpoint), *flags, "--min-tokens", "7900")
    chat.expect("weights.*programs.*> ")
    chat.type("hello\n")
    chat.expect("hello\r\n.+")
    started = time.monotonic()
    chat.type("\x03")
    chat.expect(r"\[stopped\]\r\n> ")
    assert time.monotonic() - started < 3, "the rest of the answer was not waited for"
    chat.type("more\n")
    chat.expect("more\r\n.+")
    chat.type("\x03")
    chat.expect(r"\[stopped\]\r\n> ")
    chat.type("/exit\n")
    assert chat.end() == 0

    piped = run("complete", str(checkpoint), *flags, "--max-tokens", "5", stdin="hello\nhello\n")
    assert piped.returncode == 0, piped.stderr
    first, second, rest = piped.stdout.split("\n")
    assert first and (first, rest) == (second, ""), "no history in completions"
    assert "programs" in piped.stderr and "Traceback" not in piped.stderr
