"""Commands and their `--help`, which must be there at once: a group imports a command only when it runs; and options
that the app and `ask` have in common."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
_ELSEWHERE = {
    "ls": "list", "rm": "delete", "remove": "delete", "pull": "download", "get": "download", "inspect": "show",
    "info": "show", "run": "ask", "start": "serve", "server": "serve", "benchmark": "bench",
}  # fmt: skip
"""What other programs call commands."""
_INSTEAD = {
    "chats delete": "Delete it in the app: d in the list of chats (F8).",
    "chats show": "Export it to be read: cpuchat chats export ID -o chat.md",
}
"""What is done otherwise here."""


class SectionedCommand(click.Command):
    """A command whose `--help` lists its own options before those of settings, by their tables in config.toml."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        tables: dict[str, list[tuple[str, str]]] = {"Options": []}
        for option in self.get_params(ctx):
            table, _, key = (option.name or "").partition("__")
            if isinstance(option, click.Option) and (row := option.get_help_record(ctx)) is not None:
                tables.setdefault(table.title() if key and table != "chat" else "Options", []).append(row)
        for title, rows in tables.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def chat_options(command: F) -> F:
    """Add the options that say what is chatted with: `model`, `server`, `preset` and `tool_servers`."""
    for names, metavar, help in (
        (("--tools", "tool_servers"), "NAME", "Let the model call tools of this MCP server in mcp.json, or of `all`; "
                                              "each call needs your approval."),
        (("--preset",), "NAME", "Preset: system prompt, sampling, reasoning and model."),
        (("--server",), "URL", "An OpenAI-compatible server (llama-server, vLLM, Ollama, …) in place of a model here."),
        (("--model", "-m"), "MODEL", "A GGUF file, or a part of a model's name (qwen, demo); default: the one used "
                                     "last. With --server, its name there; http://HOST:PORT#NAME is both in one."),
    ):  # fmt: skip
        command = click.option(*names, metavar=metavar, help=help, multiple="tool_servers" in names)(command)
    return command


class LazyGroup(SectionedCommand, click.Group):
    """Knows its commands by name. `commands_by_name`: name: (module, attribute, the line in the group's `--help`)."""

    def __init__(self, *args: Any, commands_by_name: Mapping[str, tuple[str, str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.by_name = commands_by_name

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.by_name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.by_name:
            return None
        module, attribute, _ = self.by_name[cmd_name]
        return getattr(importlib.import_module(module), attribute)

    def hint(self, path: str, name: str) -> str:
        """Return what someone who typed `name` after `path` may have meant, commands of its groups too; or ""."""
        wanted = _ELSEWHERE.get(name.lower(), name.lower())
        known = list(self.by_name)
        for group, (module, attribute, _) in self.by_name.items():
            inner = getattr(importlib.import_module(module), attribute) if attribute == group else None
            known += [f"{group} {one}" for one in inner.by_name] if isinstance(inner, LazyGroup) else []
        exact = [one for one in known if one.rpartition(" ")[2] == wanted]
        close = exact or difflib.get_close_matches(name.lower(), self.by_name)
        meant = f"Did you mean {' or '.join(f'{path} {one}' for one in close)}?" if close else ""
        listed = f"Its commands: {', '.join(self.by_name)}." if path.count(" ") else ""
        return _INSTEAD.get(f"{self.name} {wanted}", meant or listed)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in self.by_name.items()])
        super().format_options(ctx, formatter)
