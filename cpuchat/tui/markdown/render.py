"""Renders Markdown as rows of styled text: parsing, highlighted code, tables, and everything else.

Nothing that a model writes may get lost. What vanishes is markup only: the characters of `#`, `*`, `_`, `~`,
backticks, `>`, list bullets (drawn as •), table pipes and their delimiter row, brackets around
links, escaping backslashes, `<br>`, blanks that CommonMark ignores, and a link's target that is its text; entities
become their characters. Every other letter and digit of the source is in the rendered text: `render` counts them, and
shows a block's source as it is if one is missing.

The parser and Pygments are loaded with the first text: importing them would delay the first paint.
"""

from __future__ import annotations

import html
import re
import threading
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.style import Style

from cpuchat.base.text import expand_tabs
from cpuchat.tui.markdown.fences import language_of
from cpuchat.tui.markdown.rows import WORD, CodeBlock, Run, TextRow, TextStyles, barred, plain_rows, prefix, wrap

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token
    from pygments.lexer import Lexer
    from pygments.token import _TokenType


_ROLES = {
    kind: role
    for role, kinds in {
        "comment": "Comment Literal.String.Doc",
        "keyword": "Comment.Preproc Keyword Operator.Word Name.Tag",
        "type": "Keyword.Type Name.Class Name.Builtin Name.Exception",
        "number": "Keyword.Constant Literal.Number",
        "string": "Literal.String",
        "name": "Name.Function Name.Namespace Name.Decorator Name.Attribute",
        "inserted": "Generic.Inserted",
        "deleted": "Generic.Deleted",
        "heading": "Generic.Heading Generic.Subheading",
    }.items()
    for kind in kinds.split()
}
"""Fields of the palette by Pygments' kinds of tokens; the nearest ancestor counts."""
_DIFF = re.compile(r"diff --git |--- .*\n\+\+\+ |@@ -\d")
_MAX_LINE = 2000  # minified files: some lexers are quadratic in the line's length


@lru_cache(maxsize=512)
def _role(kind: _TokenType) -> str:
    """Return the palette's field for a token type such as `Token.Name.Function`, "" for plain text."""
    names = (str(one).removeprefix("Token.") for one in reversed(kind.split()))
    return next((_ROLES[name] for name in names if name in _ROLES), "")


@lru_cache(maxsize=64)
def find_lexer(language: str) -> Lexer | None:
    from pygments.lexers import get_lexer_by_name  # not at start: it takes as long as all of this package
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language.lower(), stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


def highlight(code: str, language: str, palette: TextStyles) -> tuple[list[list[Run]], list[bool]]:
    """Return `code` as one list of runs per line, and for each line whether highlighting may start afresh after it.

    Never loses a character: where a lexer does, the code comes back plain."""
    style = palette.block
    if _DIFF.match(code) if not language else language.lower() in ("patch", "git"):
        language = "diff"
    lexer = find_lexer(language) if language else None
    if lexer is not None and all(len(line) < _MAX_LINE for line in code.split("\n")):
        lines: list[list[Run]] = [[]]
        safe: list[bool] = []
        for kind, value in lexer.get_tokens(code):
            role = "label" if language == "diff" and value.startswith(("--- ", "+++ ")) else _role(kind)
            run_style = style + getattr(palette, role) if role else style
            first, *others = value.split("\n")
            if first and lines[-1] and lines[-1][-1][1] == run_style:  # no character is separated from its modifiers
                lines[-1][-1] = (lines[-1][-1][0] + first, run_style)
            elif first:
                lines[-1].append((first, run_style))
            for other in others:
                # A line break inside a string or a comment: the next line is still part of it.
                safe.append(role not in ("string", "comment") or str(kind) == "Token.Comment.Single")
                lines.append([(other, run_style)] if other else [])
        if "\n".join("".join(t for t, _ in line) for line in lines) == code:
            return lines, [*safe, False]
    plain = code.split("\n")
    return [[(line, style)] for line in plain], [True] * (len(plain) - 1) + [False]


