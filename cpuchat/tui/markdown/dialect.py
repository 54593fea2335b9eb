"""Defines the Markdown dialect of a chat: CommonMark with GFM tables and strikethrough, changed so that no text gets
lost.

Against stock CommonMark:
- HTML is text (`vector<int>` stays), but for `<br>`, which breaks the line. Entities are decoded as usual (in code they
  stay), but for those of control characters.
- Link reference definitions are text: they would vanish, and would make a block depend on another one.
- Link targets are not percent-encoded.
- A table of over `MAX_COLUMNS` columns is text: each of its cells would be a line.
- A paragraph, heading or cell with over `MAX_MARKS` characters that may be markup is text: the inline rules look for
  the other end of each, and a screen must not wait for it (5,000 take 0.1 s).
- `$…$`, `$$…$$`, `\\(…\\)` and `\\[…\\]` are shown as they are: a backslash or underscore in a formula is no markup.
- Emphasis beside Chinese, Japanese or Korean text may begin and end at punctuation: these scripts have no spaces
  (`_Inline`).
- In a fence whose language is Markdown, a fence with a language nests: its end is not the end of the outer one. An
  outer one that is never closed ends as in CommonMark, unless `env["unfinished"]`: the rest has yet to come.
"""

from __future__ import annotations

import html
import re
from collections.abc import MutableMapping
from itertools import islice, takewhile
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.common.utils import isPunctChar
from markdown_it.rules_block import StateBlock, fence
from markdown_it.rules_block.table import table
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.rules_inline.state_inline import Scanned
from markdown_it.token import Token

from cpuchat.base.text import is_safe
from cpuchat.tui.markdown.fences import is_document, nesting

# A dollar formula touches its dollars, no digit follows it ("$5 and $10" are amounts of money), and it has no code.
_INLINE_MATH = re.compile(
    r"\$\$(?!\$).{1,999}?\$\$|\$(?![\s$])(?:[^$\n\\`]|\\.){1,999}?(?<![\s\\])\$(?![\d$])"
    r"|\\\(.{1,999}?\\\)|\\\[.{1,999}?\\\]",
    re.DOTALL,
)
ENTITY = re.compile(r"&(?:#[xX][0-9a-fA-F]{1,6}|#[0-9]{1,7}|[A-Za-z][A-Za-z0-9]{1,31});")
LINE_BREAK = re.compile(r"<br\s*/?>[ \t]*\n?[ \t]*", re.IGNORECASE)
MAX_MARKS = 5_000
MAX_COLUMNS = 100
_MARK = re.compile(r"[$*_~`\[\]<!\\&]")
_MATH_FENCE = {"$$": "$$", "\\[": "\\]"}
# Wide and half-width characters and Hangul, with the selectors of ideographs, without emoji: "CJK character" of the
# CommonMark CJK-friendly Amendments (github.com/tats-u/markdown-cjk-friendly, specification.md).
_CJK = re.compile(
    "[\u1100-\u11ff\u20a9\u2e80-\ua4cf\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\ufe10-\ufe1f\ufe30-\ufe6f\uff00-\uffef"
    "\U00016fe0-\U0001b2ff\U0001f200-\U0001f2ff\U00020000-\U0003ffff\U000e0100-\U000e01ef]"
)
_SELECTORS = "".join(map(chr, range(0xFE00, 0xFE0F)))  # not that of emoji


