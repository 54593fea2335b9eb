"""Proxies and certificates by the environment variables that say so. An error names the variable.

httpx reads them, too, but fails on ranges and brackets in NO_PROXY, on a proxy that no request would use, and without
naming the variable.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from cpuchat.base.errors import HubError, UsageError
from cpuchat.base.text import without_password

_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PORTS = {"http": 80, "https": 443}


class ProxySetting(NamedTuple):
    """The proxy that a variable names. `address` may hold a password."""

    variable: str
    address: str

    def open(self, context: ssl.SSLContext) -> httpx.Proxy:
        """Return it for httpx. Raises UsageError: it is not the address of a proxy; HubError: the package for SOCKS
        proxies is missing."""
        address = self.address.strip().replace("socks://", "socks5://", 1)  # as desktops write it
        address = address if "://" in address else f"http://{address}"
        if address.startswith("socks5") and find_spec("socksio") is None:
            raise HubError(
                f"{self.variable} names a SOCKS proxy, but the package for it is not installed.",
                "Install httpx[socks], or unset it.",
            )
        with suppress(ValueError, httpx.InvalidURL):
            proxy = httpx.Proxy(address, ssl_context=context if address.startswith("https:") else None)
            if proxy.url.host and (proxy.url.port is None or 0 < proxy.url.port < 1 << 16):
                return proxy
        raise UsageError(
            f"{self.variable} is not the address of a proxy: {without_password(self.address)!r}.",
            "Set it to one such as http://HOST:PORT, or unset it.",
        )


def proxy_for(address: str) -> ProxySetting | None:
    """Return the proxy for an http or https address; None for a direct connection. Raises ValueError: its port is no
    number."""
    settings, url = getproxies(), urlsplit(address)  # of the system, too, on macOS and Windows
    scheme = next((one for one in (url.scheme, "all") if settings.get(one)), "")
    if not scheme or _is_exempt(url.hostname or "", url.port or _PORTS.get(url.scheme, 0), settings.get("no", "")):
        return None
    names = (f"{scheme}_proxy", f"{scheme}_PROXY".upper())
    return ProxySetting(next((one for one in names if os.environ.get(one)), "The system's proxy"), settings[scheme])


def _is_exempt(host: str, its_port: int, rules: str) -> bool:
    """Return whether NO_PROXY names `host`: `*`, a name and what ends with it, an address, a range of them, each with a
    port or not, with or without brackets."""
    for rule in rules.replace(",", " ").split():
        name, _, port = rule.rpartition(":") if rule.count(":") == 1 or "]:" in rule else (rule, "", "")
        name = name.strip("[]").replace("]", "")
        if rule == "*":
            return True
        if port and port != str(its_port):
            continue
        try:
            found = ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False)
        except ValueError:
            ending = name.lstrip("*").lstrip(".").lower()
            found = bool(ending) and f".{host}".endswith(f".{ending}")
        if found:
            return True
    return False


def certificates() -> ssl.SSLContext:
    """Return the authorities to trust: those of `_CERTIFICATES` that is set, else those of certifi. Raises UsageError:
    there are none at what the variable names."""
    variable = next((one for one in _CERTIFICATES if os.environ.get(one)), "")
    if not variable:
        return httpx.create_ssl_context(trust_env=False)
    path = Path(os.environ[variable])
    try:
        if not path.is_dir():
            return ssl.create_default_context(cafile=path)
        if any(path.iterdir()):
            return ssl.create_default_context(capath=path)
        why = "is empty"
    except FileNotFoundError:
        why = "does not exist"
    except ssl.SSLError:
        why = "has no certificates in PEM format"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    raise UsageError(f"{variable} names {path}, which {why}.", "Set it to the certificates to trust, or unset it.")
