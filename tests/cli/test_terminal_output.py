"""Tests JSON lines, prompts and what reaches a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
import tty
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuchat.cli.compare import ComparisonRun
from cpuchat.cli.output import json_line
from cpuchat.cli.question import compose
from cpuchat.cli.terminal import TerminalOutput
from cpuchat.compare.runner import Round, Side, Turn
from cpuchat.config.settings import Settings
from cpuchat.protocol.messages import LoadProgress, PrefillProgress, TextDelta
from tests.support.scripted_backend import answer


@settings(max_examples=20)
@given(st.text(max_size=40))
def test_a_json_line_is_one_line_without_control_characters(text: str) -> None:
    line = json_line({"text": text})
    assert json.loads(line) == {"text": text}
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in line)


@pytest.mark.parametrize(
    ("question", "material", "raw", "prompt"),
    [
        ("Why?", "", False, "Why?"),
        ("", "Why?\n", False, "Why?"),
        ("-", "from a pipe\n", False, "from a pipe"),
        ("Sum up:", "\n  a\n  b\n\n", False, "Sum up:\n\n  a\n  b"),
        ("", "Once upon ", True, "Once upon "),
        ("", "Once upon\n", True, "Once upon"),
        ("\n", "", True, "\n"),
    ],
)
def test_question_and_material_make_the_prompt(question: str, material: str, raw: bool, prompt: str) -> None:
    assert compose(question, material, raw=raw) == prompt


class Screen:
    """A real pseudo-terminal whose output can be read back."""

    _END = "\x00end\x00"

    def __init__(self) -> None:
        self.reader, writer = pty.openpty()
        tty.setraw(writer)
        self.stream = os.fdopen(writer, "w", encoding="utf-8")

    def text(self) -> str:
        """All that was written; a terminal hands it over in pieces, so a mark at the end tells when it is there."""
        self.stream.write(self._END)
        self.stream.flush()
        data = b""
        while not data.endswith(self._END.encode()):
            data += os.read(self.reader, 65536)
        return data.decode().removesuffix(self._END)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    yield screen
    screen.stream.close()
    os.close(screen.reader)


def test_escape_characters_of_an_answer_never_reach_the_terminal(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", screen.stream)
    terminal = TerminalOutput()
    for piece in ("\x1b]0;owned\x07 hello \x1b", "[2J"):
        terminal.answer(piece)
    terminal.end_answer()
    assert screen.text() == "␛]0;owned␇ hello ␛[2J\n"


def errors_on(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> TerminalOutput:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", screen.stream)
    return TerminalOutput()


def test_reasoning_is_dim_and_the_answer_starts_on_a_new_line(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = errors_on(screen, monkeypatch)
    terminal.reasoning("hm\x1b")
    terminal.answer("42")
    terminal.end_answer()
    assert screen.text() == "\x1b[2mhm␛\x1b[22m\n\n"


def test_progress_is_one_line_that_goes_away(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = errors_on(screen, monkeypatch)
    terminal.progress(LoadProgress(phase="reading", done=1, total=2))
    terminal.progress(PrefillProgress(request_id=1, processed=512, total=1203, cache_n=0))
    terminal.answer("hi")
    assert screen.text() == (
        "\r\x1b[2Kloading the model · reading the file  50 %\r\x1b[2Kreading the prompt · 512 of 1,203 tokens\r\x1b[2K"
    )


def test_a_comparison_tells_how_long_it_takes_below_what_is_written(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = SimpleNamespace(conversation=SimpleNamespace(meter=SimpleNamespace(prefill_left_s=lambda: 21.0)))
    compared: Any = SimpleNamespace(
        names=("a", "b"), runners=[runner, runner], turns=[Turn("", [Round()] * 2)], seconds_left=lambda _: 4.0
    )
    monkeypatch.setattr("cpuchat.compare.comparison.Comparison", lambda *_, **__: compared)
    errors_on(screen, monkeypatch)
    monkeypatch.setattr(sys, "stdout", screen.stream)
    running = ComparisonRun((Side(path="a.gguf"), Side(path="b.gguf")), Settings(), 3, as_json=False)
    for step in answer("Yes."):
        compared.tell(0, step)
    compared.tell(1, PrefillProgress(request_id=1, processed=512, total=4097, cache_n=0))
    assert screen.text().endswith("── A a ──\nYes.\n\n\r\x1b[2Kreading the prompt · 512 of 4,097 tokens · 21 s left")
    running._stream = False
    compared.tell(1, TextDelta(request_id=1, text="No.", predicted_n=3))
    assert screen.text().endswith("round 2 of 3 · B b · 3 tokens · 4 s left")
