"""Tests comparing in a real terminal, with real workers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from cpuchat.config import settings
from tests.e2e.test_app import QUICK
from tests.support.terminal import Terminal

SHORT = {**QUICK, "chat": {"max_tokens": 24}}


def workers(terminal: Terminal) -> list[psutil.Process]:
    """The inference workers of the app, oldest first."""
    children = psutil.Process(terminal.process.pid).children(recursive=True)
    return sorted(
        (child for child in children if "cpuchat.worker" in child.cmdline()), key=lambda child: child.create_time()
    )


def leave(terminal: Terminal) -> None:
    """Go back to the chat."""
    terminal.press("esc")
    terminal.wait_until(lambda text: "next prompt" not in text, "the chat")


def test_the_command_opens_the_comparison_the_chat_follows_and_one_key_compares_its_model(tmp_path: Path) -> None:
    settings.update({**SHORT, "engine": {"cores": "auto"}})
    with contextlib.closing(Terminal(["compare", "demo", "demo-q4"], columns=160, rows=40, home=tmp_path)) as terminal:
        terminal.wait_for("Prompt for both")
        terminal.type("What is quantization?")
        terminal.press("enter")
        terminal.wait_for("bytes per token")  # both have answered
        terminal.type("t")
        terminal.wait_for("0.59×")  # of the bytes per token; whether a speed differs is up to the machine
        terminal.type("t")
        leave(terminal)
        terminal.wait_until(lambda text: "demo 8M Q8_0" in text and "ctx" in text, "the chat with its model")
        terminal.press("ctrl+l")
        terminal.wait_for("replay of two")
        terminal.type("t")
        terminal.wait_for("0.59×")
        assert len(workers(terminal)) == 2
        terminal.type("t")
        terminal.wait_until(lambda text: "0.59×" not in text, "the comparison without its table")
        leave(terminal)
        terminal.wait_for("⇄ Q8_0")
        terminal.wait_until(lambda text: len(workers(terminal)) == 1, "the chat's worker alone")
        terminal.press("ctrl+q")
        assert terminal.wait_for_end() == 0
