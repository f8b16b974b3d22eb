"""API keys and Host names, without a server."""

import logging

import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import AuthenticationFailed, ConfigError, response_for
from jaxserve.serve.auth import HostCheck, KeyCheck, is_loopback, log_warnings, read_keys


def test_every_key_opens_and_nothing_else_does():
    check = KeyCheck(["first", "second"])
    assert check.is_allowed("Bearer first")
    assert check.is_allowed("bearer second")
    for header in (
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer third",
        "Bearer firstt",
        "first",
        "Basic first",
        "Bearer first second",
        "Bearer é",
    ):
        assert not check.is_allowed(header), header
        with pytest.raises(AuthenticationFailed, match="Authorization: Bearer KEY"):
            check.check(header)
    assert response_for(AuthenticationFailed("")) == (401, "AuthenticationError", "UNAUTHENTICATED")


def test_without_keys_every_call_is_allowed():
    assert KeyCheck([]).is_allowed(None)
    assert not KeyCheck([]).has_keys


def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b)
    assert KeyCheck(["a", "bb", "ccc"]).is_allowed("Bearer a")
    assert compared == [(32, 32)] * 3


def test_no_message_holds_a_key(caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(AuthenticationFailed) as caught:
        KeyCheck(["secret-one"]).check("Bearer secret-two")
    assert "secret" not in str(caught.value) + caplog.text
    assert "secret" not in repr(ServerConfig(api_key=("secret-one",)))


def test_keys_come_from_flags_and_from_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\none\n\n  two\none\n")
    assert read_keys(ServerConfig(api_key=("zero",), api_key_file=str(path))) == ("zero", "one", "two")


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n\n", b"\x00\x01\xff\xfe", b"two words\n", b"k" * (2**20 + 1)])
def test_a_key_file_that_cannot_be_used_is_an_error(tmp_path, content):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-key-file") as caught:
        read_keys(ServerConfig(api_key_file=str(path)))
    assert "one key a line" in str(caught.value)


@pytest.mark.parametrize("key", ["", "two words", "é", "a\n"])
def test_a_key_that_no_header_can_carry_is_an_error(key):
    with pytest.raises(ConfigError, match="--api-key"):
        read_keys(ServerConfig(api_key=(key,)))


def test_risky_settings_are_warned_of_once(tmp_path, caplog):
    path = tmp_path / "keys"
    path.write_text("one\n")
    path.chmod(0o600)
    log_warnings(ServerConfig())
    log_warnings(ServerConfig(host="0.0.0.0", api_key_file=str(path)))
    assert caplog.records == []
    path.chmod(0o644)
    log_warnings(ServerConfig(host="0.0.0.0", api_key_file=str(path)))
    log_warnings(ServerConfig(host="0.0.0.0"))
    file_warning, host_warning = caplog.messages
    assert "chmod 600" in file_warning
    assert "0.0.0.0" in host_warning
    assert "--api-key" in host_warning


def test_loopback_addresses():
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost", True), ("LocalHost:8000", True), ("localhost.:8000", True), ("127.0.0.1:8000", True), ("[::1]:8000", True),
        ("127.9.9.9:1", True), ("proxy.example", True), ("evil.example", False), ("localhost.evil.example", False), ("", False),
        ("127.0.0.1.evil.example:8000", False), ("[::2]:8000", False), ("evil.example#localhost", False),
        ("[::1].evil.example", False), ("[::1", False), ("localhost:evil", False), ("[fe80::7]:8000", True), ("::1", False),
    ],
)  # fmt: skip
def test_host_names_on_loopback_without_a_key(host, is_allowed):
    check = HostCheck(ServerConfig(host="127.9.9.9", allowed_hosts=("Proxy.example:8000", "FE80::7")), has_keys=False)
    assert check.is_host_allowed(host) is is_allowed
    assert HostCheck(ServerConfig(), has_keys=True).is_host_allowed(host)
    assert HostCheck(ServerConfig(host="0.0.0.0"), has_keys=False).is_host_allowed(host)
    assert HostCheck(ServerConfig(allowed_hosts=("*",)), has_keys=False).is_host_allowed(host)


def test_pages_of_other_origins_may_not_call_loopback_without_a_key():
    check = HostCheck(ServerConfig(allowed_origins=("https://chat.example",)), has_keys=False)
    assert check.is_origin_allowed(None, "localhost:8000")
    assert check.is_origin_allowed("http://localhost:8000", "localhost:8000")
    assert check.is_origin_allowed("https://chat.example", "localhost:8000")
    assert not check.is_origin_allowed("https://evil.example", "localhost:8000")
    assert not check.is_origin_allowed("null", "localhost:8000")
    assert HostCheck(ServerConfig(), has_keys=True).is_origin_allowed("https://evil.example", "localhost:8000")
