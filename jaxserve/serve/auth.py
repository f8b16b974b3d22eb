"""Who may call: API keys of both doors, and Host names where there is no key.

Keys are compared in constant time and appear in no message. Without keys, a server on loopback answers only loopback Host names: a web
page whose own name resolves to 127.0.0.1 (DNS rebinding) must not reach it. Knows no protocol. Next: `http_guards`, `grpc_server`; the
certificates are `tls`'s.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import stat
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from jaxserve.config import ServerConfig
from jaxserve.errors import AuthenticationFailed, ConfigError

logger = logging.getLogger(__name__)

MAX_KEY_FILE_BYTES = 2**20
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(?::\d*)?")


class KeyCheck:
    """Compares a call's bearer token with every key; without keys every call is allowed."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @property
    def has_keys(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._digests)

    def is_allowed(self, authorization: str | None) -> bool:
        """Whether a call with this `authorization` header (HTTP) or metadata (gRPC) may be served."""
        if not self._digests:
            return True
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip())
        # No early end: the time must not tell which key is near.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches) and scheme.lower() == "bearer"

    def check(self, authorization: str | None) -> None:
        """Raises AuthenticationFailed when the call may not be served."""
        if not self.is_allowed(authorization):
            problem = "the API key is not one of this server's" if authorization else "this server asks for an API key"
            raise AuthenticationFailed(f"{problem}; send the header 'Authorization: Bearer KEY' with one of them.")


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(config: ServerConfig) -> tuple[str, ...]:
    """The keys of --api-key and of the lines of --api-key-file; raises ConfigError for a file or a key that cannot be used."""
    keys = list(config.api_key)
    if any(not _is_sane(key) for key in keys):
        raise ConfigError("an --api-key is empty or holds spaces or characters other than printable ASCII; choose another key.")
    if config.api_key_file is not None:
        keys += _read_key_file(Path(config.api_key_file).expanduser())
    return tuple(dict.fromkeys(keys))


def _read_key_file(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error.strerror}; name a file with one key a line.") from None
    lines = [line.strip() for line in content.decode("utf-8", "replace").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key; write one key a line.")
    if len(content) > MAX_KEY_FILE_BYTES or not all(map(_is_sane, keys)):
        raise ConfigError(f"--api-key-file {path} is not a file of keys; write one key a line, of printable ASCII without spaces.")
    return keys


def _is_sane(key: str) -> bool:
    return bool(key) and key.isascii() and key.isprintable() and " " not in key


def log_warnings(config: ServerConfig) -> None:
    """Warns of settings that let strangers in. The supervisor calls it once, at the start; raises ConfigError as `read_keys` does."""
    has_keys = bool(read_keys(config))
    if not has_keys and not is_loopback(config.host):
        logger.warning(
            "the server listens on %s without an API key: whoever reaches it can use it; give --api-key, or --host 127.0.0.1",
            config.host,
        )
    if config.api_key_file is not None:
        path = Path(config.api_key_file).expanduser()
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            logger.warning("--api-key-file %s can be read by other users of this machine; chmod 600 it", path)


def is_loopback(host: str) -> bool:
    """Whether an address or name that a server listens on can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HostCheck:
    """Which Host names and web origins a server on loopback without a key answers; any other server answers all."""

    def __init__(self, config: ServerConfig, *, has_keys: bool) -> None:
        self.is_on = not has_keys and is_loopback(config.host) and "*" not in config.allowed_hosts
        self._names = {_without_port(_in_brackets(name)) for name in (*LOOPBACK_NAMES, config.host, *config.allowed_hosts)} - {None}
        self._origins = set(config.allowed_origins)

    def is_host_allowed(self, host: str) -> bool:
        """Whether a Host header, with or without a port, names this server."""
        return not self.is_on or _without_port(host) in self._names

    def is_origin_allowed(self, origin: str | None, host: str) -> bool:
        """Whether a page of this Origin may call: without a key, CORS hides only the answer, and the call itself would be made."""
        if not self.is_on or origin is None or origin in self._origins or "*" in self._origins:
            return True
        return origin.partition("://")[2].lower() == host.lower()


def _in_brackets(name: str) -> str:
    """As a Host header has it: a bare IPv6 address in brackets."""
    return f"[{name}]" if name.count(":") > 1 and not name.startswith("[") else name


def _without_port(host: str) -> str | None:
    """The name alone, in lower case; None for what is no Host."""
    found = _HOST.fullmatch(host.lower())
    return found and found[1].removesuffix(".")
