"""Tests text that is marked by who proposed it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style

from cpuchat.protocol.drafters import DRAFTERS
from cpuchat.tui.markdown.message_view import AGREES, OpenMessage, TranscriptMessage, View, legend, pieces
from cpuchat.tui.markdown.rows import LineStream, TextRow, TextStyles
from tests.tui.markdown.rendered import message_lines, streamed

PLAIN = TextStyles()
NAMES = ["", *(row.name for row in DRAFTERS)]
proposed = st.lists(st.tuples(st.text("ab \n\t日*#", max_size=12), st.sampled_from(NAMES)), max_size=12)


@given(proposed, st.integers(4, 20))
def test_no_character_is_lost_each_keeps_its_mark_and_a_stream_gives_what_the_whole_gives(
    parts: list[tuple[str, str]], width: int
) -> None:
    stream, whole = LineStream(width, PLAIN.of_drafter), LineStream(width, PLAIN.of_drafter)
    done: list[TextRow] = []
    tail: list[TextRow] = []
    for text, name in parts:
        whole.feed(text, name)
        stream.feed(text, name)
        final, tail = stream.update()
        done += final
    rows = [row for part in whole.update() for row in part]
    assert [row.text for row in done + tail] == [row.text for row in rows]
    assert all(cell_len(row.text) <= width for row in rows)
    shown = [(char, style) for row in rows for text, style in row.runs for char in text if not char.isspace()]
    assert shown == [(char, PLAIN.of_drafter(name)) for text, name in parts for char in text if not char.isspace()]


def test_marked_code_is_shown_as_code_from_its_first_line() -> None:
    parts = "So:\n``", "`py", "\nx =", " f(1)\n", "```", "\nDone"
    *_, rows = streamed(LineStream(30, PLAIN.of_drafter, PLAIN.rule), parts, "draft")
    assert [row.text for row in rows] == ["So:", "▎ py", "▎ x = f(1)", "Done"]


@given(proposed)
def test_what_was_streamed_is_finished_with_the_same_marks(parts: list[tuple[str, str]]) -> None:
    view = View(40, PLAIN, color_drafts=True)
    answer = OpenMessage("Model", view, drafted=True)
    for text, name in parts:
        answer.feed(text, drafter=name)
        answer.update()
    message = answer.finish("")
    assert message.content == "".join(text for text, _ in parts).lstrip("\n")
    marks = [name for text, name in pieces(message.content, message.spans) for _ in text]
    every = [name for text, name in parts for _ in text]
    assert marks == every[len(every) - len(marks) :]


def test_switching_in_the_middle_of_an_answer_shows_all_of_it() -> None:
    plain, colored = View(40, PLAIN), View(40, PLAIN, color_drafts=True)
    answer = OpenMessage("Model", plain, drafted=True)
    answer.feed("**own** ")
    answer.feed("and drafted", drafter="draft")
    answer.update()
    assert "own and drafted" in " ".join(line.text for line in answer.lines)
    answer.restyle(colored)
    assert "**own** and drafted" in " ".join(line.text for line in answer.lines)
    answer.feed(" more", drafter="suffix")
    answer.update()
    assert answer.message().spans == ((8, ""), (11, "draft"), (5, "suffix"))
    answer.restyle(plain)
    assert "own and drafted more" in " ".join(line.text for line in answer.lines)


@pytest.mark.parametrize("on", [False, True])
def test_the_legend_names_who_took_part_and_how_much_under_the_marked_text_only(on: bool) -> None:
    (row,) = legend(((25, ""), (75, "draft")), 80, PLAIN)
    assert row.text == "proposed by the model 25 %, draft 75 %"
    assert ("draft", Style()) in row.runs
    assert [r.text.strip() for r in legend((), 24, PLAIN)] == ["proposed by the model,", "draft, suffix"]
    message = TranscriptMessage("assistant", "Model", "**hello** there", note="2 tokens", spans=((9, ""), (6, "draft")))
    texts = [line.text.strip() for line in message_lines(message, View(60, PLAIN, color_drafts=on))]
    assert any(text.startswith("proposed by") for text in texts) == on
    assert texts.index("**hello** there" if on else "hello there") < texts.index("2 tokens")


def test_text_that_another_model_would_have_written_differently_is_marked() -> None:
    heat = ((4, AGREES), (4, "close"), (4, "matters"))
    (line,) = message_lines(TranscriptMessage("assistant", "", "one two six ", heat=heat), View(60, PLAIN))[:1]
    styles = {segment.text.strip(): segment.style for segment in line.segments}
    assert (styles["two"], styles["six"]) == (PLAIN.changed, PLAIN.parted) and styles["one"] == Style()
