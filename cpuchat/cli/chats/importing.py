"""`cpuchat chats import`."""

from __future__ import annotations

from pathlib import Path

import click

_EPILOG = """\b
Examples:
  cpuchat chats import chats.json                             an export of cpuchat
  cpuchat chats import chatgpt-export.zip                     ChatGPT: Settings, Data controls, Export data
  cpuchat chats import ~/.lmstudio/conversations              LM Studio: the folder, or files in it
  cpuchat chats import 2026-11-23_conversations.zip           llama-server's web UI: Settings, Import/Export

A FILE may be JSON, JSON lines, a ZIP archive or a folder. Nothing is overwritten: chats that are there already are left
as they are, so that a file can be imported again."""


@click.command("import", epilog=_EPILOG)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def import_files(files: tuple[Path, ...], as_json: bool) -> int:
    """Import the chats of each FILE, with their branches, models and figures."""
    from cpuchat.chats.transfer.importing import Imported, import_chats
    from cpuchat.chats.transfer.sources import read_exports
    from cpuchat.cli.chats.stored import opened_store
    from cpuchat.cli.output import json_line
    from cpuchat.present.chats import imported

    exports = [read_exports(file) for file in files]  # all are read before anything is stored
    done = Imported()
    with opened_store() as store:
        for export in exports:
            one = import_chats(store, export.chats)
            if not as_json:
                click.echo(imported(one, export.source))
            done.added += one.added
            done.known += one.known
            done.empty += one.empty
    problems = [problem for export in exports for problem in export.problems]
    for problem in [] if as_json else problems:
        click.echo(f"cpuchat: Not imported: {problem}.", err=True)
    if as_json:
        added = [chat.id for chat in done.added]
        click.echo(json_line({"added": added, "known": done.known, "empty": done.empty, "problems": problems}))
    return 1 if problems else 0
