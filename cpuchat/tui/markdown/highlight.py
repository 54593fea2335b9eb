"""Syntax highlighting of code blocks: Pygments' token types in the palette's styles."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.style import Style

from cpuchat.tui.markdown.palette import Palette
from cpuchat.tui.markdown.rows import Run

if TYPE_CHECKING:
    from pygments.lexer import Lexer
    from pygments.token import _TokenType

# Pygments' kinds of tokens; the nearest ancestor counts.
_ROLES = {
    "Comment": "comment",
    "Comment.Preproc": "keyword",
    "Keyword": "keyword",
    "Keyword.Type": "type",
    "Keyword.Constant": "number",
    "Operator.Word": "keyword",
    "Literal.String": "string",
    "Literal.String.Doc": "comment",
    "Literal.Number": "number",
    "Name.Function": "name",
    "Name.Class": "type",
    "Name.Namespace": "name",
    "Name.Decorator": "name",
    "Name.Tag": "keyword",
    "Name.Attribute": "name",
    "Name.Builtin": "type",
    "Name.Exception": "type",
    "Generic.Inserted": "inserted",
    "Generic.Deleted": "deleted",
    "Generic.Heading": "heading",
    "Generic.Subheading": "heading",
}
_DIFF = re.compile(r"diff --git |--- .*\n\+\+\+ |@@ -\d")
_MAX_LINE = 2000  # minified files: some lexers are quadratic in the line's length


@lru_cache(maxsize=512)
def _role(kind: _TokenType) -> str:
    """Return the palette's field for a token type, "" for plain text."""
    names = str(kind).split(".")[1:]  # Token.Name.Function
    while names:
        if role := _ROLES.get(".".join(names)):
            return role
        names.pop()
    return ""


@lru_cache(maxsize=64)
def find_lexer(language: str) -> Lexer | None:
    """Return the lexer for a fence's language, None if there is none."""
    from pygments.lexers import get_lexer_by_name  # not at start: it takes as long as all of this package
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language.lower(), stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


def _add(line: list[Run], text: str, style: Style) -> None:
    """Append a run, or extend the last one: fewer segments, and no character is separated from its modifiers."""
    if line and line[-1][1] == style:
        line[-1] = (line[-1][0] + text, style)
    else:
        line.append((text, style))


def highlight(code: str, language: str, palette: Palette) -> tuple[list[list[Run]], list[bool]]:
    """Return `code` as one list of runs per line, and for each line whether highlighting may start afresh after it.

    Never loses a character: where a lexer does, the code comes back plain.
    """
    style = palette.block
    if _DIFF.match(code) if not language else language.lower() in ("patch", "git"):
        language = "diff"
    lexer = find_lexer(language) if language else None
    if lexer is not None and all(len(line) < _MAX_LINE for line in code.split("\n")):
        lines: list[list[Run]] = [[]]
        safe: list[bool] = []
        size = 0
        for kind, value in lexer.get_tokens(code):
            size += len(value)
            role = "label" if language == "diff" and value.startswith(("--- ", "+++ ")) else _role(kind)
            run_style = style + getattr(palette, role) if role else style
            first, *others = value.split("\n")
            if first:
                _add(lines[-1], first, run_style)
            for other in others:
                # A line break inside a string or a comment: the next line is still part of it.
                safe.append(role not in ("string", "comment") or str(kind) == "Token.Comment.Single")
                lines.append([(other, run_style)] if other else [])
        if size == len(code) and "\n".join("".join(t for t, _ in line) for line in lines) == code:
            return lines, [*safe, False]
    plain = code.split("\n")
    return [[(line, style)] for line in plain], [True] * (len(plain) - 1) + [False]
