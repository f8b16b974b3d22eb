"""The endpoints of those who run a server: health, metrics, load, version, and what --enable-dev-endpoints allows. Names are vLLM's.

Health says why it is bad, in the body of its 503. Next: `service`, which knows; `engine.replicas`, which asks the engines.
"""

from __future__ import annotations

import time
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve import __version__
from jaxserve.config import cache_dir
from jaxserve.errors import EngineUnavailable
from jaxserve.serve.http_errors import json_answer, route
from jaxserve.serve.service import Service


class OperationsApi:
    """The endpoints over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """For the application."""
        return [
            route("/health", self.health),
            route("/ready", self.ready),
            route("/live", self.live),
            route("/metrics", self.metrics),
            route("/load", self.load),
            route("/version", self.version),
            route("/reset_prefix_cache", self.reset_prefix_cache, "POST"),
            route("/start_profile", self.start_profile, "POST"),
            route("/stop_profile", self.stop_profile, "POST"),
        ]

    async def health(self, request: Request) -> Response:
        """`GET /health`: 200 while an engine is warm and its heartbeat moves, also while the server drains."""
        if not self._service.is_healthy:
            raise EngineUnavailable(self._service.client.why or "the model is still loading; send the request again in a while.")
        return Response()

    async def ready(self, request: Request) -> Response:
        """`GET /ready`: 200 while new calls are served."""
        self._service.check_ready()
        return Response()

    async def live(self, request: Request) -> Response:
        """`GET /live`: 200 while this process answers."""
        return Response()

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`, for Prometheus; see `metrics`."""
        body, content_type = await self._service.metrics.render()
        return Response(body, headers={"content-type": content_type})

    async def load(self, request: Request) -> Response:
        """`GET /load`: sequences in the engines, running and waiting, of every front end."""
        return json_answer({"server_load": self._service.client.num_sequences})

    async def version(self, request: Request) -> Response:
        """`GET /version`."""
        return json_answer({"version": __version__})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """`POST /reset_prefix_cache`: forgets cached pages; 409 while sequences use pages."""
        self._check_dev(request)
        if not await self._service.client.flush_cache():
            raise HTTPException(409, "the prefix cache is in use by running sequences; ask again when none run.")
        return json_answer({"success": True})

    async def start_profile(self, request: Request) -> Response:
        """`POST /start_profile`: begins to record; answers with the directory that the profile will be in."""
        self._check_dev(request)
        directory = str(profile_directory())
        await self._service.client.start_profile(directory)
        return json_answer({"directory": directory})

    async def stop_profile(self, request: Request) -> Response:
        """`POST /stop_profile`: ends recording; answers with the directory that the profile is in."""
        self._check_dev(request)
        return json_answer({"directory": await self._service.client.stop_profile()})

    def _check_dev(self, request: Request) -> None:
        if not self._service.config.enable_dev_endpoints:
            raise HTTPException(403, f"{request.url.path} is off; start the server with --enable-dev-endpoints.")


def profile_directory() -> Path:
    """A new directory's path for a profile, named by the time; raises ConfigError when the cache directory cannot be made."""
    return cache_dir() / "profiles" / time.strftime("%Y%m%d-%H%M%S")