def build() -> MarkdownIt:
    # gfm-like without linkify: nothing here becomes a live link, and it takes file names (main.py) for hosts.
    md = MarkdownIt("gfm-like", {"html": False, "linkify": False}).disable(["reference", "linkify"])
    setattr(md, "normalizeLink", str)  # noqa: B010 (methods of this one parser, not of the class)
    setattr(md, "normalizeLinkText", str)  # noqa: B010
    setattr(md, "validateLink", lambda url: True)  # noqa: B010
    md.block.ruler.at("table", _table, {"alt": ["paragraph", "reference"]})
    md.block.ruler.at("fence", _fence, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    md.block.ruler.before("fence", "math_block", _math_block, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    md.core.ruler.at("inline", _inline)
    setattr(md.inline, "parse", _parse_inline)  # noqa: B010
    md.inline.ruler.at("entity", _entity)
    md.inline.ruler.before("autolink", "line_break", _line_break)
    md.inline.ruler.before("escape", "math_inline", _math_inline)
    # Plain text stops at characters that may begin markup; the dollar is not among them.
    md.inline.add_terminator_char("$")
    return md


def _inline(state: StateCore) -> None:
    for token in state.tokens:
        if token.type != "inline":
            continue
        token.children = children = []
        if sum(1 for _ in islice(_MARK.finditer(token.content), MAX_MARKS + 1)) <= MAX_MARKS:
            state.md.inline.parse(token.content, state.md, state.env, children)
            continue
        for number, line in enumerate(token.content.split("\n")):
            if number:
                children.append(Token("softbreak", "br", 0))
            children.append(Token("text", "", 0, content=line))


def _parse_inline(source: str, md: MarkdownIt, env: MutableMapping[str, Any], tokens: list[Token]) -> list[Token]:
    """Parse as `ParserInline.parse`, by our rule for emphasis."""
    state = _Inline(source, md, env, tokens)
    md.inline.tokenize(state)
    for rule in md.inline.ruler2.getRules(""):
        rule(state)
    return state.tokens


class _Inline(StateInline):
    def scanDelims(self, start: int, canSplitWord: bool) -> Scanned:
        """Return whether a run of marks can open or close: beside CJK text wherever there is no space.

        `_` cannot open in a word, nor close in one unless after punctuation: many names of files have it."""
        scanned = super().scanDelims(start, canSplitWord)
        end = start + scanned.length
        before = self.src[max(0, start - 2) : start].rstrip(_SELECTORS)[-1:]
        after = self.src[end : min(end + 1, self.posMax)]
        if not (_CJK.match(before) or _CJK.match(after)):
            return scanned
        left, right = bool(after.strip()), bool(before.strip())  # -flanking
        return Scanned(
            left and (canSplitWord or not right or isPunctChar(before)),
            right and (canSplitWord or not left or isPunctChar(before) or isPunctChar(after)),
            scanned.length,
        )


def _fence(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    if not fence(state, start_line, end_line, silent):
        return False
    if silent or not is_document((token := state.tokens[-1]).info):
        return True
    own = takewhile(  # a line of text further left ends the list that the fence is in
        lambda line: state.isEmpty(line) or state.sCount[line] >= state.blkIndent, range(start_line + 1, end_line)
    )
    lines = (state.getLines(line, line + 1, state.blkIndent, False) for line in own)
    close = next((line for line, depth in enumerate(nesting(lines, token.markup), start_line + 1) if depth < 0), None)
    if close is None and not state.env.get("unfinished"):
        return True
    last, state.line = (end_line, end_line) if close is None else (close, close + 1)
    token.content = state.getLines(start_line + 1, last, state.sCount[start_line], True)
    token.map = [start_line, state.line]
    return True


def _table(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    n_cells = state.src.count("|", state.bMarks[start_line], state.eMarks[start_line])
    return n_cells <= MAX_COLUMNS + 1 and table(state, start_line, end_line, silent)


def _math_block(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    if state.is_code_block(start_line):
        return False
    start = state.bMarks[start_line] + state.tShift[start_line]
    first = state.src[start : state.eMarks[start_line]].rstrip()
    closer = _MATH_FENCE.get(first[:2])
    if closer is None:
        return False
    if len(first) > 2 and (silent or closer in first[2:]):
        return False  # "$$x" does not end a paragraph; what closes on its line is the inline rule's business
    for line in range(start_line + 1, end_line):
        content = state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]].rstrip()
        if state.sCount[line] < state.blkIndent and content:
            return False
        if content.endswith(closer):
            break
    else:
        return False
    if silent:
        return True
    token = state.push("math_block", "math", 0)
    token.content = state.getLines(start_line, line + 1, state.sCount[start_line], False).rstrip("\n")
    token.map = [start_line, line + 1]
    state.line = line + 1
    return True


def _entity(state: StateInline, silent: bool) -> bool:
    match = ENTITY.match(state.src, state.pos, state.posMax)
    if match is None or (decoded := html.unescape(match[0])) in (match[0], "") or not is_safe((decoded,)):
        return False
    if not silent:
        state.pending += decoded
    state.pos = match.end()
    return True


def _line_break(state: StateInline, silent: bool) -> bool:
    match = LINE_BREAK.match(state.src, state.pos, state.posMax)
    if match is None:
        return False
    if not silent:
        state.pending = state.pending.rstrip(" ")
        state.push("hardbreak", "br", 0)
    state.pos = match.end()
    return True


def _math_inline(state: StateInline, silent: bool) -> bool:
    match = _INLINE_MATH.match(state.src, state.pos, state.posMax)
    if match is None:
        return False
    if not silent:
        state.push("math_inline", "math", 0).content = match[0]
    state.pos = match.end()
    return True
