"""`cpuchat chats list`, `search` and `show`."""

from __future__ import annotations

import os
import sys
from typing import Any

import click
import msgspec

from cpuchat.chats.records import Chat, Excerpt
from cpuchat.cli.chats.stored import find_chats, opened_store
from cpuchat.cli.output import cleaned, json_line
from cpuchat.cli.terminal import echo_table, is_terminal
from cpuchat.present import chats as words
from cpuchat.present.chats import SHORT_ID, markdown
from cpuchat.text import clean_line

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
def list_chats(as_json: bool) -> int:
    """List the chats, last changed first."""
    with opened_store() as store:
        chats, counts = store.chats(), store.message_counts()
    if as_json:
        click.echo(json_line([_json(chat) | {"messages": counts.get(chat.id, 0)} for chat in chats]))
    elif chats:
        echo_table([words.HEADINGS, *(words.row(chat, counts.get(chat.id, 0)) for chat in chats)], right=(2,))
    else:
        click.echo("cpuchat: No chats yet.", err=True)
    return 0


@click.command("search", epilog=_SEARCH_EPILOG)
@click.argument("words", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array; `marks` are from and to characters.")
def search(words: tuple[str, ...], as_json: bool) -> int:
    """Search titles and messages, on all branches. Prints at most 100 chats, last changed first."""
    with opened_store() as store:
        hits = store.search(" ".join(words))
    if as_json:
        matches = [[{"text": one.text, "marks": one.marks} for one in hit.excerpts] for hit in hits]
        click.echo(json_line([_json(hit) | {"matches": found} for hit, found in zip(hits, matches, strict=True)]))
        return 0
    if not hits:
        click.echo("cpuchat: No chats match.", err=True)
    for hit in hits:
        click.echo(f"{hit.id[:SHORT_ID]}  {clean_line(hit.title) or 'New chat'}")
        for one in hit.excerpts:
            _echo_excerpt(one)
    return 0


@click.command("show", epilog=_SHOW_EPILOG)
@click.argument("chat", metavar="CHAT")
@click.option("--json", "as_json", is_flag=True, help="Print the export of the chat: one JSON object.")
def show(chat: str, as_json: bool) -> int:
    """Print the open branch of CHAT as Markdown."""
    from cpuchat.chats.transfer.importing import export_chat
    from cpuchat.chats.transfer.portable import Document

    with opened_store() as store:
        (found,) = find_chats(store, [chat])
        exported = export_chat(store, found)
    if as_json:
        click.echo(json_line(msgspec.to_builtins(Document(chats=[exported]))))
    else:
        click.echo(markdown(exported), nl=False)
    return 0


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
