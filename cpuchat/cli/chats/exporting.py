"""`cpuchat chats export`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from cpuchat.cli.chats.stored import find_chats, opened_store
from cpuchat.cli.options import file_option
from cpuchat.cli.output import json_line
from cpuchat.errors import CpuchatError
from cpuchat.files import write_atomically
from cpuchat.present.chats import document
from cpuchat.telemetry.units import plural

_EPILOG = """\b
Examples:
  cpuchat chats export -o chats.json          all chats, to be imported elsewhere
  cpuchat chats export 1f3a -o chat.md        the open branch of one chat, to be read
  cpuchat chats export 1f3a 77c0 > two.json

JSON has all branches, settings and figures; `cpuchat chats import` reads it without loss. Times are in seconds since
the epoch."""


@click.command("export", epilog=_EPILOG)
@click.argument("chats", nargs=-1, metavar="[CHAT]...")
@file_option("-o", "--output", help="Write to this file instead of standard output.")
def export(chats: tuple[str, ...], output: Path | None) -> int:
    """Export chats, all of them unless CHAT is given, as JSON; as Markdown to a FILE that ends in .md."""
    from cpuchat.chats.transfer.importing import export_chat
    from cpuchat.chats.transfer.portable import Document

    with opened_store() as store:
        found = find_chats(store, chats) if chats else store.chats()
        exported = [export_chat(store, chat) for chat in found]
    if output is None:
        click.echo(json_line(msgspec.to_builtins(Document(chats=exported))))
        return 0
    try:
        write_atomically(output, document(exported, output))
    except OSError as error:
        raise CpuchatError(f"Cannot write {output}: {error.strerror}.", "Choose another file.") from None
    click.echo(f"Exported {plural(len(exported), 'chat')} to {output}.")
    return 0
