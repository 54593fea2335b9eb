"""Tests reading what is typed on the terminal while an answer is written."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from cpuchat.cli.plain import TypedAhead


async def test_lines_are_kept_an_empty_one_is_told_and_ctrl_d_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal = os.openpty()
    empty = asyncio.Event()
    typed = TypedAhead(empty.set)
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with typed.reading():
            os.write(keyboard, "Wie schnell? ½\n\n".encode())
            async with asyncio.timeout(180):
                await empty.wait()
                os.write(keyboard, b"\x04")
                while not typed.ended:
                    await asyncio.sleep(0)
    os.close(keyboard)
    assert list(typed.lines) == ["Wie schnell? ½"]
