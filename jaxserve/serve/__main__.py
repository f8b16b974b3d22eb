"""The front-end process: HTTP and gRPC in front of the engines. Started by `jaxserve.serve.supervisor`."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jaxserve.config import ServerConfig
from jaxserve.engine.child_process import Reports, read_orders
from jaxserve.errors import ERROR_PREFIX, JaxserveError
from jaxserve.logs import announce

if TYPE_CHECKING:
    from jaxserve.serve.server import Endpoints


def main() -> int:
    """Runs until told to stop (0); 2 when it cannot start."""
    orders = read_orders()
    # A second of imports, which must find this process tied to its parent already.
    from jaxserve.serve.server import run_front_end

    # JSON has no tuples.
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in orders["config"].items()}
    config = ServerConfig(**given)
    faulthandler.register(signal.SIGUSR1)  # the supervisor's question before it ends a process that hangs
    reports = Reports(orders["report_fd"])

    def on_ready(endpoints: Endpoints) -> None:
        reports.ready(asdict(endpoints))

    async def run() -> int:
        beating = asyncio.create_task(reports.beat())
        try:
            return await run_front_end(config, orders["engine_addresses"], on_ready, share_ports=orders["share_ports"])
        finally:
            beating.cancel()

    try:
        return asyncio.run(run())
    except JaxserveError as error:
        announce(f"{ERROR_PREFIX}{error}", logging.ERROR)
        return 2


if __name__ == "__main__":
    sys.exit(main())
