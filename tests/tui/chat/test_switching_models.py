"""Tests the quick switch to another model: by key and by a click on the model's name."""

from __future__ import annotations

import pytest
from textual.command import CommandPalette

from cpuchat.models.library.places import is_demo
from cpuchat.tui.chat.status import StatusLine
from tests.support.chat_app import SMALL, RunningApp, running


async def open_list(app: RunningApp) -> None:
    await app.until(lambda: isinstance(app.app.screen, CommandPalette) and "Load " in app.screen_text)


@pytest.mark.parametrize("size", [SMALL, (60, 20)])
async def test_a_click_on_the_models_name_lists_the_others_and_enter_loads_one(size: tuple[int, int]) -> None:
    async with running(size=size) as app:
        await app.ready()
        await app.pilot.click(StatusLine, offset=(app.status.index("Qwen"), 0))
        await open_list(app)
        assert "Qwen2.5-1.5B" not in "".join(row for row in app.screen_text.splitlines() if "Load " in row)
        await app.press("enter")
        await app.until(lambda: len(app.backend.loads) == 2 and not app.chat.busy)
        assert is_demo(app.backend.loads[-1][0])


async def test_enter_in_the_same_moment_as_the_text_loads_what_the_text_names() -> None:
    async with running() as app:
        await app.ready()
        await app.press("alt+m")
        await open_list(app)
        rows = [row for row in app.screen_text.splitlines() if "Load " in row]
        assert "Q4_K_M" not in rows[0]  # what Enter would load without the text
        for key in (*"q4_k_m", "enter"):  # in one read
            app.app.simulate_key(key)
        await app.until(lambda: len(app.backend.loads) == 2 and not app.chat.busy)
        assert "q4_k_m" in app.backend.loads[-1][0].name


async def test_escape_leaves_the_list_of_models_and_loads_none() -> None:
    async with running() as app:
        await app.ready()
        await app.press("alt+m")
        await open_list(app)
        await app.press("escape")
        await app.until(lambda: app.app.screen is app.chat)
        assert len(app.backend.loads) == 1
        await app.pilot.click(StatusLine, offset=(app.app.size.width - 3, 0))  # not on the name
        assert app.app.screen is app.chat
