"""Ports held by the supervisor: kept from others, shared with front ends, and deaf."""

import socket

import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.serve.ports import bind, held_ports


def shared(port: int) -> socket.socket:
    return bind("127.0.0.1", port, "--port", is_shared=True)


def test_front_ends_share_a_held_port_and_get_every_connection():
    with held_ports(ServerConfig(port=0, grpc_port=0)) as held:
        assert held.port != held.grpc_port
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", held.port))
        with shared(held.port) as first, shared(held.port) as second:
            for listener in (first, second):
                listener.listen()
                listener.setblocking(False)
            clients = [socket.create_connection(("127.0.0.1", held.port)) for _ in range(64)]
            accepted = dict.fromkeys((first, second), 0)
            for listener in accepted:
                try:
                    while True:
                        listener.accept()[0].close()
                        accepted[listener] += 1
                except BlockingIOError:
                    pass
            assert sum(accepted.values()) == 64
            assert all(accepted.values())
            for client in clients:
                client.close()
        # Connections that linger do not hinder the next front end, nor the next server.
        shared(held.port).close()
    with held_ports(ServerConfig(port=held.port, grpc_port=0)):
        pass


def test_a_second_server_is_told_the_flag_though_no_front_end_listens_yet():
    with held_ports(ServerConfig(port=0, grpc_port=0)) as held:
        for name, flag in (("port", "--port"), ("grpc_port", "--grpc-port")):
            settings = {"port": 0, "grpc_port": 0} | {name: held.port}
            with pytest.raises(ConfigError, match=f"^{flag} {held.port} on 127.0.0.1 cannot be used"):
                held_ports(ServerConfig(**settings)).__enter__()


def test_a_port_where_closed_connections_of_another_program_linger_can_be_held():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        other.accept()[0].close()  # the side that closes first lingers
        assert client.recv(1) == b""
        client.close()
    with held_ports(ServerConfig(port=port, grpc_port=0)) as held:
        assert held.port == port


def test_a_closed_door_needs_no_port():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with held_ports(ServerConfig(port=port, grpc_port=0, grpc_only=True)) as held:
            assert held.port == port
        with held_ports(ServerConfig(port=0, grpc_port=0, http_only=True)) as held:
            assert held.grpc_port == 0
            assert held.port


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_ipv6():
    with held_ports(ServerConfig(host="::1", port=0, grpc_port=0)) as held, bind("::1", held.port, "--port", is_shared=True) as listener:
        listener.listen()
        socket.create_connection(("::1", held.port)).close()


def test_one_port_for_both_doors_is_refused():
    with pytest.raises(ConfigError, match="--port and --grpc-port are both 8123"):
        held_ports(ServerConfig(port=8123, grpc_port=8123)).__enter__()