Cell = list[list[Run]]  # lines, of which there are several where it holds `<br>`
_MIN_COLUMN = 6
_WHOLE = (20, 12)
"""Cells of words that do not break in a table: of the most that there is room for. Numbers never do."""
_NUMBER = re.compile(r"[^\w\s]{0,2}\d[\d.,:_/-]{0,20}[^\d\s]{0,5}")
_BETWEEN = 3  # " │ "


def _size(line: list[Run]) -> int:
    return sum(cell_len(text) for text, _ in line)


def column_widths(lines: Sequence[Sequence[Cell]], width: int) -> list[int] | None:
    """Return the width of each column of these lines in cells, None when they would be too narrow to read."""
    columns = [[line for cell in column for line in cell] for column in zip(*lines, strict=False)]
    natural = [max([1, *map(_size, column)]) for column in columns]
    room = width - _BETWEEN * (len(natural) - 1) - 2
    if sum(natural) <= room:
        return natural
    texts = ["\n".join("".join(text for text, _ in line) for line in column) for column in columns]
    words = [[found[0].strip() for found in WORD.finditer(text)] for text in texts]
    for longest in _WHOLE:
        kept = [[cell_len(one) for one in some if len(one) <= longest or _NUMBER.fullmatch(one)] for some in words]
        widths = [max([min(size, _MIN_COLUMN), *sizes]) for sizes, size in zip(kept, natural, strict=True)]
        if (spare := room - sum(widths)) >= 0:
            break
    else:
        return None
    for left, column in enumerate(sorted(range(len(natural)), key=lambda at: natural[at] - widths[at])):
        # What is left of the room goes to all alike, up to what they need.
        more = min(natural[column] - widths[column], spare // (len(natural) - left))
        widths[column] += more
        spare -= more
    return widths


def _table_row(cells: Sequence[Cell], widths: list[int], aligns: list[str], palette: TextStyles) -> list[TextRow]:
    columns = [
        [row for line in cell for row in wrap(TextRow(list(line)), size)]
        for cell, size in zip(cells, widths, strict=False)
    ]
    rows: list[TextRow] = []
    for line in zip_longest(*columns, fillvalue=TextRow()):
        runs: list[Run] = [(" ", palette.rule)]
        for index, (cell, size) in enumerate(zip(line, widths, strict=False)):
            if index:
                runs.append((" │ ", palette.rule))
            free = size - _size(cell.runs)
            before = {"right": free, "center": free // 2}.get(aligns[index], 0)
            space = (" " * before, palette.rule), (" " * (free - before), palette.rule)
            runs += [run for run in (space[0], *cell.runs, space[1]) if run[0]]
        rows.append(TextRow(runs))
    return rows


def _narrow_row(cells: Sequence[Cell], width: int, palette: TextStyles) -> list[TextRow]:
    """Render the cells of a line one after the other, for any width."""
    runs: list[Run] = []
    for line in (line for cell in cells for line in cell):
        runs += [*([(" │ ", palette.rule)] if runs else []), *line]
    return wrap(TextRow(runs), width)


@cache
def _parser() -> MarkdownIt:
    from cpuchat.tui.markdown import dialect

    return dialect.build()


def warm_up() -> None:
    """Load the parser and Pygments in a thread, in about 0.1 s."""

    def load() -> None:
        parse("")
        find_lexer("python")

    threading.Thread(target=load, name="markdown", daemon=True).start()


def parse(text: str, *, unfinished: bool = False) -> list[Token]:
    """Parse `text`, which must be cleaned; `unfinished`: more of it is to come."""
    return _parser().parse(text, {"unfinished": unfinished})


def parse_blocks(text: str, *, unfinished: bool = False) -> list[Token]:
    """Parse `text` into blocks only: inline tokens have no children. Takes half of the time."""
    parser, tokens = _parser(), []
    parser.block.parse(text, parser, {"unfinished": unfinished}, tokens)
    return tokens


def parse_inline(text: str) -> list[Token]:
    return _parser().parseInline(text)[0].children or []


MAX = 16_000
"""Maximum characters to render at once, longer texts are shown as plain text: rendering takes 1 to 20 µs per character,
and the screen waits for it. `message_view.Rendering` renders longer messages in steps.
"""
_BULLETS = "•◦▪"
_MARKUP = re.compile(r"&#?\w{1,32};|<br\s*/?>", re.IGNORECASE)  # letters that become something else


def render(source: str, width: int, palette: TextStyles) -> list[TextRow]:
    """Return the rows of a whole message. `source` has been cleaned (`base.text.clean`).

    Every top-level block whose letters and digits are not all in its rows (or that nests too deep to be rendered)
    comes out as plain text; so does a message of over `MAX` characters."""
    if len(source) > MAX:
        return plain_rows(source, width, Style())
    try:
        tokens = parse(source)
    except RecursionError:
        return plain_rows(source, width, Style())
    lines = source.split("\n")
    renderer = Renderer(width, palette)
    rows: list[TextRow] = []
    last_heading = False
    end = 0
    for block in top_blocks(tokens):
        first, after = block[0].map or (end, end)
        text = "\n".join(lines[end:after])  # with what a block in front of it may have left over
        try:
            new = renderer.rows(block)
            complete = not missing(text, [*new, TextRow([(renderer.shown_twice, Style())])])
        except RecursionError:
            new, complete = [], False
        if not complete:
            new = plain_rows("\n".join(lines[end if first > end else first : after]).strip("\n"), width, Style())
        if rows and new and not last_heading:
            rows.append(TextRow())
        rows += new
        last_heading = block[0].type == "heading_open"
        end = after
    rest = "\n".join(lines[end:])
    if rest.strip() and missing(rest, []):
        rows += plain_rows(rest, width, Style())
    return rows


def missing(source: str, rows: Sequence[TextRow]) -> Counter[str]:
    """Return letters and digits that are more frequent in `source` than in `rows`."""
    lost = Counter(_MARKUP.sub(lambda match: html.unescape(match[0]) if match[0][0] == "&" else "", source))
    lost.subtract("".join([row.text for row in rows]))
    return Counter({char: count for char, count in lost.items() if count > 0 and char.isalnum()})


def top_blocks(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    blocks: list[Sequence[Token]] = []
    start = 0
    for index, token in enumerate(tokens):
        if token.level == 0 and token.nesting <= 0:
            blocks.append(tokens[start : index + 1])
            start = index + 1
    return blocks


def code_blocks(source: str) -> list[CodeBlock]:
    """Return the code blocks of `source`, those inside lists and quotes too."""
    return [
        CodeBlock(token.content.rstrip("\n"), language_of(token.info))
        for token in parse_blocks(source)
        if token.type in ("fence", "code_block")
    ]


class Renderer:
    """Renders tokens for one width and palette.

    `continued` leaves out the head of the first block (a code block's label, a table's header): streaming shows a
    long block in parts. `table_widths` are then the columns of the part before."""

    def __init__(self, width: int, palette: TextStyles) -> None:
        self.width = max(8, width)
        self.palette = palette
        self.continued = False
        self.table_widths: list[int] | None = None
        self.shown_twice = ""  # of the last block: link targets that are the link's text

    def rows(self, tokens: Sequence[Token]) -> list[TextRow]:
        self.shown_twice = ""
        return self._blocks(tokens, self.width, Style(), 0)

    def _blocks(self, tokens: Sequence[Token], width: int, style: Style, depth: int) -> list[TextRow]:
        rows: list[TextRow] = []
        index = 0
        joined = True  # no blank line before the next block
        while index < len(tokens):
            token = tokens[index]
            close = _close_of(tokens, index) if token.nesting == 1 else index
            new = self._block(token, tokens[index + 1 : close], max(4, width), style, depth)
            if rows and new and not (joined or token.hidden):
                rows.append(TextRow())
            rows += new
            # Tight list items and headings stand directly above what follows.
            joined = token.hidden or token.type == "heading_open"
            index = close + 1
        return rows

    def _block(self, token: Token, inner: Sequence[Token], width: int, style: Style, depth: int) -> list[TextRow]:
        palette = self.palette
        match token.type:
            case "paragraph_open":
                return self._paragraph(inner, width, style)
            case "heading_open":
                level = int(token.tag[1])
                heading = palette.title if level == 1 else palette.heading if level == 2 else palette.head
                if level <= 2:
                    return self._paragraph(inner, width, style + heading)
                # The deeper ones differ by their marks: nothing else shows on every terminal.
                marks = "#" * level + " "
                rows = self._paragraph(inner, width - len(marks), style + heading)
                return prefix(rows, (marks, palette.dim), (" " * len(marks), palette.dim))
            case "fence" | "code_block":
                return self._code(token, width)
            case "bullet_list_open" | "ordered_list_open":
                return self._list(inner, width, style, depth)
            case "blockquote_open":
                bar = ("│ ", palette.rule)
                return prefix(self._blocks(inner, width - 2, style + palette.quote, depth), bar, bar)
            case "table_open":
                return self._table(inner, width, style)
            case "hr":
                return [TextRow([("─" * width, palette.rule)])]
            case "math_block":
                return plain_rows(token.content, width, style + palette.math)
            case _:  # no rule of ours makes other blocks; text is text
                return plain_rows(token.content.rstrip("\n"), width, style) if token.content else []

    def _paragraph(self, inner: Sequence[Token], width: int, style: Style) -> list[TextRow]:
        rows: list[TextRow] = []
        for token in inner:
            for line in self.inline(token.children or [], style):
                rows += wrap(TextRow(line), width)
        return rows

    def _list(self, inner: Sequence[Token], width: int, style: Style, depth: int) -> list[TextRow]:
        rows: list[TextRow] = []
        paragraphs = (token for token in inner if token.type == "paragraph_open" and not token.hidden)
        loose = any(token.level == inner[0].level + 1 for token in paragraphs)
        start = 0
        while start < len(inner):
            item = inner[start]
            close = _close_of(inner, start)
            # The number as it was written: renumbering would change what the answer says.
            marker = f"{item.info}{item.markup} " if item.info else _BULLETS[min(depth, 2)] + " "
            content = self._blocks(inner[start + 1 : close], width - len(marker), style, depth + 1) or [TextRow()]
            if rows and loose:
                rows.append(TextRow())
            rows += prefix(content, (marker, self.palette.bullet), (" " * len(marker), style))
            start = close + 1
        return rows

    def _code(self, token: Token, width: int) -> list[TextRow]:
        palette = self.palette
        label = token.info.strip() if token.type == "fence" else ""
        bar = palette.block + palette.rule
        rows: list[TextRow] = []
        if label and not self.continued:
            for part in wrap(TextRow([(label, palette.block + palette.label)]), width - 3):
                part.fill = palette.block
                rows += prefix([part], ("▎ ", bar), ("▎ ", bar))
        code = "\n".join(expand_tabs(line) for line in token.content.removesuffix("\n").split("\n"))
        for runs in highlight(code, language_of(label), palette)[0]:
            rows += barred(wrap(TextRow(runs, bare=True, fill=palette.block), width - 3), bar)
        return rows

    def _table(self, inner: Sequence[Token], width: int, style: Style) -> list[TextRow]:
        lines: list[list[Cell]] = []
        aligns: list[str] = []
        head = False
        for token in inner:
            if token.type == "tr_open":
                lines.append([])
            elif token.type in ("th_open", "td_open"):
                head = token.type == "th_open"
                if head:
                    aligns.append(str(token.attrs.get("style", "")).removeprefix("text-align:"))
            elif token.type == "inline":
                cell_style = style + self.palette.head if head else style
                lines[-1].append(self.inline(token.children or [], cell_style))
        fixed = self.table_widths if self.continued else None
        widths = self.table_widths = fixed or column_widths(lines, width)
        if widths is None:
            return [row for cells in lines for row in _narrow_row(cells, width, self.palette)]
        drawn = [_table_row(cells, widths, aligns, self.palette) for cells in lines]
        bars = "─┼─".join("─" * size for size in widths)
        head_rows = [] if fixed else [*drawn[0], TextRow([(f"─{bars}─", self.palette.rule)])]
        return [*head_rows, *(row for rows in drawn[1:] for row in rows)]

    def inline(self, children: Sequence[Token], style: Style) -> list[list[Run]]:
        """Return the styled runs of a paragraph, one list per line."""
        palette = self.palette
        lines: list[list[Run]] = [[]]
        styles = [style]
        links: list[tuple[str, str, int, int]] = []  # target, title, line and run where its text began
        for index, token in enumerate(children):
            current = styles[-1]
            match token.type:
                case "softbreak" | "hardbreak":
                    lines.append([])
                case "code_inline":
                    lines[-1].append((expand_tabs(token.content), current + palette.code))
                case "math_inline":
                    first, *others = token.content.split("\n")
                    lines[-1].append((first, current + palette.math))
                    lines += [[(other, current + palette.math)] for other in others]
                case "strong_open" | "em_open" | "s_open":
                    kind = {"strong_open": "strong", "em_open": "emphasis", "s_open": "strike"}[token.type]
                    styles.append(current + getattr(palette, kind))
                    if _dunder(children, index):
                        lines[-1].append(("__", styles[-1]))
                case "strong_close" | "em_close" | "s_close":
                    if _dunder(children, index - 2):
                        lines[-1].append(("__", current))
                    styles.pop()
                case "link_open":
                    target, title = str(token.attrs.get("href", "")), str(token.attrs.get("title", ""))
                    links.append((target, title, len(lines) - 1, len(lines[-1])))
                    styles.append(current + palette.link)
                case "link_close":
                    styles.pop()
                    target, title, line, run = links.pop()
                    label = "".join(t for n in range(line, len(lines)) for t, _ in lines[n][run if n == line else 0 :])
                    self._target(lines[-1], label, target, title, styles[-1])
                case "image":
                    lines[-1].append(("[image: ", current + palette.dim))
                    alt, *more = self.inline(token.children or [], current)
                    lines[-1] += alt
                    lines += more
                    lines[-1].append(("]", current + palette.dim))
                    target, title = str(token.attrs.get("src", "")), str(token.attrs.get("title", ""))
                    self._target(lines[-1], "", target, title, current)
                case _ if token.content:
                    lines[-1].append((expand_tabs(token.content), current))
        return lines

    def _target(self, line: list[Run], label: str, target: str, title: str, style: Style) -> None:
        """Show the target of a link as text: a hidden target from a model is not trustworthy."""
        shown = target
        if target in (label, f"mailto:{label}"):
            self.shown_twice += target
            shown = ""
        if title:
            shown = f'{shown} "{title}"'.strip()
        if shown:
            line.append((f" ({shown})" if label or line else f"({shown})", style + self.palette.dim))


def _close_of(tokens: Sequence[Token], index: int) -> int:
    level = tokens[index].level
    return next(at for at in range(index + 1, len(tokens)) if tokens[at].level == level and tokens[at].nesting == -1)


def _dunder(children: Sequence[Token], index: int) -> bool:
    """Return whether `__name__` is at `index`: more likely an identifier than emphasis."""
    if index < 0 or index + 2 >= len(children):
        return False
    opening, word, closing = children[index : index + 3]
    return opening.type == "strong_open" and opening.markup == "__" and closing.type == "strong_close" and (
        word.type == "text" and word.content.isidentifier()
    )  # fmt: skip
