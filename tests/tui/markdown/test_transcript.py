"""Tests the transcript: following, folding, selecting, copying, and what it shows while an answer is written."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from textual import events
from textual.pilot import Pilot

from cpuchat.base.text import is_safe
from cpuchat.protocol.messages import Channel
from cpuchat.tui.markdown.message_view import OpenMessage, View
from cpuchat.tui.markdown.rows import TextStyles
from cpuchat.tui.markdown.transcript import Transcript, TranscriptMessage
from tests.support.snapshots import HostApp, snapshot
from tests.tui.markdown.rendered import message_lines

HANG_GUARD = 180


def said(text: str) -> TranscriptMessage:
    return TranscriptMessage("user", "You", text)


def answered(text: str, reasoning: str = "", note: str = "") -> TranscriptMessage:
    return TranscriptMessage("assistant", "Model", text, reasoning, note)


@contextlib.asynccontextmanager
async def hosted(width: int, height: int, theme: str = "textual-dark") -> AsyncIterator[tuple[Transcript, Pilot[Any]]]:
    """Show an empty transcript on a terminal of that size."""
    transcript = Transcript()
    async with HostApp(transcript, theme=theme).run_test(size=(width, height)) as pilot:
        await pilot.pause()
        yield transcript, pilot


def shown(transcript: Transcript) -> list[str]:
    """Return the visible rows."""
    return [transcript.render_line(y).text.rstrip() for y in range(transcript.size.height)]


def everything(transcript: Transcript) -> str:
    return "\n".join(line.text.rstrip() for line in transcript.lines)


async def until(pilot: Pilot[Any], condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_GUARD):
        while not condition():
            await pilot.pause()


async def show(pilot: Pilot[Any], transcript: Transcript, messages: list[Any]) -> None:
    """Show these messages, and wait until all of them are rendered."""
    transcript.set_messages(messages)
    await until(pilot, lambda: transcript.up_to_date)


def write(transcript: Transcript, text: str, channel: Channel = "answer") -> None:
    """Add to the answer, and draw it."""
    transcript.append(text, channel)
    transcript.flush()


LONG = [message for n in range(40) for message in (said(f"question {n}"), answered(f"answer {n}\n\n- one\n- two"))]


async def test_messages_are_shown_as_typed_and_a_streamed_answer_as_if_it_had_been_there_before() -> None:
    source = "# Head\n\nSome **bold** text\n\n1. one\n\n2. two\n\n```py\nx = 1\n```\nend"
    async with hosted(60, 30) as (transcript, _):
        transcript.add_message(said("**not bold**\n  indented <b>"))
        assert shown(transcript)[:3] == ["  You", "  **not bold**", "    indented <b>"]
        transcript.set_messages([])
        assert not "".join(shown(transcript))
        transcript.append("nobody listens")
        transcript.finish_answer("nothing is open")
        transcript.begin_answer("A")
        transcript.append("one")
        transcript.begin_answer("B")
        transcript.append("two")
        assert [m.content for m in transcript.messages] == ["one", "two"]
        transcript.finish_answer("stopped")
        assert [m.note for m in transcript.messages] == ["", "stopped"]
        transcript.set_messages([])
        transcript.begin_answer("Model")
        for char in source:
            write(transcript, char)
        transcript.finish_answer("done")
        streamed = everything(transcript)
        transcript.set_messages([answered(source, note="done")])
        assert everything(transcript) == streamed
        assert transcript.current_message_text() == source
        assert [block.text for block in transcript.code_blocks()] == ["x = 1"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.text(st.sampled_from("ab \n\r\x1b*_`#-|[]()<>&$\\日👩‍💻1."), max_size=120),
    st.lists(st.integers(0, 120), max_size=8),
    st.booleans(),
)
def test_any_cutting_then_finish_is_the_whole(text: str, cuts: list[int], reasoning: bool) -> None:
    view = View(30, TextStyles(), show_reasoning=True)
    answer = OpenMessage("Model", view)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for a, b in itertools.pairwise(edges):
        answer.feed(text[a:b], reasoning)
        answer.update()
        assert is_safe(line.text for line in answer.lines)
        assert all(line.width == cell_len(line.text) == view.width for line in answer.lines)
    whole = answered("", text) if reasoning else answered(text)
    assert message_lines(answer.finish(""), view) == message_lines(whole.cleaned(), view)


async def test_prefill_holds_the_place_of_the_text_and_reasoning_is_live_then_folded() -> None:
    async with hosted(50, 20) as (transcript, pilot):
        transcript.min_interval = 3600.0
        transcript.begin_answer("Model")
        assert shown(transcript)[:2] == ["  Model", "  ▍"]
        transcript.set_pending("reading the prompt 512/2048")
        transcript.flush()
        assert shown(transcript)[:3] == ["  Model", "  reading the prompt 512/2048", ""]
        transcript.append("Text")
        assert shown(transcript)[:3] == ["  Model", "  Text▍", ""]
        transcript.append(" that waits")
        await pilot.pause()
        assert shown(transcript)[1] == "  Text▍"
        transcript.flush()
        assert shown(transcript)[1] == "  Text that waits▍"

        transcript.set_messages([])
        transcript.begin_answer("Model")
        write(transcript, "\n".join(f"thought {n}" for n in range(9)), "reasoning")
        live = ["  │ thought 6", "  │ thought 7", "  │ thought 8"]
        assert shown(transcript)[1:6] == ["  ▾ reasoning · 18 words", *live, "  ▍"]
        write(transcript, "Answer")
        assert shown(transcript)[1:3] == ["  ▸ reasoning · 18 words (F7)", "  Answer▍"]
        transcript.finish_answer()
        transcript.toggle_reasoning()
        assert "thought 0" in everything(transcript)
        await pilot.click(transcript, offset=(4, 1))
        assert "thought 0" not in everything(transcript)
        assert transcript.messages[0].reasoning.startswith("thought 0")


async def test_escape_sequences_are_shown_not_sent() -> None:
    hostile = "\x1b[2J\x1b]0;x\x07 \x9b31m \u202eabc\u202c &#27;[31m ```\x1b"
    async with hosted(60, 30) as (transcript, _):
        transcript.add_message(TranscriptMessage("notice", f"t{hostile}", hostile, hostile, hostile))
        transcript.add_message(TranscriptMessage("user", hostile, hostile))
        transcript.begin_answer(hostile)
        transcript.set_pending(hostile)
        transcript.append(hostile, "reasoning")
        write(transcript, hostile + "\n```" + hostile + "\n" + hostile)
        assert is_safe([everything(transcript)])
        transcript.finish_answer(hostile)
        transcript.toggle_reasoning()
        assert is_safe([everything(transcript)])
        assert "␛[2J" in everything(transcript)
        assert is_safe([transcript.current_message_text(), *(block.text for block in transcript.code_blocks())])


async def test_follows_the_end_until_the_user_scrolls_up() -> None:
    async with hosted(40, 10) as (transcript, pilot):
        await show(pilot, transcript, LONG)
        assert transcript.scroll_y == transcript.max_scroll_y
        transcript.begin_answer("Model")
        write(transcript, "line\n\n" * 20)
        assert transcript.scroll_y == transcript.max_scroll_y
        transcript.scroll_to(y=30, animate=False)
        assert not transcript.following
        before = shown(transcript)
        write(transcript, "more\n\n" * 20)
        assert transcript.scroll_y == 30 and shown(transcript) == before
        transcript.focus()
        await pilot.press("end")
        assert transcript.following and transcript.scroll_y == transcript.max_scroll_y


async def test_the_view_follows_a_third_at_a_time() -> None:
    async with hosted(40, 12) as (transcript, pilot):
        transcript.begin_answer("Model")
        tops = [0]
        for n in range(60):
            write(transcript, f"line {n}\n\n")
            assert any(f"line {n}" in row for row in shown(transcript))
            tops.append(transcript.scroll_offset.y)
        steps = [step for a, b in itertools.pairwise(tops) if (step := b - a)]
        assert 10 < len(steps) < 40 and min(steps) >= 4
        before = [row.rstrip("▍") for row in shown(transcript)]
        transcript.finish_answer()
        assert shown(transcript) == before  # the text stays where it was
        transcript.add_message(said("next"))
        assert any("next" in row for row in shown(transcript))
        await pilot.resize_terminal(40, 9)
        await until(pilot, lambda: transcript.size.height == 9)
        assert shown(transcript)[-2].strip() == "next"  # no room below what is not being written
        await show(pilot, transcript, LONG)
        assert "".join(shown(transcript)[-2]).strip() == "• two"


async def test_a_new_width_keeps_the_place_and_another_theme_changes_the_colours() -> None:
    async with hosted(60, 12) as (transcript, pilot):
        transcript.set_messages([answered(f"answer {n} " + "with words " * 30) for n in range(60)])
        await until(pilot, lambda: transcript.up_to_date and transcript.max_scroll_y > 0)
        for width in (40, 100):
            place = next(y for y, line in enumerate(transcript.lines) if "answer 30 " in line.text) - 1
            transcript.scroll_to(y=place, animate=False)
            await pilot.resize_terminal(width, 12)
            await until(pilot, lambda width=width: width - 3 < transcript.size.width <= width and transcript.up_to_date)
            assert "answer 30" in shown(transcript)[1]
            assert all(cell_len(row) <= width for row in shown(transcript))
        before = transcript.render_line(0)
        pilot.app.theme = "textual-light"
        await until(pilot, lambda: transcript.render_line(0) != before and transcript.up_to_date)


async def test_a_long_chat_is_rendered_from_its_end_bit_by_bit() -> None:
    async with hosted(60, 20) as (transcript, pilot):
        made: list[int] = []

        def answer(n: int) -> TranscriptMessage:
            made.append(n)
            return answered(f"answer {n} " + "word " * 400)

        transcript.set_messages([partial(answer, n) for n in range(50)])
        assert "answer 49" in everything(transcript) and not transcript.up_to_date
        assert made and min(made) > 25  # the others take time, and nobody sees them yet
        await until(pilot, lambda: transcript.up_to_date)
        assert sorted(made) == list(range(50))
        assert transcript.scroll_y == transcript.max_scroll_y
        assert "answer 0 " in everything(transcript)


async def test_wheel_and_page_keys_scroll_and_the_marker_moves_between_messages() -> None:
    async with hosted(40, 10) as (transcript, pilot):
        await show(pilot, transcript, LONG)
        assert transcript.current_message_text() == "answer 39\n\n- one\n- two"
        transcript.focus()
        end = transcript.scroll_y
        await pilot._post_mouse_events([events.MouseScrollUp], transcript, (5, 5))
        await until(pilot, lambda: transcript.scroll_y < end)
        assert not transcript.following
        await pilot.press("home")
        await until(pilot, lambda: transcript.scroll_y == 0)
        assert shown(transcript)[1] == "  question 0"
        await pilot.press("pagedown")
        await until(pilot, lambda: transcript.scroll_y > 0)
        await pilot.press("k", "alt+up")
        assert transcript.current_message_text() == "question 39"
        assert any(row.startswith("▌ question 39") for row in shown(transcript))
        await pilot.press(*"k" * 20)
        assert transcript.current_message_text() == "question 29"
        assert any(row.startswith("▌ question 29") for row in shown(transcript))
        await pilot.press("j", "alt+down")
        assert transcript.current_message_text() == "question 30"


async def test_mouse_selection_copies_what_was_written() -> None:
    async with hosted(30, 12) as (transcript, pilot):
        source = "wide 日本 words that are wrapped here\n\n```py\nx = 'long code is wrapped too'\n```"
        await show(pilot, transcript, [*LONG, answered(source)])
        rows = shown(transcript)
        first = next(y for y, row in enumerate(rows) if "wide" in row)
        last = next(y for y, row in enumerate(rows) if "wrapped too" in row)
        await pilot.mouse_down(transcript, offset=(2, first))
        await pilot.hover(transcript, offset=(25, last))
        await pilot.mouse_up(transcript, offset=(25, last))
        assert transcript.screen.get_selected_text() == (
            "wide 日本 words that are wrapped here\n\n▎ py\nx = 'long code is wrapped too'"
        )
        transcript.screen.clear_selection()
        await show(pilot, transcript, [said("日本語 text")])  # the right cells are marked
        await pilot.mouse_down(transcript, offset=(4, 1))
        await pilot.hover(transcript, offset=(7, 1))
        await pilot.mouse_up(transcript, offset=(7, 1))
        assert transcript.screen.get_selected_text() == "本語"
        style = transcript.screen.get_component_rich_style("screen--selection")
        marked = "".join(s.text for s in transcript.render_line(1) if s.style and s.style.bgcolor == style.bgcolor)
        assert marked.strip() == "本語"


SAMPLE = """Reading is a **matrix × matrix** product: each weight is *fetched once*. See `std::vector<int>`.

