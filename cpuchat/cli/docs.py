"""`cpuchat docs`: the manual, which every installation has."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

import click

from cpuchat.base import paths
from cpuchat.base.errors import UsageError
from cpuchat.cli.completion import NamesByTab
from cpuchat.cli.output import is_terminal
from cpuchat.cli.terminal import columns

_EPILOG = """\b
Examples:
  cpuchat docs glossary            a page
  cpuchat docs serve.md#access     a part of it
  cpuchat docs exit-codes          any part by its heading
  cpuchat docs disk full           the lines that contain these words"""


@click.command(epilog=_EPILOG)
@click.argument("words", nargs=-1, metavar="[PAGE][#HEADING]|WORDS", type=NamesByTab(lambda: _pages()))
def docs(words: tuple[str, ...]) -> None:
    """Show PAGE of the manual, as Markdown in a pipe; else the lines that contain all WORDS. Without either, list the
    pages."""
    pages = _pages()
    if (text := _found(" ".join(words) or "readme", pages)) is None:
        return click.echo("\n".join(_lines_with(words, pages)))
    if not is_terminal(sys.stdout) or os.environ.get("TERM", "dumb") == "dumb":
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(force_terminal=True, width=columns())
    with console.capture() as shown:
        text = re.sub(r"^!\[.*\n", "", text, flags=re.MULTILINE)  # pictures
        console.print(Markdown(re.sub(r"\[([^]]*)\]\(#[^)]*\)", r"\1", text), hyperlinks=False))
    return click.echo_via_pager(shown.get())


def _pages() -> dict[str, str]:
    return {file.stem.lower(): paths.read_text(file) for file in sorted(paths.packaged("docs").glob("*.md"))}


def _found(wanted: str, pages: dict[str, str]) -> str | None:
    """Return the page, or part of one, that is `wanted`: `machine`, `docs/serve.md#access`, `exit-codes`; None if there
    is none of that name, and it may be words to search. Raises UsageError: no such heading of a page."""
    page, _, heading = wanted.removeprefix("docs/").partition("#")
    page, heading = _anchor(page.removesuffix(".md")), _anchor(heading)
    if page in pages and not heading:
        return pages[page]
    parts = _parts(pages[page]) if page in pages else {}
    for name in () if parts else sorted(pages.keys() - {"readme"}):  # by its heading alone
        parts |= _parts(pages[name])
    if (heading or page) in parts:
        return parts[heading or page]
    if not heading:
        return None
    raise _missing(wanted, heading, parts or pages)


def _lines_with(words: Sequence[str], pages: dict[str, str]) -> list[str]:
    """Return each line that contains all `words`, after the part it is in. Raises UsageError: there is none."""
    wanted, found = [word.lower() for word in " ".join(words).split()], list[str]()
    for page, text in pages.items():
        lines, place = text.splitlines(), page
        anchors = {n: anchor for n, _, anchor in _headings(lines)}
        for n, line in enumerate(lines):
            place = f"{page}#{anchors[n]}" if n in anchors else place
            if all(word in line.lower() for word in wanted):
                found.append(f"{place}  {line.strip()}")
    if not found:
        raise _missing(" ".join(words), words[0], pages)
    return found


def _missing(wanted: str, word: str, known: Iterable[str]) -> UsageError:
    close = difflib.get_close_matches(word.lower(), known)
    hint = f"Did you mean {', '.join(close)}?" if close else f"It has {', '.join(known)}. Commands: cpuchat --help."
    return UsageError(f"The manual has no page and no line with {wanted!r}.", hint)


def _headings(lines: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yield each heading of a page: its line, level and anchor."""
    is_code = False
    for n, line in enumerate(lines):
        is_code ^= line.startswith("```")
        if line.startswith("#") and not is_code:
            yield n, line.index(" "), _anchor(line.lstrip("#"))


def _parts(text: str) -> dict[str, str]:
    """Return the parts of a page by the anchors of their headings, each up to the next one of its level."""
    lines = text.splitlines(keepends=True)
    headings = [*_headings(lines)]
    ends = {n: next((m for m, level, _ in headings if m > n and level <= of), None) for n, of, _ in headings}
    return {name: "".join(lines[n : ends[n]]) for n, _, name in headings}


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
