"""A server as processes: start, deaths and restarts of each kind of child, signals, and what a front end and a process list hold."""

import json
import re
import signal
import socket
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import openai
import psutil
import pytest
import trustme
from grpc_health.v1 import health_pb2

from jaxserve.serve.private_directory import sweep
from tests.serve.server_process import DIRECT, TIMEOUT_S, Call, connect, serving, until

KEY = "sk-secret-of-the-test"


def test_it_serves_without_jax_and_ends_in_order(model_path, tmp_path):
    with serving(model_path, tmp_path) as server:
        assert server.completes()
        assert re.search(r"weights +0\.25 s +none", server.text())
        curl = server.wait_for(r"(curl .*)\n")
        assert '"object":"text_completion"' in subprocess.run(curl, shell=True, capture_output=True, text=True, check=True).stdout
        [front_end] = server.children("jaxserve.serve")
        maps = Path(f"/proc/{front_end.pid}/maps").read_text()
        assert "jaxlib" not in maps
        children = server.children()
        assert len(children) == 2
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "Stopping" in server.text()
        assert not any(child.is_running() for child in children), server.text()
        assert not list(tmp_path.glob("jaxserve-*"))


def test_every_line_is_json_whatever_strangers_send(model_path, tmp_path):
    certificate = tmp_path / "both.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(certificate)
    with serving(model_path, tmp_path, ssl_certfile=str(certificate), log_format="json") as server:
        server.wait_for("(Ready)")
        for address in (server.grpc, server.wait_for(r"HTTP https://(127\.0\.0\.1:\d+)")):
            host, _, port = address.partition(":")
            with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as stranger:
                stranger.sendall(b"no handshake of TLS" * 100)
                with suppress(ConnectionResetError):
                    while stranger.recv(1024):
                        pass
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert all(json.loads(line)["level"] == "INFO" for line in server.text().splitlines())


def test_the_calls_of_a_killed_front_end_free_their_pages_and_others_go_on(model_path, tmp_path):
    with serving(model_path, tmp_path, api_server_count=2) as server, ExitStack() as stack:
        server.wait_for("(Ready)")
        channels = server.channels(stack)
        victim, survivor = channels
        lost = [Call(channels[victim], [3 + i, 7]) for i in range(3)]
        kept = [Call(channels[survivor], [30 + i, 7]) for i in range(2)]
        until(lambda: all(call.token_ids for call in lost + kept), "tokens")
        before = server.stats()
        assert before.num_running == 5
        victim.kill()
        until(lambda: server.stats().num_running == 2, "the dead one's sequences end")
        assert server.stats().num_steps - before.num_steps <= 100, "steps that take a second where the machine is not busy"
        assert server.stats().num_used_pages <= 2 * 256 // 16
        assert all(call.is_alive() for call in kept)
        for call in lost:
            call.wait()
            assert call.error is not None and call.error.code() == grpc.StatusCode.UNAVAILABLE
        for call in kept:
            call.wait()
            assert call.error is None
            assert call.token_ids == call.expected
        assert server.stats().num_used_pages == 0
        assert re.search(r"front end \d was killed by SIGKILL; restart 1 of at most 5 follows in 0\.5 s", server.text())
        server.wait_for(r"(front end \d) serves again")
        assert len(server.children("jaxserve.serve")) == 2
        assert server.completes()


