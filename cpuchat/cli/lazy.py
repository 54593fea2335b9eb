"""A group of commands that imports a command only when it runs: `--help` must be there at once."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import click

_ELSEWHERE = {
    "ls": "list", "rm": "delete", "remove": "delete", "pull": "download", "get": "download", "inspect": "show",
    "info": "show", "run": "ask", "start": "serve", "server": "serve", "benchmark": "bench",
}  # fmt: skip
"""What other programs call commands."""


class LazyGroup(click.Group):
    """Knows its commands by name. `commands_by_name`: name: (module, attribute, the line in the group's `--help`)."""

    def __init__(self, *args: Any, commands_by_name: Mapping[str, tuple[str, str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._by_name = commands_by_name

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._by_name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._by_name:
            return None
        module, attribute, _ = self._by_name[cmd_name]
        return getattr(importlib.import_module(module), attribute)

    def similar(self, name: str) -> list[str]:
        """Return the commands, also of its groups, that someone who typed `name` may have meant."""
        wanted = _ELSEWHERE.get(name.lower(), name.lower())
        known = list(self._by_name)
        for group, (module, attribute, _) in self._by_name.items():
            inner = getattr(importlib.import_module(module), attribute) if attribute == group else None
            known += [f"{group} {one}" for one in inner._by_name] if isinstance(inner, LazyGroup) else []
        exact = [one for one in known if one.rpartition(" ")[2] == wanted]
        return exact or difflib.get_close_matches(name.lower(), self._by_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in self._by_name.items()])
