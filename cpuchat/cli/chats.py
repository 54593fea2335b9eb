"""The `cpuchat chats` commands: list, search, show, export, import and delete chats."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import ChatNotFound, Interrupted, UsageError
from cpuchat.base.text import clean_line
from cpuchat.chats.records import Chat, Excerpt
from cpuchat.chats.store import ChatStore
from cpuchat.cli.lazy import LazyGroup
from cpuchat.cli.options import file_option
from cpuchat.cli.output import cleaned, print_json, write_output
from cpuchat.cli.question import ANYWHERE, TextCommand
from cpuchat.cli.terminal import echo_table, is_terminal
from cpuchat.present import chats as words
from cpuchat.present.chats import SHORT_ID
from cpuchat.telemetry.units import plural

_COMMANDS = {
    "list": ("cpuchat.cli.chats", "list_chats", "List the chats, last changed first."),
    "search": ("cpuchat.cli.chats", "search", "Search titles and messages."),
    "show": ("cpuchat.cli.chats", "show", "Print a chat as Markdown."),
    "export": ("cpuchat.cli.chats", "export", "Export chats as JSON or Markdown."),
    "import": ("cpuchat.cli.chats", "import_files", "Import chats from cpuchat and other programs."),
    "delete": ("cpuchat.cli.chats", "delete", "Delete chats."),
}

_EPILOG = """\b
CHAT is the id of a chat in `cpuchat chats list`, or the beginning of one."""


@click.group(cls=LazyGroup, commands_by_name=_COMMANDS, epilog=_EPILOG)
def chats() -> None:
    """List, search, show, export, import and delete chats."""


@contextlib.contextmanager
def opened_store() -> Iterator[ChatStore]:
    """Open the database; what was repaired in it is said on stderr. Raises ChatsError."""
    with contextlib.closing(ChatStore(paths.chats_db())) as store:
        yield store
        for notice in store.take_notices():
            click.echo(f"cpuchat: {notice}", err=True)


def find_chats(store: ChatStore, beginnings: Sequence[str]) -> list[Chat]:
    """Return the chats whose ids begin like this, each once. Raises ChatNotFound unless exactly one does."""
    chats = store.chats()
    return list({chat.id: chat for beginning in beginnings for chat in [_find(chats, beginning)]}.values())


def _find(chats: Sequence[Chat], beginning: str) -> Chat:
    found = [chat for chat in chats if beginning and chat.id.startswith(beginning)]
    found = [chat for chat in found if chat.id == beginning] or found
    if not found:
        raise ChatNotFound(f"No chat has an id that begins with {beginning!r}.", "See cpuchat chats list.")
    if len(found) > 1:
        length = max(SHORT_ID, len(beginning) + 2)
        some = ", ".join(f"{chat.id[:length]} ({clean_line(chat.title)})" for chat in found[:3])
        raise ChatNotFound(f"{len(found)} chats have ids that begin with {beginning!r}: {some}.", "Give more of it.")
    return found[0]


_LIST_EPILOG = """\b
Examples:
  cpuchat chats list
  cpuchat chats list --json | jq -r '.[] | select(.messages > 100) | .id'"""

_SEARCH_EPILOG = """\b
Examples:
  cpuchat chats search memory bandwidth
  cpuchat chats search --json numa

A message matches if it has all the words; the last one may be the beginning of a word."""

_SHOW_EPILOG = """\b
Examples:
  cpuchat chats show 1f3a
  cpuchat chats show 1f3a --json      with all branches, settings and figures"""


@click.command("list", epilog=_LIST_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_chats(as_json: bool) -> None:
    """List the chats, last changed first."""
    with opened_store() as store:
        chats, counts = store.chats(), store.message_counts()
    if as_json:
        print_json([_json(chat) | {"messages": counts.get(chat.id, 0)} for chat in chats])
    elif chats:
        echo_table([words.HEADINGS, *(words.row(chat, counts.get(chat.id, 0)) for chat in chats)], right=(2,))
    else:
        click.echo("cpuchat: No chats yet.", err=True)


@click.command("search", cls=TextCommand, n_before=ANYWHERE, epilog=_SEARCH_EPILOG)
@click.argument("words", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array; `marks` are from and to characters.")
def search(words: tuple[str, ...], as_json: bool) -> None:
    """Search titles and messages, on all branches. Prints at most 100 chats, last changed first."""
    with opened_store() as store:
        hits = store.search(" ".join(words))
    if as_json:
        matches = [[{"text": one.text, "marks": one.marks} for one in hit.excerpts] for hit in hits]
        return print_json([_json(hit) | {"matches": found} for hit, found in zip(hits, matches, strict=True)])
    if not hits:
        click.echo("cpuchat: No chats match.", err=True)
    for hit in hits:
        click.echo(f"{hit.id[:SHORT_ID]}  {clean_line(hit.title) or 'New chat'}")
        for one in hit.excerpts:
            _echo_excerpt(one)


@click.command("show", epilog=_SHOW_EPILOG)
@click.argument("chat", metavar="CHAT")
@click.option("--json", "as_json", is_flag=True, help="Print the export of the chat: one JSON object.")
def show(chat: str, as_json: bool) -> None:
    """Print the open branch of CHAT as Markdown."""
    from cpuchat.chats.transfer import Document, export_chat

    with opened_store() as store:
        (found,) = find_chats(store, [chat])
        exported = export_chat(store, found)
    if as_json:
        print_json(msgspec.to_builtins(Document(chats=[exported])))
    else:
        click.echo(words.markdown(exported), nl=False)


def _json(chat: Chat) -> dict[str, Any]:
    return {
        "id": chat.id,
        "title": chat.title,
        "created": chat.created,
        "updated": chat.updated,
        "model": chat.model,
        "comparison": bool(chat.sides),
        "pinned": chat.pinned,
    }


def _echo_excerpt(found: Excerpt) -> None:
    """Print an excerpt; on a terminal with what was found in bold."""
    out = cleaned(sys.stdout)
    if out is None:
        return
    plain = not is_terminal(sys.stdout) or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    at = 0
    out.write(" " * 10)
    for start, end in () if plain else found.marks:
        out.write(found.text[at:start])
        out.write_raw("\x1b[1m")
        out.write(found.text[start:end])
        out.write_raw("\x1b[0m")
        at = end
    out.write(found.text[at:] + "\n")


_EXPORT_EPILOG = """\b
Examples:
  cpuchat chats export -o chats.json          all chats, to be imported elsewhere
  cpuchat chats export 1f3a -o chat.md        the open branch of one chat, to be read
  cpuchat chats export 1f3a 77c0 > two.json

