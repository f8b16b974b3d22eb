"""The engine process: builds an engine from its orders and serves it over EngineLink. Started by `jaxserve.serve.supervisor`."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
from dataclasses import asdict, replace

from jaxserve.config import EngineConfig
from jaxserve.engine.child_process import Reports, read_orders
from jaxserve.errors import ERROR_PREFIX, JaxserveError
from jaxserve.logs import announce

WAITING_PER_SEAT = 4
"""Sequences that may wait for each that can run, unless `--max-waiting` says otherwise."""


def main() -> int:
    """Runs until told to stop (0) or until the engine cannot go on (1); 2 when it cannot be built."""
    orders = read_orders()
    reports = Reports(orders["report_fd"])
    faulthandler.register(signal.SIGUSR1)  # the supervisor's question before it ends a process that hangs
    # Seconds of imports, which must find this process tied to its parent already.
    from jax import profiler

    from jaxserve.engine.build import build_engine
    from jaxserve.engine.interpreter import prompt_interpreter
    from jaxserve.engine.link_server import run_engine_process
    from jaxserve.engine.profiler import Profiler

    try:
        engine = build_engine(EngineConfig(**orders["config"]), reports.stage, max_host_bytes=orders["max_host_bytes"])
    except JaxserveError as error:
        announce(f"{ERROR_PREFIX}{error}", logging.ERROR)
        return 2
    server = orders["server"]
    info = replace(engine.info, max_waiting=server["max_waiting"] or WAITING_PER_SEAT * engine.info.max_num_seqs)
    try:
        with prompt_interpreter():
            return run_engine_process(
                engine,
                info,
                orders["engine_address"],
                lambda: reports.ready(asdict(info)),
                stall_timeout_s=server["stall_timeout"],
                profiler=Profiler(profiler),
                beat=reports.beat,
            )
    finally:
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
