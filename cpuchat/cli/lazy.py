"""A group of commands that imports a command only when it runs: `--help` must be there at once."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in self._by_name.items()])
