"""Tests which proxy and certificates the environment names, and that a wrong value is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.base.errors import AccessDenied, HubError, UsageError
from cpuchat.models.hub.client import Hub
from cpuchat.models.hub.http import certificates, proxy_for
from tests.support.hub_server import HubServer

_NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without proxies and certificates."""
    for name in (*_NAMES, *map(str.upper, _NAMES), *_CERTIFICATES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("rules", "address", "direct"),
    [
        ("::1/128", "http://[::1]:80", True), ("[::1]", "http://[::1]:80", True), ("[::1]:81", "http://[::1]/", False),
        ("fe80::/10", "http://[fe80::1]/", True), ("fe80::/10", "http://[2001::1]/", False),
        ("10.0.0.0/8", "http://10.1.2.3/", True), ("10.0.0.0/8", "http://11.1.2.3/", False),
        ("localhost, 127.0.0.1 , ::1", "http://127.0.0.1:9/", True), ("a,*", "https://b.org/", True),
        ("", "https://b.org/", False), (".b.org", "https://a.b.org/", True), ("*.b.org", "https://a.b.org/", True),
        ("b.org", "https://ab.org/", False), ("b.org:443", "https://b.org/", True),
        ("b.org:8443", "https://b.org/", False), ("10.0.0.0/99", "http://10.0.0.1/", False),
    ],
)  # fmt: skip
def test_no_proxy(rules: str, address: str, direct: bool, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("ALL_PROXY", "http://proxy:3128")
    environment.setenv("NO_PROXY", rules)
    assert (proxy_for(address) is None) == direct


@pytest.mark.parametrize(
    ("variable", "value", "rules"),
    [
        ("HTTP_PROXY", "http://127.0.0.1:1", "127.0.0.0/8,::1/128"), ("HTTP_PROXY", "http://127.0.0.1:1", "*"),
        ("HTTP_PROXY", "http://127.0.0.1:1", "[::1],127.0.0.1"), ("HTTPS_PROXY", "http://host:port", ""),
    ],
)  # fmt: skip
def test_a_proxy_that_no_request_needs_does_no_harm(
    variable: str, value: str, rules: str, hub_server: HubServer, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv(variable, value)
    environment.setenv("NO_PROXY", rules)
    assert Hub().search("tiny") == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HTTP_PROXY", "http://user:secret@host:port"), ("http_proxy", "http://host:99999"),
        ("HTTP_PROXY", "htp://host:80"), ("ALL_PROXY", '"http://host:80"'),
    ],
)  # fmt: skip
def test_a_proxy_that_is_no_address_is_named(
    variable: str, value: str, hub_server: HubServer, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv(variable, value)
    environment.setenv("NO_PROXY", "")
    with pytest.raises(UsageError, match=f"{variable} is not the address of a proxy") as caught:
        Hub().search("tiny")
    assert "secret" not in str(caught.value)


def test_a_proxy_that_cannot_be_reached_is_named(hub_server: HubServer, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("HTTP_PROXY", "http://user:secret@127.0.0.1:1")
    environment.setenv("NO_PROXY", "")
    with pytest.raises(HubError, match=r"The proxy http://127\.0\.0\.1:1 cannot be reached") as caught:
        Hub().search("tiny")
    assert "HTTP_PROXY" in caught.value.hint and "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "why", "variable"),
    [
        (None, "does not exist", "SSL_CERT_FILE"),
        (b"junk", "no certificates", "REQUESTS_CA_BUNDLE"),
        ("folder", "is empty", "SSL_CERT_DIR"),
    ],
)
def test_certificates_that_cannot_be_read_are_named(
    content: bytes | str | None, why: str, variable: str, tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "certificates"
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    environment.setenv(variable, str(path))
    with pytest.raises(UsageError, match=f"{variable} names .*, which .*{why}"):
        certificates()


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"])
def test_certificates_are_those_that_are_named(variable: str, environment: pytest.MonkeyPatch) -> None:
    environment.setenv(variable, str(Path(__file__).parents[2] / "support" / "certificate.pem"))
    assert len(certificates().get_ca_certs()) <= 1


@pytest.mark.parametrize("address", ["hf-mirror.com", "http://host:99999", "htps://host", "http://[::1", "http://a b"])
def test_an_endpoint_that_is_no_address_is_named(address: str, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("HF_ENDPOINT", address)
    environment.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(UsageError, match="HF_ENDPOINT is not a valid address"):
        Hub().search("tiny")


@pytest.mark.parametrize("value", ['"hf_abc"', "hf_a bc", "hf_ä", "hf_\x01"])
def test_a_token_with_quotes_is_named(value: str, hub_server: HubServer, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("HF_TOKEN", value)
    with pytest.raises(AccessDenied, match="token in HF_TOKEN") as caught:
        Hub().search("tiny")
    assert value not in str(caught.value) and hub_server.requests == []
