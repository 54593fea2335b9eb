"""`cpuchat docs`: the manual, which every installation has."""

from __future__ import annotations

import click

from cpuchat.base import paths
from cpuchat.base.errors import UsageError
from cpuchat.cli.terminal import echo_table

_EPILOG = """\b
Examples:
  cpuchat docs                     the pages
  cpuchat docs first-model         one of them, in Markdown
  cpuchat docs speculation | less"""


@click.command(epilog=_EPILOG)
@click.argument("page", required=False)
def docs(page: str | None) -> None:
    """Print PAGE of the manual; without it, list the pages."""
    pages = {file.stem: file for file in sorted(paths.docs_dir().glob("*.md"))}
    if page is None:
        titles = ((name, paths.read_text(file).partition("\n")[0].removeprefix("# ")) for name, file in pages.items())
        echo_table([("page", "title"), *titles])
    elif (file := pages.get(page.removeprefix("docs/").removesuffix(".md"))) is not None:
        click.echo(paths.read_text(file))
    else:
        raise UsageError(f"The manual has no page {page!r}.", f"Its pages: {', '.join(pages)}.")
