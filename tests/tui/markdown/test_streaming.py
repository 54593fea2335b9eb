"""Tests Markdown that arrives in parts."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuchat.base.text import clean
from cpuchat.tui.markdown.render import missing, render
from cpuchat.tui.markdown.rows import TextRow, TextStyles
from cpuchat.tui.markdown.streaming import LONG_BLOCK, Stream, commit_point
from tests.tui.markdown.rendered import chunks, streamed
from tests.tui.markdown.test_markdown import SOURCES

PALETTE = TextStyles()


def stream_all(source: str, cuts: list[int]) -> str:
    edges = [0, *sorted(min(cut, len(source)) for cut in cuts), len(source)]
    *_, rows = streamed(Stream(40, PALETTE), (source[a:b] for a, b in itertools.pairwise(edges)))
    return "".join(row.text for row in rows)


@settings(max_examples=30, deadline=None)
@given(SOURCES, st.lists(st.integers(0, 200), max_size=12))
def test_streaming_in_any_cutting_shows_every_word(source: str, cuts: list[int]) -> None:
    source = clean(source) + "\n\nend"  # a last line of markup alone is held back until it is decided
    shown = stream_all(source, cuts)
    assert not Counter(re.findall("word", source)) - Counter(re.findall("word", re.sub(r"[^\w]", "", shown)))


def test_streaming_commits_blocks_once() -> None:
    stream = Stream(40, PALETTE)
    stream.feed("# Title\n\nfirst paragraph\n\nsecond **par")
    final, tail = stream.update()
    assert [row.text for row in final] == ["Title", "first paragraph"]
    assert [row.text for row in tail] == ["", "second par"]
    assert tail[1].runs[-1][1].bold
    stream.feed("agraph**\n")
    final, tail = stream.update()
    assert (final, [row.text for row in tail]) == ([], ["", "second paragraph"])


def test_an_undecided_line_waits() -> None:
    stream = Stream(40, PALETTE)
    stream.feed("text\n--")
    assert [row.text for row in stream.update()[1]] == ["text"]
    stream.feed("> arrow")
    assert [row.text for row in stream.update()[1]] == ["text", "--> arrow"]


@pytest.mark.parametrize(
    "source",
    [
        "```python\n" + "value = compute(1, 'text')  # note\n" * 120,
        "```text\n" + "just a line of text\n" * 120 + "```\nafter",
        "- an item of some length, with words\n" * 120,
        "| name | value |\n|---|---:|\n" + "| something | 1234 |\n" * 120,
        '```python\ns = """\n' + "inside a string\n" * 120,
    ],
    ids=["python", "text", "list", "table", "string"],
)
def test_long_blocks_are_committed_in_parts(source: str) -> None:
    stream = Stream(60, PALETTE)
    *_, rows = streamed(stream, chunks(source, 50))
    assert not missing(source, rows)
    assert [row.text for row in rows] == [row.text for row in render(source, 60, PALETTE)]
    if '"""' not in source:
        assert sum(len(row.text) for row in stream.update()[1]) < 2 * LONG_BLOCK


@pytest.mark.parametrize(("n_parts", "step"), [(1, 1), (3, 7), (60, 50)])
def test_a_fenced_document_is_one_block_while_it_is_written(n_parts: int, step: int) -> None:
    part = "```python\n" + "value = 1\n" * 3 + "```\n\nText with **marks**.\n\n"
    document = f"```markdown\n# Title\n\n{part * n_parts}```"
    source = f"{document}\n\n**注意：**after"
    rows: list[TextRow] = []
    for number, rows in enumerate(streamed(Stream(60, PALETTE), chunks(source, step)), 1):
        assert number * step >= len(document) or all(row.text.startswith("▎") for row in rows)
    assert [row.text for row in rows] == [row.text for row in render(source, 60, PALETTE)]


@pytest.mark.parametrize(
    ("tail", "start"),
    [("one", 0), ("one\n\ntwo", 5), ("one\n\n- a\n- b", 5), ("```\na\n\nb", 0), ("# h\ntext", 4), ("", 0)],
)
def test_commit_point(tail: str, start: int) -> None:
    assert commit_point(tail) == start
