"""Inference servers: their addresses and API keys, and those of this user that run.

A model on a server is `http://127.0.0.1:8080#qwen2.5-7b`. Each `cpuchat serve` has a file, which its process locks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from cpuchat.base import paths, toml
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import ServerError, UsageError
from cpuchat.base.files import file_lock, is_locked, read_json

_ENDPOINTS = ("/chat/completions", "/completions", "/models")
_HOST_AND_PORT = re.compile(r"[A-Za-z0-9.-]+:\d{1,5}(/[\w/]*)?")


@dataclass(frozen=True)
class ServerModel:
    """A model on a server: its `server` (see `normalized`) and its `name` there ("" = the one that it serves)."""

    server: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.server}#{self.name}" if self.name else self.server

    @classmethod
    def of(cls, text: str) -> ServerModel:
        """Parse `URL` or `URL#model`. Raises UsageError as `normalized`."""
        url, _, name = text.strip().partition("#")
        return cls(normalized(url), name)

    @property
    def stem(self) -> str:
        """Return the name for display, as `Path.stem` does for a file; the host when the model is not known yet."""
        return self.name.rpartition("/")[2].removesuffix(".gguf") or host(self.server)


Source = Path | ServerModel
"""Where a model comes from: a file on this machine, or a server."""


def is_url(text: str) -> bool:
    """Return whether `text` is meant as the address of a server."""
    return text.lower().startswith(("http://", "https://"))


def source(text: str) -> Source:
    """Return what `ModelInfo.path` stands for: the file, or the model on a server."""
    return ServerModel.of(text) if is_url(text) else Path(text)


def last_on_server(last: str) -> ServerModel | None:
    """Return the model used last (`model.last` of the settings) if it is on a server."""
    try:
        return ServerModel.of(last) if is_url(last) else None
    except UsageError:  # edited by hand
        return None


def last_here(last: str) -> str:
    """Return `last` for what only a model on this machine can do. Raises UsageError when it is on a server."""
    if is_url(last):
        raise UsageError("The model used last is on a server.", "Name one on this machine, such as `demo`.")
    return last


def normalized(url: str) -> str:
    """Return a server's address in one form: scheme and host in lower case, without `/v1` and what comes after it.
    Raises UsageError: not an http or https address, or one with a password or a query in it."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise _invalid(url) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in url.strip()):
        raise _invalid(url)
    if "@" in parts.netloc:
        raise UsageError(
            "The address of a server must not contain a password: other users see it in `ps`.",
            "Set CPUCHAT_API_KEY, or write the key into keys.toml: `cpuchat docs servers`.",
        )
    if parts.query or parts.fragment:
        raise UsageError(f"{url} has a query or a fragment.", "Give the address alone, such as http://127.0.0.1:8080.")
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/")
    for ending in _ENDPOINTS:
        path = path.removesuffix(ending)
    return f"{parts.scheme}://{name}{f':{port}' if port is not None else ''}{path.removesuffix('/v1').rstrip('/')}"


def _invalid(url: str) -> UsageError:
    example = f"http://{url}" if _HOST_AND_PORT.fullmatch(url) else "http://127.0.0.1:8080"
    return UsageError(f"{url!r} is not the address of a server.", f"Write it as {example}.")


def host(server: str) -> str:
    """Return host and port for display: `127.0.0.1:8080`; what is no address as it is."""
    try:
        return urlsplit(server).netloc
    except ValueError:
        return server


def computes_here(path: str) -> bool:
    """Return whether the model at this `ModelInfo.path` is on a server of this machine."""
    return is_url(path) and is_local(ServerModel.of(path).server)


def is_local(server: str) -> bool:
    """Return whether the server runs on this machine: requests to it never go through a proxy."""
    return is_loopback(urlsplit(server).hostname or "")


def is_loopback(name: str) -> bool:
    """Return whether a name or address means this machine only; names are not resolved."""
    plain = name.lower().rstrip(".")
    if plain == "localhost" or plain.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


KEY_VARIABLE = "CPUCHAT_API_KEY"
_KNOWN = {"https://api.openai.com": "OPENAI_API_KEY"}
"""Variables of services that everyone names alike; sent to these alone."""


class KeyRing:
    """Finds the API key of a server: in a file that its owner writes and nobody else may read, else in the environment.
    `CPUCHAT_API_KEY` is for the server `chosen`: the one of `--server`, or the only one of the settings.

    A key goes to the server that it is for and nowhere else: not into settings, logs, messages or command lines."""

    def __init__(self, chosen: str = "") -> None:
        self._chosen = chosen

    def key(self, server: str) -> str:
        """Return the key, "" when there is none. Raises ServerError: the file cannot be read or others may read it, or
        the key is no text or has characters that no key has."""
        file = paths.shown(paths.keys_file())
        stored = _stored_keys().get(server, "")
        key = stored if isinstance(stored, str) else ""
        for variable in (KEY_VARIABLE if server == self._chosen else "", _KNOWN.get(server, "")):
            key = key or os.environ.get(variable, "").strip()
        if not key and stored:  # a table such as {keyring = true}
            problem = f"{file} has no text as the key of {server}; keyrings are not read."
            raise ServerError(problem, f'Its line there is "{server}" = "KEY".')
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ServerError("The API key contains invalid characters.", f"Check {KEY_VARIABLE} and {file}.")
        return key


def _stored_keys() -> dict[str, Any]:
    file = paths.keys_file()
    name = paths.shown(file)
    try:
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise ServerError(f"Other users may read {name}, which holds API keys.", f"Run chmod 600 {name}.")
        return toml.loads(paths.read_text(file))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ServerError(f"Cannot read {name}: {error.strerror}.", "Fix or remove it.") from None
    except ValueError:  # without the text that is wrong: it may be a key
        raise ServerError(f"{name} is not valid TOML.", 'Its lines are "https://HOST" = "KEY".') from None


class RunningServer(msgspec.Struct, frozen=True):
    """A server of this user: its address without `/v1`, and the model that it serves; or an app, without both."""

    url: str
    model: str
    pid: int


@contextlib.contextmanager
def recorded(server: RunningServer) -> Iterator[None]:
    """Record a server or an app inside the block. If the folder cannot be written, others do not see it."""
    file = paths.servers_dir() / f"{server.pid}.json"
    unfinished = file.with_suffix(".tmp")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            unfinished.touch(0o600)
            unfinished.write_bytes(msgspec.json.encode(server))
            stack.enter_context(file_lock(unfinished))  # it holds under the new name; unlocked, others would remove it
            stack.callback(file.unlink, missing_ok=True)
            unfinished.replace(file)
        yield


def running_servers(*, or_apps: bool = False) -> list[RunningServer]:
    """Return the servers that run now, `or_apps` too, and remove the records of those that were killed."""
    found: list[RunningServer] = []
    with contextlib.suppress(OSError):
        for file in sorted(paths.servers_dir().glob("*.json")):
            # gone meanwhile, or not ours
            with contextlib.suppress(OSError, ValueError):
                if is_locked(file):
                    found.append(read_json(file, msgspec.json.Decoder(prepared(RunningServer)).decode))
                else:
                    file.unlink(missing_ok=True)
    return [one for one in found if or_apps or one.url]
