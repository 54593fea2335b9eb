"""Tests that long answers are rendered in steps, whatever their text: the work between two keys is bounded."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from cpuchat.tui.markdown import render
from cpuchat.tui.markdown.message_view import STEP, OpenMessage, Rendering, TranscriptMessage, View
from cpuchat.tui.markdown.render import missing
from cpuchat.tui.markdown.rows import Line, TextRow, TextStyles
from cpuchat.tui.markdown.streaming import MAX_OPEN
from tests.support.chat_app import SMALL, counting

pytestmark = pytest.mark.slow
SIZE = 24_000
VIEW = View(80, TextStyles())
MAX_PARSED = 6 * (MAX_OPEN + STEP)
"""Characters between two keys: an open block is parsed for its end, for a place to cut it, and to be shown."""
MAX_WRAPPED = 4 * (MAX_OPEN + STEP)


def fill(part: str) -> str:
    return (part * (SIZE // len(part) + 1))[:SIZE]


TEXTS = {
    "one line": fill("a"),
    "lines of one paragraph": fill("some words in a line\n"),
    "backticks": fill("`\n"),
    "a table in one line": "| a | b |\n|---|---|\n" + fill("| x "),
    "a table of many rows": "| a | b |\n|---|---|\n" + fill("| 12 | some words |\n"),
    "a table of many columns": "|" + "a|" * 500 + "\n|" + "-|" * 500 + "\n" + fill("|" + "x|" * 500 + "\n"),
    "code in one line": "```python\n" + fill("x=1;"),
    "code in a string": '```python\ns = """\n' + fill("some text\n"),
    "the language of code": "```" + fill("x"),
    "quotes in quotes": fill("> "),
    "an item of a list": "- a\n" + fill("  b\n"),
}


class Work:
    """Counts the characters that were parsed and wrapped since `reset`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parsed = self.wrapped = 0
        for module in ("streaming", "render"):
            for name in ("parse", "parse_blocks"):
                counted = self._counting(getattr(render, name))
                monkeypatch.setattr(f"cpuchat.tui.markdown.{module}.{name}", counted, raising=False)
        from cpuchat.tui.markdown import rows

        wrap = rows.wrap

        def counting(row: TextRow, width: int) -> list[TextRow]:
            self.wrapped += len(row.text)
            return wrap(row, width)

        for module in ("rows", "render", "message_view"):
            monkeypatch.setattr(f"cpuchat.tui.markdown.{module}.wrap", counting)

    def _counting(self, parse):
        def counting(text: str, **options: bool):
            self.parsed += len(text)
            return parse(text, **options)

        return counting

    def reset(self) -> None:
        self.parsed = self.wrapped = 0

    def check(self) -> None:
        """Assert that what was done since the last check is little."""
        assert self.parsed <= MAX_PARSED and self.wrapped <= MAX_WRAPPED
        self.reset()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    yield Work(monkeypatch)


def is_whole(lines: list[Line], source: str) -> bool:
    return not missing(source, [TextRow([(line.text, VIEW.palette.base)]) for line in lines])


@pytest.mark.parametrize("name", TEXTS)
def test_an_answer_is_rendered_in_small_steps(name: str, work: Work) -> None:
    source = TEXTS[name]
    open_answer = OpenMessage("Model", VIEW)
    for at in range(0, len(source), 2000):
        open_answer.feed(source[at : at + 2000])
        open_answer.update()
        work.check()
    assert is_whole(open_answer.lines, source[: source.rindex(source[-50:])])


@pytest.mark.parametrize("name", TEXTS)
def test_a_stored_answer_is_rendered_in_small_steps(name: str, work: Work) -> None:
    source = TEXTS[name]
    for role in ("assistant", "user"):
        rendering = Rendering(TranscriptMessage(role, "", source), VIEW)
        while not rendering.step():
            work.check()
        work.check()
        assert is_whole(rendering.lines, source)


def test_text_that_comes_at_once_is_rendered_in_steps(work: Work) -> None:
    source = TEXTS["lines of one paragraph"]
    open_answer = OpenMessage("Model", VIEW)
    open_answer.feed(source)
    open_answer.update()
    work.check()
    assert open_answer.behind
    while open_answer.behind:
        open_answer.update()
        work.check()
    assert is_whole(open_answer.lines, source)


async def test_the_app_answers_keys_while_a_long_answer_is_rendered(work: Work) -> None:
    text = TEXTS["backticks"][:20_000].replace("`", "`x")  # without spaces it comes in one go
    async with counting(f"{text} end", size=SMALL) as (app, gate):
        app.prompt.focus()
        await app.press("h", "i")
        assert app.prompt.text == "hi"
        gate.open()
        await app.until(lambda: not app.chat.session.busy and app.transcript.up_to_date)
        assert "end" in app.transcript.lines[-3].text + app.transcript.lines[-2].text
        assert len(re.findall("x", "".join(line.text for line in app.transcript.lines))) >= text.count("x")
