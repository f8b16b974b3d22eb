"""`jaxserve serve`: starts the engines and front ends, says when they serve, keeps them running, and ends them in order.

The front ends start at once and answer that the model loads until it does. Of several engines the first one goes ahead: it converts the
checkpoint and compiles, and already serves while the others then find both done. A child that dies is started again at the same address
(`child.Keeper`), so the rest goes on; when this process dies, however, the kernel ends all of them (`engine.child_process`). Knows no
JAX and no requests. Next: `shares`, `child`, then `engine.__main__` and `serve.__main__`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve.cgroup import usable_cores
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.info import EngineInfo, engine_name
from jaxserve.logs import announce, set_up_logging
from jaxserve.serve import auth, tls
from jaxserve.serve.child import Keeper, Part
from jaxserve.serve.ports import held_ports
from jaxserve.serve.private_directory import private_directory
from jaxserve.serve.shares import Share, shares
from jaxserve.startup_report import changed_settings, curl_line, stage_line, summary
from jaxserve.text.chat_template import read_template

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 15.0
"""A child that has not ended this long after it should have is killed."""
HURRY_S = 3.0
"""A child that has not ended this long after the second signal is killed; a front end needs `ABORT_S` and `FLUSH_S` of it at most."""
ENGINE_MARGIN_S = 3.0
"""What an engine may be silent beyond `stall_timeout`: one that can still tell why it ends does so."""
CORES_FOR_TWO_FRONT_ENDS = 4
QUIET = {"GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "NONE")}
"""gRPC's own lines, of handshakes that failed for example, are not in the form that was asked for."""


