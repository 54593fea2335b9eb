"""Tests keys that arrive in one read, in a real terminal."""

from __future__ import annotations

import re
from pathlib import Path

from cpuchat.config import settings
from tests.e2e.test_app import QUICK, stored
from tests.support.terminal import Terminal


def test_keys_in_one_read_keep_their_order_text_after_enter_stays_and_a_command_runs(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings.update(QUICK)
    terminal = Terminal(["--model", str(tiny_model)], home=tmp_path)
    try:
        terminal.wait_for("0/4k ctx")
        terminal.type("hello wurld\x7f\x7f\x7f\x7forld\x1b[D\x1b[Dy\x7f\rsecond one\x7f\x7f\x7ftwo")
        terminal.wait_until(lambda _: stored(), "a message that was sent")
        assert stored()[0][:2] == ("user", "hello world")
        terminal.wait_until(lambda screen: re.search(r"second two\s", screen), "what was typed after Enter")
        terminal.press("esc")
        terminal.wait_for("stopped")
        assert "second two" in terminal.text
        terminal.type("\x10export\r")
        terminal.wait_for("Export to Markdown")
        terminal.press("esc")
        terminal.press("ctrl+q")
        assert terminal.wait_for_end() == 0
        assert [text for role, text, _ in stored() if role == "user"] == ["hello world"]
    finally:
        terminal.close()