def test_a_killed_engine_fails_what_is_open_with_a_clear_error_and_comes_back(model_path, tmp_path):
    with serving(model_path, tmp_path, api_server_count=2) as server, connect(server.grpc) as channel:
        assert server.completes()
        assert server.status("/ready") == 200
        assert server.health() == health_pb2.HealthCheckResponse.SERVING
        call = Call(channel, [3, 7])
        with server.client() as client:
            chunks = client.completions.create(model="counting", prompt=[9, 7], max_tokens=200, stream=True)
            next(iter(chunks))
            until(lambda: call.token_ids, "tokens")
            server.engine().kill()
            with pytest.raises(openai.APIError, match="engine"):
                list(chunks)
        call.wait()
        assert call.error is not None
        assert call.error.code() == grpc.StatusCode.UNAVAILABLE
        assert "engine" in call.error.details()
        until(lambda: server.status("/ready") == 503, "/ready drops")
        until(lambda: server.health() == health_pb2.HealthCheckResponse.NOT_SERVING, "gRPC health drops")
        assert server.status("/live") == 200
        with pytest.raises(openai.InternalServerError, match="503"):
            server.completes()
        assert "the engine was killed by SIGKILL; restart 1 of at most 5 follows in 0.5 s" in server.text()
        server.wait_for("(the engine serves again)")
        is_serving = health_pb2.HealthCheckResponse.SERVING
        # Each question reaches one of the two front ends: eight good answers in a row are both of them's.
        until(lambda: all(server.status("/ready") == 200 and server.health() == is_serving for _ in range(8)), "ready again")
        assert server.completes()


def test_an_engine_that_hangs_is_started_again(model_path, tmp_path):
    with serving(model_path, tmp_path, {"COUNTING_ENGINE_STEP_S": "60"}, stall_timeout=3) as server, connect(server.grpc) as channel:
        call = Call(channel, [3, 7])
        call.wait()
        assert call.error is not None
        assert call.error.code() == grpc.StatusCode.UNAVAILABLE
        server.wait_for("(the engine ended with status 1; restart 1 of at most 5)")
        assert "run" in server.text()  # the stacks tell where it hung
        server.wait_for("(the engine serves again)")
        until(lambda: server.status("/ready") == 200, "ready again")


def test_a_front_end_that_hangs_is_started_again(model_path, tmp_path):
    with serving(model_path, tmp_path, api_server_count=2, stall_timeout=3) as server:
        server.wait_for("(Ready)")
        hanging, other = server.children("jaxserve.serve")
        hanging.suspend()
        server.wait_for(r"(front end \d hangs: it has given no sign of life for 3 s; ending it)")
        server.wait_for(r"(front end \d serves again)")
        assert not hanging.is_running()
        assert other.is_running()
        assert all(server.completes() for _ in range(4))


def test_killing_the_supervisor_leaves_no_process_and_no_port(model_path, tmp_path):
    with serving(model_path, tmp_path, api_server_count=2, api_key=[KEY]) as server:
        server.wait_for("(Ready)")
        ports = [int(address.rpartition(":")[2]) for address in (server.http, server.grpc)]
        children = server.children()
        # Where every user of the machine could read them.
        assert not any(KEY in " ".join(child.cmdline()) for child in children)
        assert KEY not in server.text()
        server.process.kill()
        gone, alive = psutil.wait_procs(children, timeout=5)
        assert len(gone) == 3
        assert not alive
        for port in ports:
            socket.create_server(("127.0.0.1", port)).close()
        assert list(tmp_path.glob("jaxserve-*"))
        server.process.wait()
        sweep(tmp_path)  # as the next start does
        assert not list(tmp_path.glob("jaxserve-*"))


def test_sigterm_lets_open_calls_end_and_refuses_new_ones(model_path, tmp_path):
    with serving(model_path, tmp_path) as server, connect(server.grpc) as channel:
        call = Call(channel, [3, 7])
        until(lambda: call.token_ids, "tokens")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.status("/ready") in (0, 503), "/ready drops")
        refused = Call(channel, [4, 7])
        refused.wait()
        assert refused.error is not None
        assert refused.error.code() == grpc.StatusCode.UNAVAILABLE
        call.wait()
        assert call.token_ids == call.expected
        assert call.finish_reason == "length"
        assert server.wait() == 0


def test_what_has_not_ended_within_the_shutdown_timeout_is_aborted(model_path, tmp_path):
    with serving(model_path, tmp_path, {"COUNTING_ENGINE_STEP_S": "0.2"}, shutdown_timeout=0.5) as server, connect(server.grpc) as channel:
        call = Call(channel, [3, 7])
        until(lambda: call.token_ids, "tokens")
        server.process.send_signal(signal.SIGINT)
        call.wait()
        assert call.error is None
        assert call.finish_reason == "abort"
        assert server.wait() == 0


