"""`cpuchat chats delete`."""

from __future__ import annotations

import asyncio
import sys

import click

from cpuchat.errors import Interrupted, UsageError

_EPILOG = """\b
Examples:
  cpuchat chats delete 1f3a
  cpuchat chats delete 1f3a 77c0 --yes

The text is overwritten in the database and in the search index, and the saved KV cache and checkpoints are deleted;
forks keep theirs. There is no undo; `cpuchat chats export` first keeps a copy."""


@click.command("delete", epilog=_EPILOG)
@click.argument("chats", nargs=-1, required=True, metavar="CHAT...")
@click.option("--yes", "-y", is_flag=True, help="Don't ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; needs --yes.")
def delete(chats: tuple[str, ...], yes: bool, as_json: bool) -> int:
    """Delete chats with all their branches."""
    from cpuchat import paths
    from cpuchat.backend.local import LocalBackend
    from cpuchat.cli.chats.stored import find_chats, opened_store
    from cpuchat.cli.output import json_line
    from cpuchat.present.chats import HEADINGS, row
    from cpuchat.present.table import table
    from cpuchat.telemetry.units import plural

    with opened_store() as store:
        found = find_chats(store, chats)
        if not yes:
            if as_json or not sys.stdin.isatty():
                raise UsageError("Refusing to delete without --yes.", "Add --yes to confirm.")
            counts = store.message_counts()
            for line in table([HEADINGS, *(row(chat, counts.get(chat.id, 0)) for chat in found)], right=(2,)):
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
        click.echo(json_line({"deleted": [chat.id for chat in found]}))
    else:
        click.echo(f"Deleted {plural(len(found), 'chat')}.")
    return 0
