"""Certificates that can be used, and those that cannot."""

import subprocess

import pytest
import trustme

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