def serve(engine: EngineConfig, server: ServerConfig, origins: Mapping[str, str]) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit status, 0 after either.

    Args:
        engine, server: The settings.
        origins: Where each setting that is not a default came from, to be printed.

    Raises:
        ConfigError: A port is taken, there are too few GPUs, or something else is wrong that shows at once; nothing was started.
    """
    set_up_logging(server.log_format)
    python = [sys.executable, "-m"]
    changes = changed_settings(engine, server, origins)
    each = shares(engine, server.data_parallel_size)
    return asyncio.run(supervise([*python, "jaxserve.engine"], asdict(engine), [*python, "jaxserve.serve"], server, changes, each))


async def supervise(
    engine_command: Sequence[str],
    engine_config: Mapping[str, Any],
    front_end_command: Sequence[str],
    server: ServerConfig,
    changes: Sequence[tuple[str, str, str]] = (),
    engine_shares: Sequence[Share] = (),
) -> int:
    """Runs the commands as described above; each gets its orders as JSON.

    Args:
        engine_command, engine_config: What runs an engine, and its settings.
        front_end_command, server: What runs a front end, and the settings of all else.
        changes: Settings that are printed at the end of start-up.
        engine_shares: What each engine may take; empty: nothing is cut.
    """
    tls.check(server)
    auth.log_warnings(server)
    if server.chat_template is not None:
        read_template(server.chat_template)  # refused here rather than by every front end
    with held_ports(server) as held, private_directory() as directory:
        engines = _engines(engine_command, engine_config, server, directory, engine_shares or [Share()] * server.data_parallel_size)
        front_ends = _front_ends(front_end_command, held, directory, [part.orders["engine_address"] for part in engines])
        return await _Supervisor(engines, front_ends, server, changes).run()


def _engines(
    command: Sequence[str], config: Mapping[str, Any], server: ServerConfig, directory: Path, engine_shares: Sequence[Share]
) -> list[Part]:
    parts, count = [], len(engine_shares)
    for i, share in enumerate(engine_shares):
        name = engine_name(i, count)
        orders = {
            "part": name if count > 1 else "",
            "log_format": server.log_format,
            "engine_address": f"unix:{directory}/engine{i}.sock",
            "config": config if share.num_threads is None else {**config, "num_threads": share.num_threads},
            "max_host_bytes": share.max_host_bytes,
            "server": {"max_waiting": server.max_waiting, "stall_timeout": server.stall_timeout},
        }
        parts.append(Part(name, command, orders, {**QUIET, **share.environment}, server.stall_timeout + ENGINE_MARGIN_S))
    return parts


def _front_ends(command: Sequence[str], server: ServerConfig, directory: Path, engine_addresses: Sequence[str]) -> list[Part]:
    orders = {"log_format": server.log_format, "engine_addresses": engine_addresses, "config": asdict(server), "share_ports": True}
    environment = {**QUIET, "PROMETHEUS_MULTIPROC_DIR": str(_make(directory / "metrics"))}
    count = num_front_ends(server)
    if count == 1:
        return [Part("the front end", command, {**orders, "part": ""}, environment, server.stall_timeout)]
    names = [f"front end {i + 1}" for i in range(count)]
    return [Part(name, command, {**orders, "part": name}, environment, server.stall_timeout) for name in names]


def num_front_ends(server: ServerConfig) -> int:
    """How many front ends there are to be: as told, else two where there are cores enough and the kernel deals out connections."""
    if server.api_server_count is not None:
        return server.api_server_count
    return 2 if sys.platform == "linux" and usable_cores() >= CORES_FOR_TWO_FRONT_ENDS else 1


class _Supervisor:
    """The children of one server from their start to their end."""

    def __init__(
        self, engines: Sequence[Part], front_ends: Sequence[Part], server: ServerConfig, changes: Sequence[tuple[str, str, str]]
    ) -> None:
        self._server = server
        self._changes = changes
        self._has_keys = bool(auth.read_keys(server))
        self._engines = [Keeper(part, server.max_restarts, partial(_print_stage, part.orders["part"])) for part in engines]
        self._front_ends = [Keeper(part, server.max_restarts, partial(_print_stage, part.orders["part"])) for part in front_ends]
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Until a signal (0) or until a child cannot be kept running (its status)."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal)
        first, *others = self._engines
        keeping = [asyncio.create_task(keeper.run()) for keeper in (first, *self._front_ends)]
        keeping += [asyncio.create_task(self._run_after(first, keeper)) for keeper in others]
        watching = [asyncio.create_task(self._stop.wait()), asyncio.create_task(self._print_summary())]
        try:
            await asyncio.wait({*keeping, watching[0]}, return_when=asyncio.FIRST_COMPLETED)
            return next((task.result() for task in keeping if task.done()), 0)
        finally:
            for task in (*keeping, *watching):
                task.cancel()
            await asyncio.wait({*keeping, *watching})
            # The front ends first, all together: what they still answer needs the engines.
            await asyncio.gather(*(keeper.stop(self._server.shutdown_timeout + STOP_TIMEOUT_S) for keeper in self._front_ends))
            await asyncio.gather(*(keeper.stop(STOP_TIMEOUT_S) for keeper in self._engines))

    async def _run_after(self, first: Keeper, keeper: Keeper) -> int:
        await asyncio.wait({first.first_ready})
        return await keeper.run()

    def _on_signal(self) -> None:
        """The first signal asks for an orderly end, the second one cuts it short."""
        keepers = (*self._front_ends, *self._engines)
        if not self._stop.is_set():
            announce(f"Stopping, within {self._server.shutdown_timeout:g} s; a second signal ends it at once.")
            self._stop.set()
            return
        announce("Ending at once.")
        for keeper in self._front_ends:
            keeper.hurry()  # aborts what is open: its clients hear of it
        for keeper in keepers:
            asyncio.get_running_loop().call_later(HURRY_S, keeper.kill)

    async def _print_summary(self) -> None:
        """Prints what is served and where, once all children serve."""
        await asyncio.wait({keeper.first_ready for keeper in (*self._engines, *self._front_ends)})
        infos = [EngineInfo(**keeper.first_ready.result()) for keeper in self._engines]
        endpoints = self._front_ends[0].first_ready.result()
        http = endpoints["http"]
        addresses = {name: address for name, address in (("HTTP", http), ("gRPC", endpoints["grpc"])) if address}
        announce(summary(infos, addresses, self._changes))
        if http:
            name = (*self._server.served_model_name, infos[0].model)[0]
            announce(f"\nReady. Try:\n\n  {curl_line(http, name, has_keys=self._has_keys)}\n")
        else:
            announce("\nReady.")


def _print_stage(part: str, name: str, seconds: float, detail: str) -> None:
    announce(stage_line(f"{part}: {name}" if part else name, seconds, detail))


def _make(directory: Path) -> Path:
    directory.mkdir(mode=0o700)
    return directory