def test_a_second_signal_ends_it_at_once(model_path, tmp_path):
    with serving(model_path, tmp_path, {"COUNTING_ENGINE_STEP_S": "0.2"}) as server, connect(server.grpc) as channel:
        call = Call(channel, [3, 7])
        until(lambda: call.token_ids, "tokens")
        children = server.children()
        [front_end] = server.children("jaxserve.serve")
        front_end.suspend()  # a busy one: it finds both signals at once
        server.process.send_signal(signal.SIGINT)
        server.wait_for("(Stopping)")
        server.process.send_signal(signal.SIGINT)
        server.wait_for("(Ending at once)")
        front_end.resume()
        assert server.process.wait(10) == 0
        assert not any(child.is_running() for child in children)
        call.wait()
        assert call.finish_reason == "abort"


def test_restarts_used_up_end_the_server(model_path, tmp_path):
    with serving(model_path, tmp_path, max_restarts=1) as server:
        server.wait_for("(Ready)")
        server.engine().kill()
        server.wait_for("(the engine serves again)")
        children = server.children()
        server.engine().kill()
        assert server.wait() == 1
        assert "after 1 restarts in 10 minutes (--max-restarts 1); ending the server" in server.text()
        assert not any(child.is_running() for child in children)


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_busy_port_ends_the_start_naming_the_flag(model_path, tmp_path, flag):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with serving(model_path, tmp_path, **{flag.strip("-").replace("-", "_"): port}) as server:
            assert server.wait() == 2
            assert f"{flag} {port} on 127.0.0.1 cannot be used" in server.text()


@pytest.mark.parametrize("setting", ["ssl_certfile", "api_key_file"])
def test_a_missing_file_ends_the_start_before_anything_is_started(model_path, tmp_path, setting):
    with serving(model_path, tmp_path, **{setting: str(tmp_path / "missing")}) as server:
        assert server.wait() == 2
        assert server.text().startswith(f"--{setting.replace('_', '-')} {tmp_path / 'missing'} cannot be read: No such file or directory")


def test_an_engine_that_cannot_start_ends_the_server_with_its_status(model_path, tmp_path):
    with serving(model_path, tmp_path, {"COUNTING_ENGINE_FAILS": "1"}) as server:
        assert server.wait() == 2
        assert "no such model" in server.text()


def test_sigterm_ends_a_server_that_is_still_starting(model_path, tmp_path):
    with serving(model_path, tmp_path, {"COUNTING_ENGINE_HANGS": "1"}) as server:
        children = until(lambda: len(found := server.children()) == 2 and found, "two children")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert not any(child.is_running() for child in children), server.text()


def test_metrics_are_the_totals_of_all_front_ends_and_log_lines_are_json(model_path, tmp_path):
    with serving(model_path, tmp_path, api_server_count=2, log_format="json") as server:
        server.wait_for("(Ready)")

        def ended() -> list[float]:
            """Ask over several connections, so that both answer."""
            counts = []
            for _ in range(6):
                with DIRECT.open(f"{server.http}/metrics", timeout=TIMEOUT_S) as answer:
                    [count] = re.findall(rb'jaxserve:request_success_total\{.*finished_reason="length".*\} (\S+)', answer.read())
                    counts.append(float(count))
            return counts

        assert all(server.completes() for _ in range(8))
        assert ended() == [8] * 6
        victim = server.children("jaxserve.serve")[0]
        victim.kill()
        server.wait_for(r"(front end \d) serves again")
        assert server.completes()
        assert ended() == [9] * 6
        lines = [json.loads(line) for line in server.text().splitlines()]
    assert {"time", "level", "logger", "message", "process"} <= set.intersection(*map(set, lines))
    assert len({line["process"] for line in lines}) >= 2