JSON has all branches, settings and figures; `cpuchat chats import` reads it without loss. Times are in seconds since
the epoch."""


@click.command("export", epilog=_EXPORT_EPILOG)
@click.argument("chats", nargs=-1, metavar="[CHAT]...")
@file_option("-o", "--output", help="Write to this file instead of standard output.")
def export(chats: tuple[str, ...], output: Path | None) -> None:
    """Export chats, all of them unless CHAT is given, as JSON; as Markdown to a FILE that ends in .md."""
    from cpuchat.chats.transfer import Document, export_chat

    with opened_store() as store:
        found = find_chats(store, chats) if chats else store.chats()
        exported = [export_chat(store, chat) for chat in found]
    if output is None:
        return print_json(msgspec.to_builtins(Document(chats=exported)))
    write_output(output, words.document(exported, output))
    click.echo(f"Exported {plural(len(exported), 'chat')} to {output}.")


_IMPORT_EPILOG = """\b
Example:
  cpuchat chats import chats.json

A FILE is the JSON of `cpuchat chats export`. Nothing is overwritten: chats that are there already are left as they are,
so that a file can be imported again."""


@click.command("import", epilog=_IMPORT_EPILOG)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def import_files(files: tuple[Path, ...], as_json: bool) -> None:
    """Import the chats of each FILE, with their branches, models and figures."""
    from cpuchat.chats.transfer import import_chats, read_document

    chats = [chat for file in files for chat in read_document(file)]  # all are read before anything is stored
    with opened_store() as store:
        done = import_chats(store, chats)
    if as_json:
        print_json({"added": [chat.id for chat in done.added], "known": done.known, "empty": done.empty})
    else:
        click.echo(words.imported(done))


_DELETE_EPILOG = """\b
Examples:
  cpuchat chats delete 1f3a
  cpuchat chats delete 1f3a 77c0 --yes

The text is overwritten in the database, and the saved KV cache and checkpoints are deleted;
forks keep theirs. There is no undo; `cpuchat chats export` first keeps a copy."""


@click.command("delete", epilog=_DELETE_EPILOG)
@click.argument("chats", nargs=-1, required=True, metavar="CHAT...")
@click.option("--yes", "-y", is_flag=True, help="Don't ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; needs --yes.")
def delete(chats: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete chats with all their branches."""
    from cpuchat.backend.local import LocalBackend
    from cpuchat.present.table import table

    with opened_store() as store:
        found = find_chats(store, chats)
        if not yes:
            if as_json or not sys.stdin.isatty():
                raise UsageError("Refusing to delete without --yes.", "Add --yes to confirm.")
            counts = store.message_counts()
            for line in table(
                [words.HEADINGS, *(words.row(chat, counts.get(chat.id, 0)) for chat in found)], right=(2,)
            ):
                click.echo(f"  {line}", err=True)
            if not click.confirm(f"Delete {plural(len(found), 'chat')}?", err=True):
                raise Interrupted("Nothing was deleted.")
        with store.transaction():
            for chat in found:
                store.delete(chat.id)
    backend = LocalBackend(state_dir=paths.kv_dir())
    for chat in found:
        asyncio.run(backend.forget(chat.id))
    if as_json:
        print_json({"deleted": [chat.id for chat in found]})
    else:
        click.echo(f"Deleted {plural(len(found), 'chat')}.")
