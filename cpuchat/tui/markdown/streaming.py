"""Renders an answer while it is written: finished blocks once, only the open block repeatedly.

What this shows may differ in detail from `markdown.render` of the whole (the spacing of a list that turns out to be
loose, the widths of a long table's columns); when the answer is complete it is rendered whole, once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.style import Style

from cpuchat.tui.markdown.fences import is_document, language_of, nesting
from cpuchat.tui.markdown.render import Renderer, highlight, missing, parse, parse_blocks, parse_inline, top_blocks
from cpuchat.tui.markdown.rows import LineStream, TextRow, TextStyles, plain_rows

if TYPE_CHECKING:
    from markdown_it.token import Token

# Longer lists, tables and code blocks are committed in parts (about 400 tokens).
LONG_BLOCK = 1600
# Any other open block is cut after a line when it is longer, as it is parsed again at each flush; one without a line
# break is shown as it is.
MAX_OPEN = 4_000
# A last line that may still become anything: shown when more of it has come, so that "--" isn't a heading for a moment.
_UNDECIDED = re.compile(r"[-=*_+#>`~|: \t]+|[ \t]*\d{1,9}[.)]?[ \t]*")


class Stream:
    """Renders text fed to it, as rows."""

    def __init__(self, width: int, palette: TextStyles) -> None:
        self._renderer = Renderer(width, palette)
        self._width = width
        self._palette = palette
        self._open = ""
        self._gap = False
        self._head = 0  # characters that an open block was continued with: its part before has shown them
        self._line: LineStream | None = None  # an endless line, until it ends
        self._after_line = ""  # the head of its block

    def feed(self, text: str, _drafter: str = "") -> None:
        self._open += text

    def update(self) -> tuple[list[TextRow], list[TextRow]]:
        """Return rows that are new and final, and the rows of the open block (they replace those of the last call)."""
        final: list[TextRow] = []
        if self._line is not None:
            rest, ended, self._open = self._open.partition("\n")
            self._line.feed(rest + ended)
            rows, tail = self._line.update()
            if not ended:
                return rows, tail
            final += rows
            self._line, self._open = None, self._after_line + self._open
        try:
            while self._commit(final):
                pass
            if self._line is not None:
                return final, self._line.update()[1]
            before, _, last = self._open.rpartition("\n")
            shown = before if _UNDECIDED.fullmatch(last) else self._open
            return final, self._rows(shown, preview=True) if shown.strip() else []
        except RecursionError:  # nested thousands deep
            self._show_as_is(final)
            return final, self._line.update()[1] if self._line is not None else []

    def _show_as_is(self, final: list[TextRow], head: int = 0) -> None:
        """Show the open block as it is, up to the end of its last line, after its head of `head` characters."""
        text = self._open
        before, _, last = text[head:].rpartition("\n")
        if head > self._head:
            final += self._complete(text[:head])
        elif self._gap:
            final.append(TextRow())
        if before:
            final += plain_rows(before, self._width, Style())
        self._line = LineStream(self._width, lambda _: Style())
        self._line.feed(last)
        final += self._line.update()[0]
        self._open, self._after_line, self._head, self._gap = "", text[:head], head, not head

    def _commit(self, final: list[TextRow]) -> bool:
        text = self._open
        if cut := commit_point(text):
            self._open = text[cut:]
            if done := top_blocks(parse_blocks(text[:cut], unfinished=True)):
                last, following = done[-1], parse_blocks(self._open)[0].type
                in_list = last[0].type == following and following.endswith("list_open")
                final += self._complete(text[:cut])
                is_loose = any(one.type == "paragraph_open" and one.level == 2 and not one.hidden for one in last)
                self._gap = is_loose if in_list else last[0].type != "heading_open"
                self._head = 0
            return True
        head, cut = _inner_cut(text, self._palette)
        if cut > head:
            final += self._complete(text[:cut])
            self._gap = False
            self._open = text[:head] + text[cut:]
            self._head = head
            return True
        if len(text) > MAX_OPEN + head:
            self._show_as_is(final, head)
        return False

    def _complete(self, text: str) -> list[TextRow]:
        """Return the rows of what is final; as it is if something would be missing."""
        try:
            rows = self._rows(text)
            if not missing(text[self._head :], [*rows, TextRow([(self._renderer.shown_twice, Style())])]):
                return rows
        except RecursionError:
            pass
        return [*([TextRow()] if self._gap else []), *plain_rows(text[self._head :].strip("\n"), self._width, Style())]

    def _rows(self, text: str, preview: bool = False) -> list[TextRow]:
        tokens = parse(text, unfinished=True)
        if preview:
            _close_markup(tokens)
        rows: list[TextRow] = []
        gap, twice = self._gap, ""
        for index, block in enumerate(top_blocks(tokens)):
            self._renderer.continued = self._head > 0 and index == 0
            new = self._renderer.rows(block)
            twice += self._renderer.shown_twice
            if new and gap:
                rows.append(TextRow())
            rows += new
            gap = block[0].type != "heading_open"
        self._renderer.shown_twice = twice
        return rows


@lru_cache(maxsize=1)
def _blocks(text: str) -> list[Sequence[Token]]:
    return top_blocks(parse_blocks(text, unfinished=True))


def commit_point(tail: str) -> int:
    """Return where the last block of `tail` begins: all before it can no longer change. 0 if there is nothing before
    it.

    The last item of a long list counts as a block of its own."""
    blocks = _blocks(tail)
    if not blocks:
        return 0
    last = blocks[-1]
    line = last[0].map[0] if last[0].map else 0
    if last[0].type.endswith("list_open") and len(tail) > LONG_BLOCK:
        items = [token.map[0] for token in last if token.type == "list_item_open" and token.level == 1 and token.map]
        line = items[-1]
    return _offset(tail, line)


def _inner_cut(text: str, palette: TextStyles) -> tuple[int, int]:
    """Return for a long open block: (length of its head, which the rest needs again, end of the finished part)."""
    if len(text) <= LONG_BLOCK:
        return 0, 0
    blocks = _blocks(text)
    if len(blocks) != 1:
        return 0, 0
    first = blocks[0][0]
    lines = text.split("\n")
    too_long = len(text) > MAX_OPEN
    if first.type == "fence" and first.map == [0, len(lines)]:
        safe = highlight(first.content, language_of(first.info), palette)[1]
        if is_document(first.info):  # a part that begins within a nested fence would take its end for that of the block
            safe = [not depth and fine for depth, fine in zip(nesting(lines[1:], first.markup), safe, strict=False)]
        # Not the last complete line: it may yet be joined by the closing fence.
        good = [number for number in range(len(lines) - 3) if number < len(safe) and (safe[number] or too_long)]
        return (_offset(text, 1) if len(lines) > 1 else 0), _offset(text, good[-1] + 2) if good else 0
    if first.type == "table_open" and len(lines) > 2:
        return _offset(text, 2), _offset(text, len(lines) - 2) if len(lines) > 4 else 0
    return 0, text.rfind("\n") + 1 if too_long else 0


def _offset(text: str, line: int) -> int:
    at = 0
    for _ in range(line):
        at = text.index("\n", at) + 1
    return at


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
