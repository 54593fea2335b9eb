"""Renders an answer while it is written: finished blocks once, only the open block repeatedly.

What this shows may differ in detail from `markdown.render` of the whole (the spacing of a list that turns out to be
loose, the widths of a long table's columns); when the answer is complete it is rendered whole, once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.style import Style

from cpuchat.tui.markdown.highlight import highlight
from cpuchat.tui.markdown.palette import Palette
from cpuchat.tui.markdown.parser import parse, parse_blocks, parse_inline
from cpuchat.tui.markdown.render import Renderer, top_blocks
from cpuchat.tui.markdown.rows import Row, plain_rows

if TYPE_CHECKING:
    from markdown_it.token import Token

# Longer lists, tables and code blocks are committed in parts (about 400 tokens).
LONG_BLOCK = 1600
# An open block that is longer is shown as it is until the answer is complete: it would be parsed again at each flush.
MOST_OPEN = 40_000
# A last line that may still become anything: shown when more of it has come, so that "--" isn't a heading for a moment.
_UNDECIDED = re.compile(r"[-=*_+#>`~|: \t]+|[ \t]*\d{1,9}[.)]?[ \t]*")


class Stream:
    """Renders text fed to it, as rows."""

    def __init__(self, width: int, palette: Palette) -> None:
        self._renderer = Renderer(width, palette)
        self._width = width
        self._palette = palette
        self._open = ""
        self._gap = False
        self._continued = False
        self._plain_until = 0  # so long may the open block get before it is parsed again

    def feed(self, text: str) -> None:
        self._open += text

    def update(self) -> tuple[list[Row], list[Row]]:
        """Return rows that are new and final, and the rows of the open block (they replace those of the last call)."""
        final: list[Row] = []
        try:
            if len(self._open) > self._plain_until:
                while self._commit(final):
                    pass
            if len(self._open) > MOST_OPEN:
                self._plain_until = max(self._plain_until, 2 * len(self._open))
                return final, plain_rows(self._open, self._width, Style())
            self._plain_until = 0
            before, _, last = self._open.rpartition("\n")
            shown = before if _UNDECIDED.fullmatch(last) else self._open
            return final, self._rows(shown, preview=True) if shown.strip() else []
        except RecursionError:  # nested thousands deep
            return final, plain_rows(self._open, self._width, Style())

    def _commit(self, final: list[Row]) -> bool:
        text = self._open
        if cut := commit_point(text):
            self._open = text[cut:]
            if done := top_blocks(parse_blocks(text[:cut])):
                last, following = done[-1], parse_blocks(self._open)[0].type
                in_list = last[0].type == following and following.endswith("list_open")
                final += self._rows(text[:cut])
                self._gap = _is_loose(last) if in_list else last[0].type != "heading_open"
                self._continued = False
            return True
        head, cut = _inner_cut(text, self._palette)
        if cut:
            final += self._rows(text[:cut])
            self._gap = False
            self._open = text[:head] + text[cut:]
            self._continued = True
            return True
        return False

    def _rows(self, text: str, preview: bool = False) -> list[Row]:
        tokens = parse(text)
        if preview:
            _close_markup(tokens)
        rows: list[Row] = []
        gap = self._gap
        for index, block in enumerate(top_blocks(tokens)):
            self._renderer.continued = self._continued and index == 0
            new = self._renderer.rows(block)
            if new and gap:
                rows.append(Row())
            rows += new
            gap = block[0].type != "heading_open"
        return rows


def commit_point(tail: str) -> int:
    """Return where the last block of `tail` begins: all before it can no longer change. 0 if there is nothing before
    it.

    The last item of a long list counts as a block of its own.
    """
    blocks = top_blocks(parse_blocks(tail))
    if not blocks:
        return 0
    last = blocks[-1]
    line = last[0].map[0] if last[0].map else 0
    if last[0].type.endswith("list_open") and len(tail) > LONG_BLOCK:
        items = [token.map[0] for token in last if token.type == "list_item_open" and token.level == 1 and token.map]
        line = items[-1]
    return _offset(tail, line)


def _inner_cut(text: str, palette: Palette) -> tuple[int, int]:
    """Return for a long open code block or table: (length of its head, which the rest needs again, end of the finished
    part).
    """
    if len(text) <= LONG_BLOCK:
        return 0, 0
    blocks = top_blocks(parse_blocks(text))
    if len(blocks) != 1:
        return 0, 0
    first = blocks[0][0]
    lines = text.split("\n")
    if first.type == "fence" and first.map == [0, len(lines)]:
        language = first.info.split()[0] if first.info.split() else ""
        safe = highlight(first.content, language, palette)[1]
        # Not the last complete line: it may yet be joined by the closing fence.
        good = [number for number in range(len(lines) - 3) if number < len(safe) and safe[number]]
        if good:
            return _offset(text, 1), _offset(text, good[-1] + 2)
    elif first.type == "table_open" and len(lines) > 4:
        return _offset(text, 2), _offset(text, len(lines) - 2)
    return 0, 0


def _offset(text: str, line: int) -> int:
    at = 0
    for _ in range(line):
        at = text.index("\n", at) + 1
    return at


def _is_loose(block: Sequence[Token]) -> bool:
    return any(token.type == "paragraph_open" and token.level == 2 and not token.hidden for token in block)


def _close_markup(tokens: Sequence[Token]) -> None:
    """Close bold and code that are open in the last paragraph, so that it does not change when the closer comes."""
    for token in reversed(tokens):
        if token.nesting == -1:
            continue
        if token.type == "inline":
            text = token.content
            if text.count("`") % 2:
                text = text[:-1] if text.endswith("`") else text + "`"
            elif re.sub(r"`[^`]*`", "", text).count("**") % 2:
                text = text.rstrip("*")
                text = text.rstrip() + "**" if text.count("**") % 2 else text
            if text is not token.content:
                token.children = parse_inline(text)
        return
