"""Tests that a model is downloaded during a chat, in a real terminal: from the list to its first answer."""

from __future__ import annotations

import re
from pathlib import Path

from cpuchat.base import paths
from cpuchat.config import settings
from tests.e2e.test_app import QUICK, ask
from tests.support.hub_server import Fault, Gate, HubServer
from tests.support.terminal import Terminal

ENTRY = """
[[model]]
id = "small"
name = "Small friend"
family = "Small"
params = 0.0001
repos = ["friends/small-GGUF"]
"""


def test_download_while_chatting_then_load(hub_server: HubServer, tiny_model: Path, tmp_path: Path) -> None:
    hub_server.add("friends/small-GGUF", {"small-F32.gguf": tiny_model}, downloads=12)
    gate = Gate(at=200_000)
    paths.user_catalog().parent.mkdir(parents=True, exist_ok=True)
    paths.user_catalog().write_text(ENTRY)
    settings.update(QUICK)
    terminal = Terminal(["--model", str(tiny_model)], columns=80, rows=34, home=tmp_path)
    try:
        terminal.wait_for("0/4k ctx")
        terminal.press("ctrl+o")
        terminal.wait_for("search, or paste")
        terminal.type("small fr")
        terminal.wait_for("◌ Small friend")
        terminal.press("enter")
        # Its header was read when it says whether it fits: the next request is that of the download.
        terminal.wait_until(lambda screen: re.search(r"◌ small .* fits", screen), "the repository")
        hub_server.fault("friends/small-GGUF", "small-F32.gguf", Fault(gate=gate))
        terminal.press("enter")
        terminal.wait_for("/474 kB")
        for shown in ("search Hugging Face", "search, or paste", "Message"):
            terminal.press("esc")
            terminal.wait_for(shown)
        ask(terminal, "say something")
        assert "small F32" in terminal.text
        gate.open()
        terminal.wait_for("Enter loads it")
        terminal.press("esc")
        terminal.wait_for("Enter sends")
        terminal.press("ctrl+g")
        terminal.wait_until(lambda screen: "models--friends--small-GGUF" in screen, "the model that came, selected")
        terminal.press("enter")
        terminal.wait_until(lambda screen: "Message" in screen and "─ Models" not in screen, "the chat")
        ask(terminal, "and now")
        terminal.press("ctrl+q")
        assert terminal.wait_for_end() == 0
    finally:
        gate.open()
        terminal.close()
