#!/usr/bin/env python
"""Wears a whole server out: rounds of many clients of which some walk away, then minutes of mixed load.

    python scripts/soak.py MODEL [--clients 200] [--rounds 10] [--minutes 20]

`jaxserve serve` runs as it would for users, in processes of its own. Rounds: all clients at once, HTTP (the `openai` package) and gRPC by
turns, a fifth of them disconnecting at a random moment; every other answer must equal the request run alone (near-ties aside), and
after each round no page may be in use. Load: clients that send one request after the other, each the same requests over and over in an
order of its own, so that any five minutes hold the same work; the first minute does not count.

Printed: each round, each minute, and as the last line one JSON document. Ends with 1 when an answer differs, a page is lost, something was
compiled, memory grew by more than 5 % or the throughput of the last five minutes is not within 5 % of the first five's. Tokens for each
second of processor time tell why: where they stay the same while throughput falls, something else took the processor.
Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import grpc
import openai
import psutil
from serving_demo import Case, Tokens, is_near_tie, make_cases, over_grpc, over_http
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

NUM_CASES = 50
SHARE_LEAVING = 0.2
MAX_CHANGE = 0.05
START_TIMEOUT_S = 300.0
SHARE_LEAVING_LOAD = 0.04
WARM_UP_S = 60.0
WINDOW = 5
"""Minutes that are compared at both ends."""


@dataclass
class Server:
    """A running server and what can be asked of it."""

    process: subprocess.Popen[bytes]
    http: str
    grpc: str

    def rss_bytes(self) -> dict[str, int]:
        """Resident memory by the role of each child."""
        sizes: dict[str, int] = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            role = next((part.rpartition(".")[2] for part in child.cmdline() if part in ("jaxserve.engine", "jaxserve.serve")), "other")
            sizes[role] = sizes.get(role, 0) + child.memory_info().rss
        return sizes

    def cpu_s(self) -> float:
        """Processor time of all processes so far."""
        root = psutil.Process(self.process.pid)
        return sum(process.cpu_times().user + process.cpu_times().system for process in [root, *root.children(recursive=True)])

    def figure(self, name: str) -> float:
        """A metric summed over its labels."""
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        values = re.findall(rf"^jaxserve:{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        assert values, f"the server has no metric {name}"
        return sum(map(float, values))


@contextmanager
def serving(model: str, flags: list[str]) -> Iterator[Server]:
    """`jaxserve serve` on free ports, ready; ended with SIGTERM."""
    ports = [_free_port(), _free_port()]
    command = [sys.executable, "-m", "jaxserve.cli", "serve", model, "--served-model-name", "demo"]
    command += ["--port", str(ports[0]), "--grpc-port", str(ports[1]), *flags]
    process = subprocess.Popen(command)
    server = Server(process, f"http://127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}")
    try:
        _wait_until_ready(server)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        print(f"the server ended with status {process.wait(120)}", file=sys.stderr)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _wait_until_ready(server: Server) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while server.process.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{server.http}/ready", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit("the server did not become ready")


@dataclass
class Doors:
    """A client of each protocol; asking both for the same must give the same."""

    http: openai.AsyncOpenAI
    stub: VllmEngineStub

    async def send(self, case: Case, door: int) -> Tokens:
        """The case over HTTP (0) or gRPC (1)."""
        return await (over_grpc(self.stub, case) if door else over_http(self.http, case))


@asynccontextmanager
async def doors_of(server: Server) -> AsyncIterator[Doors]:
    """Opens both."""
    async with (
        openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=2, timeout=600) as client,
        grpc.aio.insecure_channel(server.grpc) as channel,
    ):
        yield Doors(client, VllmEngineStub(channel))


@dataclass
class Findings:
    """What must not be, in words; and figures."""

    faults: list[str] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)


async def run_rounds(server: Server, doors: Doors, cases: list[Case], args: argparse.Namespace, found: Findings) -> None:
    """Rounds of `args.clients` clients at once."""
    expected = [await doors.send(case, 0) for case in cases]
    rng = random.Random(1)
    sizes, walls, num_left, num_checked, num_ties = [], [], 0, 0, 0
    for number in range(1, args.rounds + 1):
        started = time.perf_counter()
        chosen = [(rng.randrange(len(cases)), rng.random() < SHARE_LEAVING, rng.uniform(0.0, 10.0)) for _ in range(args.clients)]
        results = await asyncio.gather(*(_client(doors, cases[c], i % 2, leaves, after) for i, (c, leaves, after) in enumerate(chosen)))
        walls.append(time.perf_counter() - started)
        for (c, _, _), result in zip(chosen, results, strict=True):
            num_left += result is None
            num_checked += result is not None
            if result is None or result == expected[c]:
                continue
            num_ties += 1
            if not await is_near_tie(doors.http, cases[c], expected[c], result):
                found.faults.append(f"round {number}: an answer differs from the request run alone: {cases[c].params}")
        await _check_idle(server, f"round {number}", found)
        sizes.append(sum(server.rss_bytes().values()))
        print(f"round {number:>2}: {walls[-1]:6.1f} s, {sizes[-1] / 2**20:8.1f} MiB", flush=True)
    found.figures |= {
        "clients": args.clients, "rounds": args.rounds, "answers_checked": num_checked, "disconnected": num_left, "near_ties": num_ties,
        "median_round_s": statistics.median(walls), "rss_mib": [round(size / 2**20, 1) for size in sizes],
    }  # fmt: skip
    if args.rounds > 3:
        _check_growth("memory from round 3 to the last", sizes[2], sizes[-1], found)


async def _client(doors: Doors, case: Case, door: int, leaves: bool, after_s: float) -> Tokens | None:
    """One answer; None when this client went away before it had it."""
    if not leaves:
        return await doors.send(case, door)
    try:
        return await asyncio.wait_for(doors.send(case, door), after_s)
    except TimeoutError:
        return None


async def _check_idle(server: Server, when: str, found: Findings) -> None:
    """Every page is free or cached once the last abort arrived."""
    for _ in range(100):
        if server.figure("num_requests_running") + server.figure("num_requests_waiting") + server.figure("kv_cache_usage_perc") == 0:
            return
        await asyncio.sleep(0.1)
    found.faults.append(f"{when}: sequences or pages are left: {server.figure('kv_cache_usage_perc'):.4f} of the pages in use")


async def run_load(server: Server, doors: Doors, cases: list[Case], args: argparse.Namespace, found: Findings) -> None:
    """Mixed load for `args.minutes`; a line and a look at memory each minute."""
    stop = asyncio.Event()

    async def client(number: int) -> None:
        for case, leaves, after_s in itertools.cycle(_deck(cases, number)):
            if stop.is_set():
                return
            await _client(doors, case, number % 2, leaves, after_s)

    clients = [asyncio.create_task(client(number)) for number in range(args.load_clients)]
    await asyncio.sleep(WARM_UP_S)
    rates, cpu_rates, sizes = [], [], []
    before, cpu_before, at = server.figure("generation_tokens_total"), server.cpu_s(), time.perf_counter()
    for minute in range(1, args.minutes + 1):
        await asyncio.sleep(max(0.0, 60 - (time.perf_counter() - at)))
        now, tokens, cpu_s = time.perf_counter(), server.figure("generation_tokens_total"), server.cpu_s()
        rates.append((tokens - before) / (now - at))
        cpu_rates.append((tokens - before) / (cpu_s - cpu_before))
        sizes.append(sum(server.rss_bytes().values()))
        before, cpu_before, at = tokens, cpu_s, now
        print(f"minute {minute:>2}: {rates[-1]:7.1f} tokens/s, {sizes[-1] / 2**20:8.1f} MiB", flush=True)
    stop.set()
    await asyncio.gather(*clients)
    await _check_idle(server, "after the load", found)
    found.figures |= {
        "minutes": args.minutes,
        "load_clients": args.load_clients,
        "load_rss_mib": [round(size / 2**20, 1) for size in sizes],
    }
    found.figures["tokens_per_s"] = [round(rate, 1) for rate in rates]
    found.figures["tokens_per_cpu_s"] = [round(rate, 1) for rate in cpu_rates]
    if args.minutes >= 2 * WINDOW:
        first, last = statistics.fmean(rates[:WINDOW]), statistics.fmean(rates[-WINDOW:])
        found.figures |= {"first_tokens_per_s": round(first, 1), "last_tokens_per_s": round(last, 1)}
        _check_growth("memory under load", statistics.fmean(sizes[:WINDOW]), statistics.fmean(sizes[-WINDOW:]), found)
        if abs(last - first) > MAX_CHANGE * first:
            found.faults.append(f"throughput went from {first:.1f} to {last:.1f} tokens/s")


def _deck(cases: list[Case], number: int) -> list[tuple[Case, bool, float]]:
    """Each case once, in an order that hangs on `number` alone; with whether the client leaves, and after how many seconds."""
    rng = random.Random(number)
    order = rng.sample(cases, len(cases))
    leaving = rng.sample(range(len(cases)), round(SHARE_LEAVING_LOAD * len(cases)))
    return [(case, i in leaving, rng.uniform(0.0, 10.0)) for i, case in enumerate(order)]


def _check_growth(name: str, before: float, after: float, found: Findings) -> None:
    found.figures[name] = round(after / before, 4)
    if after > before * (1 + MAX_CHANGE):
        found.faults.append(f"{name} grew from {before / 2**20:.1f} to {after / 2**20:.1f} MiB")


async def soak(server: Server, args: argparse.Namespace) -> Findings:
    """Rounds, then load."""
    found = Findings()
    async with doors_of(server) as doors:
        cases = make_cases(NUM_CASES, args.vocab_size)
        await run_rounds(server, doors, cases, args, found)
        if args.minutes:
            await run_load(server, doors, cases, args, found)
    found.figures["compiles"] = int(server.figure("num_compiles_total"))
    found.figures["rss_by_role_mib"] = {role: round(size / 2**20, 1) for role, size in server.rss_bytes().items()}
    if found.figures["compiles"]:
        found.faults.append(f"{found.figures['compiles']} programs were compiled after warm-up")
    return found


def main() -> int:
    """Returns 0 when nothing was found that must not be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--minutes", type=int, default=20, help="of mixed load after the rounds; 0 leaves it out")
    parser.add_argument("--load-clients", type=int, default=48)
    parser.add_argument("--vocab-size", type=int, default=49152, help="token ids of the prompts are below it")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--api-server-count", type=int, default=2)
    args = parser.parse_args()
    flags = ["--dtype", args.dtype, "--api-server-count", str(args.api_server_count)]
    with serving(args.model, flags) as server:
        found = asyncio.run(soak(server, args))
    for fault in found.faults:
        print(f"FAULT: {fault}")
    print(
        json.dumps({"soak": os.path.basename(os.path.normpath(args.model)), "dtype": args.dtype, **found.figures, "faults": found.faults})
    )
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
