"""Snapshots: what the terminal would show, as SVG, compared with a file in tests/tui/snapshots/.

`UPDATE_SNAPSHOTS=1 pytest …` writes the files anew; look at them before committing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
from textual.app import App, ComposeResult
from textual.widget import Widget

from cpuchat.tui.terminal import painter
from cpuchat.tui.themes import OWN_VARIABLES

FOLDER = Path(__file__).parents[1] / "tui" / "snapshots"
FAILED = FOLDER.parents[2] / ".pytest_cache" / "snapshots"
UNCHANGED = 1.0  # s
SETTLED = 10.0  # s; a screen under load may be drawn late: the footer and scrollbars follow the content


class HostApp(App[None]):
    """A bare app around the widgets under test."""

    ENABLE_COMMAND_PALETTE = False

    def __init__(self, *widgets: Widget, css: str = "", theme: str = "textual-dark") -> None:
        painter.keep()
        super().__init__()
        self._widgets = widgets
        self._css = css
        self.theme = theme

    def compose(self) -> ComposeResult:
        self.stylesheet.add_source(self._css, ("host", "css"))
        yield from self._widgets

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return OWN_VARIABLES


def svg_of(app: App[Any]) -> str:
    """Return the screen as SVG, the same for the same screen: ids that differ from run to run are removed."""
    return re.sub(r"terminal-\d+", "terminal", app.export_screenshot(title="cpuchat")) + "\n"


async def snapshot(app: App[Any], name: str) -> None:
    """Assert that the screen of `app` becomes that of `name`.svg; one that is settled and differs fails."""
    file = FOLDER / f"{name}.svg"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        await asyncio.sleep(UNCHANGED)  # what follows the content, as the thumb of a scrollbar, is drawn after it
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(svg_of(app), encoding="utf-8")
        return
    if not file.exists():
        pytest.fail(f"no snapshot {name}.svg: look at the screen, then run with UPDATE_SNAPSHOTS=1")
    expected = file.read_text(encoding="utf-8")
    shown = svg_of(app)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLED):
            while shown != expected:
                await asyncio.sleep(0.1)
                shown = svg_of(app)
    if shown != expected:
        FAILED.mkdir(parents=True, exist_ok=True)
        failed = FAILED / file.name
        failed.write_text(shown, encoding="utf-8")
        pytest.fail(f"the screen differs from {file.name}; what it shows now is in {failed}")