## Steps
1. First, a [link](http://example.com)
   - nested
2. Second

> Memory bandwidth sets the pace.

| quantization | bytes |
|---|--:|
| Q8_0 | 1.06 |

```python
def tok_s(bandwidth: float) -> float:
    return bandwidth / 1_646_573_056  # bytes per token
```"""


@pytest.mark.parametrize(
    ("name", "size", "theme"),
    [
        ("transcript-40", (40, 36), "textual-dark"),
        ("transcript-light", (80, 30), "textual-light"),
        ("transcript-ansi", (80, 30), "ansi-dark"),
    ],
)
async def test_looks(name: str, size: tuple[int, int], theme: str) -> None:
    async with hosted(*size, theme=theme) as (transcript, pilot):
        await show(pilot, transcript, [said("Why is decoding slow?"), answered(SAMPLE, "because of memory", "stopped")])
        transcript.begin_answer("Model")
        transcript.set_pending("reading the prompt 512/2048")
        transcript.flush()
        await pilot.pause()
        await snapshot(pilot.app, name)


async def test_attachments_are_folded_and_unfold_up_to_a_limit() -> None:
    async with hosted(60, 20) as (transcript, pilot):
        long = ("big.log", "x\n" * 1_000_000), ("wide", "y" * 4_000_000)
        attachments = (("a\x1b[2J.py", "\x1b]0;x\x07\n▸ fold\n"), *long)
        await show(pilot, transcript, [TranscriptMessage("user", "You", "▸ Why?", id=1, attachments=attachments)])
        assert everything(transcript).splitlines() == [
            "  You", "  ▸ a␛[2J.py · 2 lines (F7)", "  ▸ big.log · 1,000,000 lines (F7)", "  ▸ wide · 1 line (F7)",
            "  ▸ Why?",
        ]  # fmt: skip
        await pilot.click(transcript, offset=(4, 4))  # the message, which only begins like a fold
        assert "│" not in everything(transcript)
        await pilot.click(transcript, offset=(4, 1))
        assert "  │ ␛]0;x␇" in everything(transcript) and "  │ … 999,800 more lines" in everything(transcript)
        assert len(transcript.lines) < 1000
        assert all(is_safe([line.text]) for line in transcript.lines)
