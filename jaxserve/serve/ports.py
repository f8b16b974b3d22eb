"""The TCP ports of the doors: bound by a front end, held by the supervisor for as long as the server lives.

Front ends share a port by SO_REUSEPORT: the kernel deals new connections out among the sockets that listen. A socket that is bound
but does not listen gets none of them; it keeps the port for us while a front end is started again, and says which port 0 became.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError


def bind(host: str, port: int, flag: str, *, is_shared: bool = False) -> socket.socket:
    """A bound TCP socket, ready to listen; one that is shared may be bound again by this user with `is_shared`.

    Raises ConfigError naming the flag when the address cannot be used.
    """
    options = [socket.SO_REUSEADDR, *([socket.SO_REUSEPORT] if is_shared else [])]
    try:
        return _bind(host, port, options)
    except OSError as error:
        raise ConfigError(f"{flag} {port} on {host} cannot be used: {error.strerror}; choose another {flag} or --host.") from None


def _bind(host: str, port: int, options: list[int]) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def held_ports(config: ServerConfig) -> Iterator[ServerConfig]:
    """Holds the ports of the open doors inside the block; yields the settings with the ports that 0 became.

    Raises ConfigError when one is taken, by a server of ours too, or when both are the same.
    """
    if config.port == config.grpc_port != 0 and not (config.grpc_only or config.http_only):
        raise ConfigError(f"--port and --grpc-port are both {config.port}; give HTTP and gRPC different ports.")
    ports = {}
    with contextlib.ExitStack() as stack:
        for name, flag, is_open in (("port", "--port", not config.grpc_only), ("grpc_port", "--grpc-port", not config.http_only)):
            if is_open:
                sock = stack.enter_context(_hold(config.host, getattr(config, name), flag))
                ports[name] = sock.getsockname()[1]
        yield replace(config, **ports)


def _hold(host: str, port: int, flag: str) -> socket.socket:
    # Sharing would let a second server in beside the first, which is a mistake: the port must be free for one that does not share.
    bind(host, port, flag).close()
    try:
        # Without SO_REUSEADDR, so that the check above fails for a second server also while no front end listens yet.
        return _bind(host, port, [socket.SO_REUSEPORT])
    except OSError:  # closed connections of some other server linger on the port
        return bind(host, port, flag, is_shared=True)
