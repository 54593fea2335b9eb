"""Tests text that is marked by who proposed it."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style

from cpuchat.protocol.drafters import DRAFTERS
from cpuchat.tui.markdown.message_view import (
    DraftedStream,
    OpenMessage,
    SpanList,
    TranscriptMessage,
    View,
    drafted_rows,
    legend,
    message_lines,
    pieces,
)
from cpuchat.tui.markdown.render import render
from cpuchat.tui.markdown.rows import TextRow, TextStyles

PLAIN = TextStyles()
NAMES = ["", *(row.name for row in DRAFTERS)]
proposed = st.lists(st.tuples(st.text("ab \n\t日*#", max_size=12), st.sampled_from(NAMES)), max_size=12)


def joined(rows: list[TextRow]) -> str:
    """Return the text as it was before it was wrapped."""
    return "".join((row.joint if number else "") + row.text for number, row in enumerate(rows))


def test_neighbours_of_one_drafter_become_one_span() -> None:
    spans = SpanList()
    for length, name in [(3, ""), (2, "draft"), (0, "lookup"), (4, "draft"), (1, "")]:
        spans.add(length, name)
    assert spans.spans() == ((3, ""), (6, "draft"), (1, ""))


def streamed(parts: list[tuple[str, str]], width: int) -> list[TextRow]:
    """Return the rows of an answer that comes at once."""
    stream = DraftedStream(width, PLAIN)
    for text, name in parts:
        stream.feed(text, name)
    final, tail = stream.update()
    return final + tail


@given(proposed)
def test_no_character_is_lost_and_each_keeps_its_mark(parts: list[tuple[str, str]]) -> None:
    rows = streamed(parts, 500)
    shown = [(char, style) for row in rows for text, style in row.runs for char in text if not char.isspace()]
    wanted = [(char, PLAIN.of_drafter(name)) for text, name in parts for char in text if not char.isspace()]
    assert shown == wanted


@given(proposed, st.integers(4, 20))
def test_a_stream_gives_what_the_whole_gives(parts: list[tuple[str, str]], width: int) -> None:
    stream = DraftedStream(width, PLAIN)
    done: list[TextRow] = []
    tail: list[TextRow] = []
    for text, name in parts:
        stream.feed(text, name)
        final, tail = stream.update()
        done += final
    whole = streamed(parts, width)
    assert [row.text for row in done + tail] == [row.text for row in whole]
    assert all(cell_len(row.text) <= width for row in whole)


@given(proposed)
def test_what_was_streamed_is_finished_with_the_same_marks(parts: list[tuple[str, str]]) -> None:
    view = View(40, PLAIN, color_drafts=True)
    answer = OpenMessage("Model", view, drafted=True)
    for text, name in parts:
        answer.feed(text, drafter=name)
        answer.update()
    message = answer.finish("")
    assert sum(length for length, _ in message.spans) == len(message.content)
    assert message.content == "".join(text for text, _ in parts).lstrip("\n")
    marks = [name for text, name in pieces(message.content, message.spans) for _ in text]
    every = [name for text, name in parts for _ in text]
    assert marks == every[len(every) - len(marks) :]


PARTS = [
    ("## Lists\n\n- **alpha** ", ""), ("beta_gamma [delta](https://epsilon.example/zeta) eta\n- `theta` ", "draft"),
    ("\u03b9ota\n\n```python\nkappa(1, 2)\n", "lookup"), ("```\n\n| lambda | mu |\n|---|---|\n| nu | ", "suffix"),
    ("xi |\n\n$\\pi_1$ rho \\* sigma_tau", ""),
]  # fmt: skip


def test_a_finished_answer_is_rendered_with_each_word_as_it_was_proposed() -> None:
    spans = SpanList()
    for text, name in PARTS:
        spans.add(len(text), name)
    whole = "".join(text for text, _ in PARTS)
    rows = drafted_rows(whole, spans.spans(), 60, PLAIN)
    assert [row.text for row in rows] == [row.text for row in render(whole, 60, PLAIN)]
    styles: dict[str, set[Style]] = {}
    for row in rows:
        for text, style in row.runs:
            for word in re.findall(r"[^\W_]+", text):
                styles.setdefault(word, set()).add(style)
    proposed_by = {
        "": ["Lists", "alpha", "xi", "rho", "sigma", "tau"], "draft": ["beta", "gamma", "delta", "eta", "theta"],
        "lookup": ["ιota", "kappa"], "suffix": ["lambda", "mu", "nu"],
    }  # fmt: skip
    for name, words in proposed_by.items():
        for word in words:
            assert styles[word] == {PLAIN.of_drafter(name)}, word


@given(proposed, st.integers(4, 60))
def test_a_finished_answer_has_all_that_its_markdown_has(parts: list[tuple[str, str]], width: int) -> None:
    spans = SpanList()
    for text, name in parts:
        spans.add(len(text), name)
    whole = "".join(text for text, _ in parts)
    rows = drafted_rows(whole, spans.spans(), width, PLAIN)
    assert [row.text for row in rows] == [row.text for row in render(whole, width, PLAIN)]


def test_switching_in_the_middle_of_an_answer_shows_all_of_it() -> None:
    plain, colored = View(40, PLAIN), View(40, PLAIN, color_drafts=True)
    answer = OpenMessage("Model", plain, drafted=True)
    answer.feed("**own** ")
    answer.feed("and drafted", drafter="draft")
    answer.update()
    assert "own and drafted" in " ".join(line.text for line in answer.lines)
    answer.restyle(colored)
    assert "**own** and drafted" in " ".join(line.text for line in answer.lines)
    answer.feed(" more", drafter="lookup")
    answer.update()
    assert answer.message().spans == ((8, ""), (11, "draft"), (5, "lookup"))
    answer.restyle(plain)
    assert "own and drafted more" in " ".join(line.text for line in answer.lines)
    finished = message_lines(answer.finish(""), colored)
    assert "own and drafted more" in " ".join(line.text for line in finished)


def test_an_answer_without_drafters_stays_markdown() -> None:
    view = View(40, PLAIN, color_drafts=True)
    answer = OpenMessage("Model", view)
    answer.feed("**bold**")
    message = answer.finish("")
    assert message.spans == ()
    assert any(line.text.strip() == "bold" for line in message_lines(message, view))


def test_drafters_differ_without_colours() -> None:
    styles = [PLAIN.of_drafter(name) for name in NAMES]
    assert all(a != b for a, b in itertools.combinations(styles, 2))
    assert all(style.color is None for style in styles)


def test_the_legend_names_who_took_part_and_how_much() -> None:
    (row,) = legend(((25, ""), (75, "draft")), 80, PLAIN)
    assert row.text == "proposed by the model 25 %, draft 75 %"
    assert ("draft", Style()) in row.runs
    (every,) = legend((), 80, PLAIN)
    assert [r.text.strip() for r in legend((), 24, PLAIN)] == ["proposed by the model,", "draft, lookup, suffix"]
    assert every.text == "proposed by the model, draft, lookup, suffix"


@pytest.mark.parametrize("on", [False, True])
def test_the_legend_stands_under_the_marked_text_only(on: bool) -> None:
    message = TranscriptMessage("assistant", "Model", "hello there", note="2 tokens", spans=((5, ""), (6, "draft")))
    texts = [line.text.strip() for line in message_lines(message, View(60, PLAIN, color_drafts=on))]
    assert any(text.startswith("proposed by") for text in texts) == on
    assert texts.index("hello there") < texts.index("2 tokens")
