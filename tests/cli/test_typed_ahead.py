"""Tests reading what is typed on the terminal while an answer is written."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from cpuchat.cli.lines import Lines
from cpuchat.cli.terminal import TerminalOutput


async def test_lines_are_kept_an_empty_one_is_told_and_ctrl_d_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal = os.openpty()
    empty = asyncio.Event()
    lines = Lines(TerminalOutput(plain=True), empty.set)
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with lines.reading():
            os.write(keyboard, "Wie schnell? ½\n\n".encode())
            async with asyncio.timeout(180):
                await empty.wait()
                os.write(keyboard, b"\x04")
                while not lines.ended:
                    await asyncio.sleep(0)
    os.close(keyboard)
    assert list(lines.typed) == ["Wie schnell? ½"]
