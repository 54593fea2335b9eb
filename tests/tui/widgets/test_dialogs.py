"""Tests what dialogs and other screens that are dismissed have in common."""

from __future__ import annotations

import asyncio

from textual.app import ComposeResult
from textual.widgets import Static

from cpuchat.tui.widgets.dialogs import Dismissable
from tests.support.chat_app import running


class Reading(Dismissable[None]):
    """A screen that shows what was read; the last of its widgets goes when nothing runs for it any more."""

    def __init__(self) -> None:
        super().__init__()
        self.read = asyncio.Event()

    def compose(self) -> ComposeResult:
        yield Static(id="state")
        yield Last()

    async def show(self) -> None:
        await self.read.wait()
        self.query_one("#state", Static).update("read")


class Last(Static):
    async def on_unmount(self) -> None:
        screen = self.screen
        assert isinstance(screen, Reading)
        while screen.query("#state"):
            await asyncio.sleep(0)
        screen.read.set()
        await self.workers.wait_for_complete(worker for worker in self.workers if worker.node is screen)


async def test_what_comes_while_a_screen_closes_is_not_shown() -> None:
    async with running() as app:
        screen = Reading()
        await app.app.push_screen(screen)
        screen.run_worker(screen.show())
        await app.pilot.pause()
        screen.dismiss()
        await app.until(lambda: not screen.is_attached)
        assert not app.app.crash
