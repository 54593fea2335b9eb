"""Tests the whole program in a real terminal: start, ask, see the answer arrive, stop it, quit."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cpuchat.base import paths
from cpuchat.config import settings
from tests.support.terminal import Terminal

QUICK = {"hardware": {"probe": False}, "speculation": {"drafters": "off"}}
"""Neither is of interest to most tests, and both take seconds beside other load."""


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Terminal]:
    with contextlib.closing(Terminal([], columns=120, rows=40, home=tmp_path)) as terminal:
        yield terminal


def stored() -> list[tuple[str, str, str]]:
    """Return (role, content, stop reason) of every message in the database."""
    if not paths.chats_db().exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{paths.chats_db()}?mode=ro", uri=True)) as database:
        return database.execute("select role, content, stop_reason from messages order by id").fetchall()


def ask(terminal: Terminal, text: str) -> None:
    """Send `text` and wait until a part of the answer is written and saved."""
    before = len(stored())
    terminal.type(text)
    terminal.wait_for(text)
    terminal.press("enter")
    terminal.wait_until(lambda _: len(stored()) == before + 2 and stored()[-1][1], "a saved answer")


def test_first_start_is_drawn_whole_in_a_window_that_changes_and_answers_from_the_demo_model(demo: Terminal) -> None:
    demo.wait_for("Enter sends")
    demo.wait_until(lambda screen: re.search(r"0/\d+k ctx", screen), "the model")
    app = psutil.Process(demo.process.pid)
    app.suspend()  # busy for a moment: it sees only the size at the end, which is the one it knows
    demo.resize(70, 20)
    demo.resize(120, 40)
    app.resume()
    demo.wait_until(lambda screen: "╭─ Now ─" in screen, "the panel")
    demo.wait_until(lambda screen: screen.count("╰") == 3 and screen.count("╯") == 3, "all frames")
    demo.wait_for("demo")
    ask(demo, "How do I stop an answer?")
    demo.wait_until(lambda screen: re.search(r"\d+ tokens? ·", screen), "the figures of the answer")
    demo.press("ctrl+q")
    assert demo.wait_for_end() == 0
    assert stored()[1][2] == "end"


def test_killed_app_keeps_the_text_and_its_worker_goes_too(tiny_model: Path, tmp_path: Path) -> None:
    settings.update(QUICK)
    terminal = Terminal(["--model", str(tiny_model)], home=tmp_path)
    terminal.wait_for("tiny")
    ask(terminal, "hello")
    app = psutil.Process(terminal.process.pid)
    family = [app, *app.children(recursive=True)]
    assert len(family) > 1
    app.kill()
    assert not psutil.wait_procs(family, timeout=180)[1]
    assert [row[0] for row in stored()] == ["user", "assistant"]


def test_keys_in_one_read_keep_their_order_an_answer_is_stopped_and_a_killed_worker_healed(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings.update(QUICK)
    with contextlib.closing(Terminal(["--model", str(tiny_model)], columns=120, rows=40, home=tmp_path)) as terminal:
        terminal.wait_for("0/4k ctx")
        terminal.type("hello wurld\x7f\x7f\x7f\x7forld\x1b[D\x1b[Dy\x7f\rsecond one\x7f\x7f\x7ftwo")
        terminal.wait_until(lambda _: stored(), "a message that was sent")
        assert stored()[0][:2] == ("user", "hello world")
        terminal.wait_until(lambda screen: re.search(r"second two\s", screen), "what was typed after Enter")
        terminal.wait_until(lambda _: len(stored()) == 2 and stored()[1][1], "a saved answer")
        terminal.press("esc")
        terminal.wait_for("stopped")
        assert "second two" in terminal.text
        terminal.type("\x10rename\r")
        terminal.wait_for("Rename chat")
        terminal.press("esc")
        terminal.wait_until(lambda screen: "Rename chat" not in screen, "the chat")
        terminal.press("enter")
        terminal.wait_until(lambda _: len(stored()) == 4 and stored()[3][1], "an answer to what was typed")
        children = psutil.Process(terminal.process.pid).children()
        (worker,) = (child for child in children if "cpuchat.worker" in " ".join(child.cmdline()))
        worker.kill()
        terminal.wait_for("worker crashed")
        ask(terminal, "again")
        terminal.press("esc")
        terminal.wait_until(lambda _: stored()[-1][2], "the end of the answer")
        terminal.press("ctrl+q")
        assert terminal.wait_for_end() == 0
        assert [row[0] for row in stored()] == ["user", "assistant"] * 3
        assert [row[1] for row in stored()[::2]] == ["hello world", "second two", "again"]
        for row in (1, -1):
            assert stored()[row][1] and stored()[row][2] == "cancelled"


def test_a_cache_folder_that_cannot_be_written_is_a_note_and_a_stopped_worker_does_not_keep_anyone_from_quitting(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CPUCHAT_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the log goes instead
    settings.update(QUICK)
    with contextlib.closing(Terminal(["--model", str(tiny_model)], columns=120, rows=40, home=tmp_path)) as terminal:
        terminal.wait_for("Cannot write to")
        ask(terminal, "say something long")
        everyone = psutil.Process(terminal.process.pid).children(recursive=True)
        (worker,) = (one for one in everyone if "cpuchat.worker" in one.cmdline())
        worker.suspend()
        terminal.press("ctrl+q")
        assert terminal.wait_for_end() == 0
        assert b"Traceback" not in terminal.raw
        assert not psutil.wait_procs(everyone, timeout=180)[1]
        assert stored()[-1][1]


def test_without_a_folder_for_the_chats_the_app_says_so_once_and_chats(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CPUCHAT_DATA_DIR", str(tmp_path / "file"))
    settings.update(QUICK)
    with contextlib.closing(Terminal(["--model", str(tiny_model)], columns=120, rows=40, home=tmp_path)) as terminal:
        terminal.wait_for("CPUCHAT_DATA_DIR")  # in the notice
        terminal.wait_for("0/4k ctx")
        terminal.type("hello")
        terminal.press("enter")
        terminal.wait_until(lambda screen: re.search(r"[1-9]\d*/4k ctx", screen), "an answer")
        terminal.press("esc")
        terminal.wait_for("stopped")
        terminal.press("ctrl+q")
        assert terminal.wait_for_end() == 0
        assert b"Traceback" not in terminal.raw and b"not saved" not in terminal.raw
