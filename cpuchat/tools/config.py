"""The servers of mcp.json, in the form that other programs use: `{"mcpServers": {"name": {"command": …}}}`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cpuchat.base import paths, toml
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import SettingsError
from cpuchat.config.settings import explained

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
KEPT = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT", "APPDATA", "USERPROFILE")
"""Variables that servers get, beside those of the file: no tokens that happen to be set."""

CALL_SECONDS = 60.0
"""A call that takes longer is stopped, unless its server's `timeout` says otherwise."""
START_SECONDS = 30.0
"""The first start of a server may download it (npx, uvx)."""
LONGEST_MESSAGE = 4_000_000
"""A server that writes more bytes in one message is ended."""
MAX_TOOLS = 128
"""They are in every prompt. Those that come after are not offered."""

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4_096)]


class ToolServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A server that is started as a program and speaks over its standard input and output.

    `timeout` is in seconds, for one call. Keys of other programs are ignored, such as what they run without asking."""

    command: Text
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str = ""
    disabled: bool = False
    timeout: Annotated[float, msgspec.Meta(gt=0, le=3_600)] = CALL_SECONDS


def load_servers() -> dict[str, ToolServerConfig | SettingsError]:
    """Return the servers that are not disabled, by name; {} without a file. One that is not valid is the error, without
    values of `env`. Raises SettingsError: the file cannot be read, is no JSON, or has no object of servers."""
    file = paths.tool_servers_file()
    if not (text := toml.read(file)):
        return {}
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise SettingsError(f"{file}, {where}: {error.msg}.", "Fix the JSON, or remove the file.") from None
    except (ValueError, RecursionError):
        raise SettingsError(f"{file} is not valid JSON.", "Fix it, or remove the file.") from None
    servers = document.get("mcpServers", {}) if isinstance(document, dict) else None
    if not isinstance(servers, dict):
        form = '{"mcpServers": {"name": {"command": …}}}'
        raise SettingsError(f'{file}: no object "mcpServers".', f"Its form is {form}.")
    found = dict[str, ToolServerConfig | SettingsError]()
    for name, value in servers.items():
        if not (isinstance(value, Mapping) and value.get("disabled") is True):
            try:
                found[name] = _server(name, value, file)
            except SettingsError as error:
                found[name] = error
    return found


def _server(name: str, value: Any, file: Path) -> ToolServerConfig:
    where = f"{file}, mcpServers.{name}"
    if _NAME.fullmatch(name) is None:
        raise SettingsError(
            f"{where[:200]}: not a name.", "A name has 1 to 40 of these characters: letters, digits, - and _."
        )
    if isinstance(value, Mapping) and "command" not in value and ("url" in value or "serverUrl" in value):
        raise SettingsError(
            f"{where}: a server at an address.", "Only programs can be started: give a command, or remove it."
        )
    try:
        server = msgspec.convert(value, prepared(ToolServerConfig))
    except msgspec.ValidationError as error:
        key, reason = explained(error)
        raise SettingsError(f"{where}{f'.{key}' if key else ''}: {reason}.", "Fix or remove it.") from None

    def value_of(match: re.Match[str]) -> str:
        value = os.environ.get(match["name"], match["default"])
        if value is None:
            raise SettingsError(
                f"{where}: the variable {match['name']} is not set.", "Set it, or write ${NAME:-default}."
            )
        return value

    def expand(text: str) -> str:
        """Replace `${NAME}` and `${NAME:-default}` by variables of the environment: keys need not be in the file."""
        return _VARIABLE.sub(value_of, text)

    return msgspec.structs.replace(
        server,
        command=str(paths.expanded(expand(server.command))),
        args=tuple(map(expand, server.args)),
        env={key: expand(text) for key, text in server.env.items()},
        cwd=str(paths.expanded(expand(server.cwd))) if server.cwd else "",
    )
