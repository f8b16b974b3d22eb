"""The `smg` gateway in front of two servers: OpenAI chat, whole and streamed, also after one of them is gone."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve.conftest import running_server

pytest.importorskip("smg")
START_S = 60.0
CALL: dict[str, Any] = {
    "model": "counting",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 12,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running_gateway(workers: list[str], model_path: Path, log: Path) -> Iterator[openai.OpenAI]:
    port, metrics_port = free_port(), free_port()
    command = [
        sys.executable, "-m", "smg.launch_router", "--host", "127.0.0.1", "--port", str(port),
        "--worker-urls", *(f"grpc://{worker}" for worker in workers), "--model-path", str(model_path), "--policy", "round_robin",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--worker-startup-check-interval", "1",
        "--health-check-interval-secs", "1", "--health-check-timeout-secs", "1",
    ]  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=30) as client:
            yield client
    finally:
        process.kill()
        process.wait()


def wait_for_model(client: openai.OpenAI, log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        with contextlib.suppress(openai.APIError):
            if "counting" in [model.id for model in client.models.list()]:
                return
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)


def test_chat_through_the_gateway_survives_the_loss_of_a_server(model_path, tmp_path):
    log = tmp_path / "gateway.log"
    with (
        running_server(model_path, tmp_path / "kept") as kept,
        contextlib.ExitStack() as lost_stack,
        contextlib.ExitStack() as stack,
    ):
        lost = lost_stack.enter_context(running_server(model_path, tmp_path / "lost"))
        client = stack.enter_context(running_gateway([kept.grpc, lost.grpc], model_path, log))
        wait_for_model(client, log)
        prompt = kept.tokenizer.encode("<s>user: Hello<|im_end|>assistant: ", False)
        expected = kept.tokenizer.decode(kept.output_ids(prompt, 12), True)

        def ask() -> str:
            return client.chat.completions.create(**CALL).choices[0].message.content or ""

        def ask_for_stream() -> str:
            chunks = client.chat.completions.create(**CALL, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

        assert [ask(), ask(), ask_for_stream(), ask_for_stream()] == [expected] * 4
        assert kept.runner.num_steps and lost.runner.num_steps, "one server did all the work"
        lost_stack.close()
        assert [ask() for _ in range(4)] + [ask_for_stream() for _ in range(4)] == [expected] * 8
