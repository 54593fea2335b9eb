"""Loads the Markdown parser with the first text: importing it would delay the first paint."""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token


@cache
def _parser() -> MarkdownIt:
    from cpuchat.tui.markdown import dialect

    return dialect.build()


def warm_up() -> None:
    """Load the parser and Pygments in a thread, in about 0.1 s."""

    def load() -> None:
        from cpuchat.tui.markdown.highlight import find_lexer

        parse("")
        find_lexer("python")

    threading.Thread(target=load, name="markdown", daemon=True).start()


def parse(text: str) -> list[Token]:
    """Parse `text`, which must be cleaned."""
    return _parser().parse(text)


def parse_blocks(text: str) -> list[Token]:
    """Parse `text` into blocks only: inline tokens have no children. Takes half of the time."""
    parser, tokens = _parser(), []
    parser.block.parse(text, parser, {}, tokens)
    return tokens


def parse_inline(text: str) -> list[Token]:
    """Parse the text of one paragraph."""
    return _parser().parseInline(text)[0].children or []
