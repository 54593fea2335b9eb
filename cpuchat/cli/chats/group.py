"""The `cpuchat chats` command group."""

from __future__ import annotations

import click

from cpuchat.cli.lazy import LazyGroup

_COMMANDS = {
    "list": ("cpuchat.cli.chats.reading", "list_chats", "List the chats, last changed first."),
    "search": ("cpuchat.cli.chats.reading", "search", "Search titles and messages."),
    "show": ("cpuchat.cli.chats.reading", "show", "Print a chat as Markdown."),
    "export": ("cpuchat.cli.chats.exporting", "export", "Export chats as JSON or Markdown."),
    "import": ("cpuchat.cli.chats.importing", "import_files", "Import chats from cpuchat and other programs."),
    "delete": ("cpuchat.cli.chats.deleting", "delete", "Delete chats."),
}

_EPILOG = """\b
CHAT is the id of a chat in `cpuchat chats list`, or the beginning of one."""


@click.group(cls=LazyGroup, commands_by_name=_COMMANDS, epilog=_EPILOG)
def chats() -> None:
    """List, search, show, export, import and delete chats."""
