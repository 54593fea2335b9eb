"""Tests what the app has loaded when its first frame is on the terminal: everything else comes after it."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.terminal import Terminal

# Runs the program and writes the names of the loaded modules to a file as soon as the first frame is painted.
_WATCHED = """
import sys
from contextlib import closing
from pathlib import Path
from cpuchat.cli.main import main
from cpuchat.tui.chat.screen import ChatScreen

after_paint = ChatScreen._start

def painted(screen):
    Path({file!r}).write_text(" ".join(sys.modules))
    after_paint(screen)

ChatScreen._start = painted
sys.exit(main([]))
"""
_LATER = {
    "markdown_it", "linkify_it", "pygments",  # texts to show
    "huggingface_hub", "httpx", "tqdm", "yaml",  # the hub
    "numpy", "llama_cpp", "jinja2",  # the worker's
    "tomlkit",  # settings to write
    "mcp", "pydantic", "anyio",  # servers of tools
    "psutil", "gguf", "urllib.request", "http.client", "importlib.metadata", "multiprocessing",
    "rich.markdown", "rich.syntax",
    "cpuchat.models.catalog", "cpuchat.models.hub.client", "cpuchat.models.downloads.manager",
    "cpuchat.tui.models", "cpuchat.tui.hardware", "cpuchat.tui.settings", "cpuchat.tui.compare", "cpuchat.tui.help",
    "cpuchat.compare", "cpuchat.bench", "cpuchat.quality", "cpuchat.tune", "cpuchat.models.synthetic", "cpuchat.engine",
}  # fmt: skip


@pytest.mark.usefixtures("one_core")
def test_the_first_frame_waits_for_nothing_that_it_does_not_show(tmp_path: Path) -> None:
    file = tmp_path / "modules"
    command = [sys.executable, "-c", _WATCHED.format(file=str(file))]
    with closing(Terminal([], columns=120, rows=40, home=tmp_path, command=command)) as terminal:
        terminal.wait_until(lambda text: file.is_file() and "ctx" in text, "a loaded model")
    loaded = set(file.read_text().split())
    assert "textual" in loaded
    assert sorted(_LATER & loaded) == []
