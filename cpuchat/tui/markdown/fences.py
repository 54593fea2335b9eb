"""Tells how fences nest: models write Markdown documents, with code in them, into a fence of the same length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_DOCUMENTS = ("markdown", "md", "mdx", "mdc", "qmd", "rmd")
FENCE = re.compile(r"( *)(`{3,}(?=[^`]*$)|~{3,})(.*)")


def language_of(info: str) -> str:
    """Return the language that the info string of a fence names; "" for none."""
    return info.split(maxsplit=1)[0].strip("{}.") if info.strip() else ""


def is_document(info: str) -> bool:
    return language_of(info).lower() in _DOCUMENTS


def nesting(lines: Iterable[str], markup: str) -> Iterator[int]:
    """Yield after each line of a fenced document how many fences are open in it; -1 where the line ends it. `markup` is
    the document's own fence: shorter ones, and those of the other character, cannot be taken for its end."""
    opened = [(markup, True)]  # fences, and whether others may be in them
    for line in lines:
        found = FENCE.fullmatch(line)
        if found is not None and found[2].startswith(markup):
            indent, run, info = found[1], found[2], found[3].strip()
            if info and opened[-1][1]:
                opened.append((run, is_document(info)))
            elif not info and run.startswith(opened[-1][0]) and (len(opened) > 1 or len(indent) < 4):
                opened.pop()
        yield len(opened) - 1
        if not opened:
            return
