"""Tests comparing in a real terminal, with real workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

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


def test_one_key_compares_the_demo_and_the_chat_comes_back(tmp_path: Path) -> None:
    settings.update(SHORT)
    terminal = Terminal([], columns=120, rows=40, home=tmp_path)
    try:
        terminal.wait_for("Message")
        terminal.wait_until(lambda text: "demo 8M" in text and "loading" not in text, "a loaded model")
        terminal.press("ctrl+l")
        terminal.wait_for("B against A")
        terminal.wait_for("round 1")
        terminal.wait_for("0.59×")  # of the bytes per token; whether a speed differs is up to the machine
        assert len(workers(terminal)) == 2
        terminal.press("esc")
        terminal.wait_for("⇄ Q8_0")
        terminal.wait_until(lambda text: len(workers(terminal)) == 1, "the chat's worker alone")
        terminal.press("ctrl+q")
        assert terminal.wait_for_end() == 0
    finally:
        terminal.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a race needs two cores")
def test_a_side_that_is_killed_in_a_race_leaves_the_other(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CPUCHAT_ENGINE_CORES")
    settings.update(QUICK)
    terminal = Terminal(["compare", str(tiny_model), f"{tiny_model},kv=f32"], columns=120, rows=40, home=tmp_path)
    try:
        terminal.wait_for("Prompt for both")
        terminal.type("go on")
        terminal.press("enter")
        terminal.wait_for("tok/s")
        terminal.press("esc")  # this model never ends by itself
        terminal.wait_for("stopped")
        terminal.type("r")
        terminal.wait_for("shared memory bus")  # both write
        os.kill(workers(terminal)[0].pid, signal.SIGKILL)
        terminal.wait_for("Failed")
        terminal.press("esc")
        terminal.wait_until(lambda text: "stopped" in text and "Failed" in text, "the other side's answer, stopped")
        terminal.press("ctrl+q")
        assert terminal.wait_for_end() == 0
    finally:
        terminal.close()


def test_the_command_opens_the_comparison_and_the_chat_follows(tmp_path: Path) -> None:
    settings.update(SHORT)
    terminal = Terminal(["compare", "demo", "demo-q4"], home=tmp_path)
    try:
        terminal.wait_for("Prompt for both")
        terminal.type("What is quantization?")
        terminal.press("enter")
        terminal.wait_for("0.59×")  # of the bytes per token; whether a speed differs is up to the machine
        terminal.press("esc")
        terminal.wait_until(lambda text: "demo 8M Q8_0" in text and "ctx" in text, "the chat with its model")
        terminal.press("ctrl+q")
        assert terminal.wait_for_end() == 0
    finally:
        terminal.close()
