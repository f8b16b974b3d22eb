"""Certificates of both doors: settings to what uvicorn and gRPC take, checked before anything listens.

With `ssl_ca_certs` only clients with a certificate of those authorities are answered (mutual TLS). Knows no requests.
Next: `http_connection`, `grpc_server`.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError


def uvicorn_options(config: ServerConfig) -> dict[str, Any]:
    """Arguments for `uvicorn.Config`, none for plain text; raises ConfigError as `check` does."""
    check(config)
    if config.ssl_certfile is None:
        return {}
    options: dict[str, Any] = {"ssl_certfile": config.ssl_certfile, "ssl_keyfile": config.ssl_keyfile}
    if config.ssl_ca_certs is not None:
        options |= {"ssl_ca_certs": config.ssl_ca_certs, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def grpc_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Credentials for `add_secure_port`, None for plain text; raises ConfigError as `check` does."""
    check(config)
    if config.ssl_certfile is None:
        return None
    certificate = Path(config.ssl_certfile).read_bytes()
    key = certificate if config.ssl_keyfile is None else Path(config.ssl_keyfile).read_bytes()
    authorities = None if config.ssl_ca_certs is None else Path(config.ssl_ca_certs).read_bytes()
    return grpc.ssl_server_credentials([(key, certificate)], authorities, require_client_auth=authorities is not None)


def check(config: ServerConfig) -> None:
    """Raises ConfigError when a file is missing, cannot be read or used, or the key is not the certificate's."""
    certificate, key, authorities = config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs
    if certificate is None:
        for flag, path in (("--ssl-keyfile", key), ("--ssl-ca-certs", authorities)):
            if path is not None:
                raise ConfigError(f"{flag} is given without --ssl-certfile; give the server's certificate too.")
        return
    for flag, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key), ("--ssl-ca-certs", authorities)):
        if path is not None:
            _check_readable(flag, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    where = f"--ssl-certfile {certificate}" + (
        f" with --ssl-keyfile {key}" if key else " (as no --ssl-keyfile is given, it must hold the key)"
    )
    try:
        # An empty passphrase: an encrypted key must fail here, not ask at the terminal.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise ConfigError(f"{where} cannot be used: {_reason(error)}; both must be PEM, belong together and have no passphrase.") from None
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except ssl.SSLError as error:
            raise ConfigError(f"--ssl-ca-certs {authorities} cannot be used: {_reason(error)}; it must hold PEM certificates.") from None


def _check_readable(flag: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}.") from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
