"""Tests that no widget stays that is gone."""

from __future__ import annotations

import asyncio
import gc
import weakref

from textual.app import App
from textual.widgets import Label

from cpuchat.tui.terminal import painter
from tests.support.chat_app import HANG_GUARD


async def test_what_a_removed_widget_had_drawn_is_freed(drawn_at_once: None) -> None:
    painter.keep()
    async with App[None]().run_test() as pilot:
        label = Label("drawn")
        await pilot.app.mount(label)
        await pilot.pause()
        drawn = weakref.ref(label._styles_cache)
        assert label._styles_cache._cache
        await label.remove()
        del label
        await pilot.app.mount(Label("the last one is remembered"))
        async with asyncio.timeout(HANG_GUARD):
            while gc.collect() >= 0 and drawn() is not None:  # messages to it may still be under way
                await pilot.pause()
