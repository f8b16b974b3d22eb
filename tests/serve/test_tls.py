"""Certificates that can be used, and those that cannot; both doors over TLS and mutual TLS with real clients."""

import socket
import ssl
import subprocess
from pathlib import Path

import grpc
import httpx2
import openai
import pytest
import trustme
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.serve import tls


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Paths by name: a certificate with its key, both in one file, another key, the authority."""
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    one, other = authority.issue_cert("localhost"), authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    one.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    one.private_key_pem.write_to_path(directory / "key.pem")
    one.private_key_and_cert_chain_pem.write_to_path(directory / "both.pem")
    other.private_key_pem.write_to_path(directory / "other.pem")
    stranger = trustme.CA().issue_cert("client")
    stranger.private_key_and_cert_chain_pem.write_to_path(directory / "stranger.pem")
    (directory / "nonsense.pem").write_text("nonsense")
    encrypt = ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", directory / "key.pem", "-out", directory / "encrypted.pem"]
    subprocess.run(encrypt, check=True, capture_output=True)
    return {path.stem: str(path) for path in directory.iterdir()} | {"missing": str(directory / "missing.pem")}


def make_config(files, cert=None, key=None, ca=None):
    return ServerConfig(ssl_certfile=files.get(cert), ssl_keyfile=files.get(key), ssl_ca_certs=files.get(ca))


def test_plain_text_needs_nothing():
    assert tls.uvicorn_options(ServerConfig()) == {}
    assert tls.grpc_credentials(ServerConfig()) is None


@pytest.mark.parametrize("names", [("cert", "key"), ("cert", "key", "ca"), ("both",), ("both", None, "ca")])
def test_files_that_belong_together(files, names):
    options = tls.uvicorn_options(make_config(files, *names))
    assert options["ssl_certfile"] == files[names[0]]
    assert ("ssl_cert_reqs" in options) == (len(names) == 3)
    assert tls.grpc_credentials(make_config(files, *names)) is not None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((None, "key"), "--ssl-keyfile is given without --ssl-certfile"),
        ((None, None, "ca"), "--ssl-ca-certs is given without --ssl-certfile"),
        (("missing", "key"), "--ssl-certfile .*missing.* No such file"),
        (("cert", "missing"), "--ssl-keyfile .*missing.* No such file"),
        (("cert", "key", "missing"), "--ssl-ca-certs .*missing.* No such file"),
        (("cert", "other"), "belong together"),
        (("cert",), "no --ssl-keyfile is given"),
        (("nonsense", "key"), "--ssl-certfile .*nonsense.* PEM"),
        (("cert", "nonsense"), "--ssl-keyfile .*nonsense.* PEM"),
        (("cert", "key", "nonsense"), "--ssl-ca-certs .*nonsense.* PEM"),
        (("cert", "encrypted"), "passphrase"),
    ],
)
def test_files_that_cannot_be_used_are_named(files, names, message):
    for function in (tls.uvicorn_options, tls.grpc_credentials):
        with pytest.raises(ConfigError, match=message):
            function(make_config(files, *names))


def chat(server, context):
    with httpx2.Client(verify=context) as http:
        client = openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0, timeout=30, http_client=http)
        whole = client.completions.create(model="counting", prompt=[5], max_tokens=3, temperature=0, extra_body={"return_token_ids": True})
        stream = client.completions.create(model="counting", prompt=[5], max_tokens=3, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
        return whole.choices[0].token_ids


def grpc_model(server, credentials):
    with grpc.secure_channel(server.grpc.replace("127.0.0.1", "localhost"), credentials) as channel:
        return VllmEngineStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=5).served_model_name


def client_context(files, certificate=None):
    context = ssl.create_default_context(cafile=files["ca"])
    context.check_hostname = False  # the address is a number
    if certificate is not None:
        context.load_cert_chain(files[certificate])
    return context


def client_credentials(files, certificate=None):
    pem = None if certificate is None else Path(files[certificate]).read_bytes()
    return grpc.ssl_channel_credentials(Path(files["ca"]).read_bytes(), pem, pem)


def assert_plain_text_is_refused(server):
    host, port = server.http.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in sock.recv(1000)
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        VllmEngineStub(channel).HealthCheck(pb.HealthCheckRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_both_doors_speak_tls_alone(files, start_server):
    with start_server(make_config(files, "cert", "key")) as server:
        assert server.http.startswith("https://")
        assert chat(server, client_context(files)) == server.output_ids([5], 3)
        assert grpc_model(server, client_credentials(files)) == "counting"
        with pytest.raises(openai.APIConnectionError):
            chat(server, ssl.create_default_context())  # does not know the authority
        assert_plain_text_is_refused(server)


def test_mutual_tls_answers_clients_of_the_authority_alone(files, start_server):
    with start_server(make_config(files, "both", None, "ca")) as server:
        assert chat(server, client_context(files, "both")) == server.output_ids([5], 3)
        assert grpc_model(server, client_credentials(files, "both")) == "counting"
        for certificate in (None, "stranger"):
            with pytest.raises(openai.APIConnectionError):
                chat(server, client_context(files, certificate))
            with pytest.raises(grpc.RpcError) as caught:
                grpc_model(server, client_credentials(files, certificate))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert_plain_text_is_refused(server)
