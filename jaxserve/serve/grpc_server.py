"""The gRPC door: one listening server with `VllmEngine`, `jaxserve.v1.Inference`, health and reflection.

What the services do is `grpc_engine`'s and `grpc_inference`'s; what each call has in common is `grpc_guard`'s.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.protocol.inference_pb2_grpc import add_InferenceServicer_to_server
from jaxserve.serve import grpc_engine, grpc_inference
from jaxserve.serve.auth import KeyCheck, read_keys
from jaxserve.serve.grpc_guard import Guard
from jaxserve.serve.service import Service
from jaxserve.serve.tls import grpc_credentials

MAX_SEND_BYTES = 256 * 2**20
SERVICE_NAMES = (grpc_engine.SERVICE_NAME, grpc_inference.SERVICE_NAME)


class GrpcServer:
    """The listening server. It answers UNAVAILABLE, and health NOT_SERVING, until `set_serving(True)`.

    Args:
        service: What it serves.
        config: Where it listens (port 0 picks a free one, see `port` after `start`), certificates, keys and limits.
        is_shared: Other front ends listen on the port too.
    """

    def __init__(self, service: Service, config: ServerConfig, *, is_shared: bool = False) -> None:
        self._service = service
        self._config = config
        self.port = config.grpc_port
        options = [
            ("grpc.max_receive_message_length", config.max_request_bytes),
            ("grpc.max_send_message_length", MAX_SEND_BYTES),
            # A client whose machine is gone says nothing: its calls would run to their ends.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            # Gateways ping often, also while idle.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.http2.max_ping_strikes", 0),
            # A second server on the port must fail, unless it is one of ours.
            ("grpc.so_reuseport", int(is_shared)),
        ]
        self._server = grpc.aio.server(options=options, interceptors=[Guard(KeyCheck(read_keys(config)))])
        self._health = health.aio.HealthServicer()

    async def start(self) -> None:
        """Begins to listen; raises ConfigError when the port is taken or the certificates cannot be used."""
        service, config, server = self._service, self._config, self._server
        add_VllmEngineServicer_to_server(grpc_engine.VllmEngine(service, has_dev_rpcs=config.enable_dev_endpoints), server)
        add_InferenceServicer_to_server(grpc_inference.Inference(service), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await self.set_serving(False)
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            credentials = grpc_credentials(config)
            address = f"{host}:{self.port}"
            self.port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        except RuntimeError as error:
            await server.stop(None)
            raise ConfigError(f"--grpc-port {self.port} on {config.host} cannot be used: {error}; choose another --grpc-port.") from None
        await server.start()

    async def set_serving(self, is_serving: bool) -> None:
        """What grpc.health.v1 answers, for "" and for the services."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *SERVICE_NAMES):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls and gives open ones `grace_s` seconds."""
        await self._server.stop(grace_s)
