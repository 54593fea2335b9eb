"""Tests in a real terminal that what was typed and not sent is there at the next start, whatever ended the app."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cpuchat.base import paths
from tests.support.terminal import HANG_GUARD, Terminal

pytestmark = pytest.mark.usefixtures("measured_machine", "one_core")


def kill(terminal: Terminal) -> None:
    os.kill(terminal.pid, signal.SIGKILL)
    terminal.close()


def hang_up(terminal: Terminal) -> None:
    assert terminal.hang_up() == 128 + signal.SIGHUP


def leave(terminal: Terminal) -> None:
    terminal.press("ctrl+q")
    assert terminal.wait_for_end() == 0


def wait_for_saved(text: str) -> None:
    """Wait until the database has it: what a kill at this moment leaves."""
    deadline = time.monotonic() + HANG_GUARD
    while time.monotonic() < deadline:
        with contextlib.closing(sqlite3.connect(paths.chats_db())) as db:
            if any(text in row for (row,) in db.execute("SELECT text FROM drafts")):
                return
        os.sched_yield()
    raise AssertionError("never saved")


@pytest.mark.parametrize("end", [kill, hang_up, leave])
def test_a_draft_and_its_pasted_text_survive_the_app(tmp_path: Path, end: Callable[[Terminal], None]) -> None:
    terminal = Terminal(["--server", "http://127.0.0.1:9"], home=tmp_path)
    terminal.wait_for("Message")
    terminal.type("half a thought 漢字 ")
    terminal.type("\x1b[200~" + "line of a paste\n" * 50 + "\x1b[201~")
    terminal.wait_for("[Pasted text 1: 50 lines]")
    wait_for_saved("[Pasted text 1: 50 lines]")
    end(terminal)
    again = Terminal(["--server", "http://127.0.0.1:9"], home=tmp_path)
    again.wait_for("half a thought 漢字 [Pasted text 1: 50 lines]")
    again.wait_for("Pasted text 1, ≈")  # which the mark still stands for
    again.close()
