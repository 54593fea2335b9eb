"""Commands and their `--help`, which must be there at once: a group imports a command only when it runs; and options
that the app and `ask` have in common."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from cpuchat.cli.completion import MODEL

F = TypeVar("F", bound=Callable[..., Any])
_ELSEWHERE = {
    "ls": "list", "rm": "delete", "remove": "delete", "pull": "download", "get": "download", "inspect": "show",
    "info": "show", "run": "ask", "start": "serve", "server": "serve", "benchmark": "bench",
}  # fmt: skip
"""What other programs call commands."""
_INSTEAD = {
    "chats delete": "Delete it in the app: d in the list of chats (F8).",
    "chats search": "Name the words: cpuchat chats list WORDS",
    "chats show": "Export it to be read: cpuchat chats export ID -o chat.md",
}
"""What is done otherwise here."""
_SECTIONS: dict[str, tuple[str, ...]] = {
    "Answer": ("chat", "raw", "stop", "json_schema", "grammar", "show_reasoning"),
    "Preset, server and tools": ("preset", "server", "tool_servers", "allow_tools"),
    "Matrix": ("drafters", "draft_models", "threads", "cores", "memory_policies", "kv_types", "flash_attn", "users"),
    "As llama-bench": ("pp", "tg", "depth"),
}
"""Options of `--help` that do not stand first, by their names or tables in config.toml; other tables have their own."""


class SectionedCommand(click.Command):
    """A command whose `--help` lists its main options first, and those of settings last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []} | {title: [] for title in _SECTIONS}
        for option in self.get_params(ctx):
            table, _, key = (option.name or "").partition("__")
            if isinstance(option, click.Option) and (row := option.get_help_record(ctx)) is not None:
                title = next((title for title, names in _SECTIONS.items() if table in names), "")
                sections.setdefault(title or (table.title() if key else "Options"), []).append(row)
        for title, rows in sections.items():
            if rows:
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
        more = {"type": MODEL if "-m" in names else None, "multiple": "tool_servers" in names}
        command = click.option(*names, metavar=metavar, help=help, **more)(command)
    return command


class LazyGroup(SectionedCommand, click.Group):
    """Knows its commands by name. `commands_by_name`: name: (module, attribute, the line in the group's `--help`)."""

    def __init__(self, *args: Any, commands_by_name: Mapping[str, tuple[str, str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.by_name = commands_by_name

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.by_name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = _ELSEWHERE.get(cmd_name, cmd_name) if ctx.parent is not None else cmd_name  # `models ls`
        if cmd_name not in self.by_name:
            return None
        module, attribute, _ = self.by_name[cmd_name]
        return getattr(importlib.import_module(module), attribute)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return what click does, with `-m MODEL` as the MODEL of a command that takes that as an argument."""
        name, command, rest = super().resolve_command(ctx, args)
        params = command.params if command is not None else []
        first = next((one.type for one in params if isinstance(one, click.Argument)), None)
        if first is MODEL and not any("-m" in one.opts for one in params):
            end = rest.index("--") if "--" in rest else len(rest)
            rest = [*(one.removeprefix("--model=") for one in rest[:end] if one not in ("-m", "--model")), *rest[end:]]
        return name, command, rest

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
