"""`cpuchat docs`: the manual, which every installation has."""

from __future__ import annotations

import difflib
import os
import re
import sys

import click

from cpuchat.base import paths
from cpuchat.base.errors import UsageError
from cpuchat.cli.output import is_terminal
from cpuchat.cli.terminal import columns

_EPILOG = """\b
Examples:
  cpuchat docs glossary            a page
  cpuchat docs serve.md#access     a part of it
  cpuchat docs exit-codes          any part by its heading"""


@click.command(epilog=_EPILOG)
@click.argument("page", required=False, metavar="[PAGE][#HEADING]")
def docs(page: str | None) -> None:
    """Show PAGE of the manual, as Markdown in a pipe; without it, list the pages."""
    pages = {file.stem.lower(): paths.read_text(file) for file in sorted(paths.packaged("docs").glob("*.md"))}
    text = _found("readme" if page is None else page, pages)
    if not is_terminal(sys.stdout) or os.environ.get("TERM", "dumb") == "dumb":
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(force_terminal=True, width=columns())
    with console.capture() as shown:
        text = re.sub(r"^!\[.*\n", "", text, flags=re.MULTILINE)  # pictures
        console.print(Markdown(re.sub(r"\[([^]]*)\]\(#[^)]*\)", r"\1", text), hyperlinks=False))
    click.echo_via_pager(shown.get())


def _found(wanted: str, pages: dict[str, str]) -> str:
    """Return the page, or part of one, that is `wanted`: `machine`, `docs/serve.md#access`, `exit-codes`."""
    page, _, heading = wanted.removeprefix("docs/").partition("#")
    page, heading = _anchor(page.removesuffix(".md")), _anchor(heading)
    if page in pages and not heading:
        return pages[page]
    parts = _parts(pages[page]) if page in pages else {}
    for name in () if parts else sorted(pages.keys() - {"readme"}):  # by its heading alone
        parts |= _parts(pages[name])
    if (heading or page) in parts:
        return parts[heading or page]
    known = list(parts if page in pages else pages)
    word = (heading or page).replace("-", "")
    close = [name for name in parts if word in name.replace("-", "")] or difflib.get_close_matches(word, known)
    hint = f"Did you mean {', '.join(close[:6])}?" if close else f"It has {', '.join(known)}. Commands: cpuchat --help."
    raise UsageError(f"The manual has no page {wanted!r}.", hint)


def _parts(text: str) -> dict[str, str]:
    """Return the parts of a page by the anchors of their headings, each up to the next one of its level."""
    lines, headings, is_code = text.splitlines(keepends=True), list[tuple[int, int, str]](), False
    for n, line in enumerate(lines):
        is_code ^= line.startswith("```")
        if line.startswith("#") and not is_code:
            headings.append((n, line.index(" "), _anchor(line.lstrip("#"))))
    ends = {n: next((m for m, level, _ in headings if m > n and level <= of), None) for n, of, _ in headings}
    return {name: "".join(lines[n : ends[n]]) for n, _, name in headings}


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
