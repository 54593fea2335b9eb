"""The `cpuchat chats` commands: list, export and import chats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import ChatNotFound
from cpuchat.base.files import write_named
from cpuchat.chats.records import Chat
from cpuchat.chats.store import ChatStore
from cpuchat.chats.transfer import Document, export_chat, import_chats, read_document
from cpuchat.cli.lazy import LazyGroup
from cpuchat.cli.options import file_option
from cpuchat.cli.output import print_json
from cpuchat.cli.terminal import echo_table
from cpuchat.present import chats as present
from cpuchat.telemetry.units import plural

_COMMANDS = {
    "list": ("cpuchat.cli.chats", "list_chats", "List the chats, last changed first."),
    "export": ("cpuchat.cli.chats", "export", "Export chats as JSON or Markdown."),
    "import": ("cpuchat.cli.chats", "import_files", "Import chats that cpuchat exported."),
}

_EPILOG = """\b
CHAT is the id of a chat in `cpuchat chats list`, or the beginning of one."""


@click.group(cls=LazyGroup, commands_by_name=_COMMANDS, epilog=_EPILOG)
def chats() -> None:
    """List, export and import chats."""


@contextlib.contextmanager
def opened_store(*, to_read: bool = False) -> Iterator[ChatStore]:
    """Open the database, `to_read` also where it cannot be written; what was repaired in it is said on stderr. Raises
    ChatsError."""
    with contextlib.closing(ChatStore(paths.chats_db(), or_in_memory=to_read)) as store:
        if store.unsaved is not None and not store.chats():  # not even read
            raise store.unsaved
        yield store
        for notice in store.take_notices() if store.unsaved is None else ():
            click.echo(f"cpuchat: {notice}", err=True)


def find_chats(store: ChatStore, beginnings: Sequence[str]) -> list[Chat]:
    """Return the chats whose ids begin like this, each once. Raises ChatNotFound unless exactly one does."""
    chats, chosen = store.chats(), dict[str, Chat]()
    for beginning in beginnings:
        found = [chat for chat in chats if beginning and chat.id.startswith(beginning)]
        if len(found) != 1:
            message = f"{len(found) or 'No'} chats have ids that begin with {beginning!r}."
            raise ChatNotFound(message, "See cpuchat chats list." if not found else "Give more of it.")
        chosen[found[0].id] = found[0]
    return list(chosen.values())


@click.command("list")
@click.argument("words", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_chats(words: tuple[str, ...], as_json: bool) -> None:
    """List the chats, last changed first; those that contain WORDS, as the app's search finds them."""
    with opened_store(to_read=True) as store:
        chats: Sequence[Chat] = store.search(" ".join(words)) if words else store.chats()
        counts = store.message_counts()
    if as_json:
        names = ("id", "title", "created", "updated", "model")
        print_json(
            [
                {name: getattr(chat, name) for name in names}
                | {"comparison": bool(chat.sides), "messages": counts.get(chat.id, 0)}
                for chat in chats
            ]
        )
    elif chats:
        echo_table([present.HEADINGS, *(present.row(chat, counts.get(chat.id, 0)) for chat in chats)], right=(2,))
    else:
        click.echo(f"cpuchat: {'No chat contains these words' if words else 'No chats yet'}.", err=True)


_EXPORT_EPILOG = """\b
Examples:
  cpuchat chats export -o chats.json          all, to be imported elsewhere
  cpuchat chats export 1f3a -o chat.md        one, its open branch to read
  cpuchat chats export 1f3a 77c0 > two.json

JSON has all branches, settings and figures; `cpuchat chats import` reads it without loss. Times are in seconds since
the epoch."""


@click.command("export", epilog=_EXPORT_EPILOG)
@click.argument("chats", nargs=-1, metavar="[CHAT]...")
@file_option("-o", "--output", help="Write to this file instead of standard output.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def export(chats: tuple[str, ...], output: Path | None, force: bool) -> None:
    """Export chats, all of them unless CHAT is given, as JSON; as Markdown to a FILE that ends in .md."""
    with opened_store(to_read=True) as store:
        found = find_chats(store, chats) if chats else store.chats()
        exported = [export_chat(store, chat) for chat in found]
    if output is None:
        return print_json(msgspec.to_builtins(Document(chats=exported)))
    write_named(output, present.document(exported, output), force=force)
    click.echo(f"Exported {plural(len(exported), 'chat')} to {output}.")


_IMPORT_EPILOG = "A FILE is the JSON of `cpuchat chats export`. Chats that are there already are left as they are."


@click.command("import", epilog=_IMPORT_EPILOG)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="FILE...")
def import_files(files: tuple[Path, ...]) -> None:
    """Import the chats of each FILE, with their branches, models and figures."""
    chats = [chat for file in files for chat in read_document(file)]  # all are read before anything is stored
    with opened_store() as store:
        click.echo(present.imported(import_chats(store, chats)))
