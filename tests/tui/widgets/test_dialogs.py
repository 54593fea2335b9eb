"""Tests screens that are dismissed."""

from __future__ import annotations

import asyncio

from textual.app import ComposeResult
from textual.widgets import Static
from textual.worker import Worker

from cpuchat.tui.threads import result_of
from cpuchat.tui.widgets.dialogs import Dismissable
from tests.support.chat_app import running


class Slow(Static):
    """Is removed after the first of its siblings, and looks at what the screen's worker does meanwhile."""

    async def on_unmount(self) -> None:
        assert isinstance(self.screen, Reading)
        while self.screen.query("#first"):
            await asyncio.sleep(0)
        self.screen.read.set()
        await result_of(self.screen.reading)


class Reading(Dismissable[str]):
    reading: Worker[None]

    def __init__(self) -> None:
        super().__init__()
        self.read = asyncio.Event()

    def compose(self) -> ComposeResult:
        yield Static(id="first")
        yield Slow()

    def on_mount(self) -> None:
        self.reading = self.run_worker(self._show())

    async def _show(self) -> None:
        await self.read.wait()
        self.query_one("#first", Static).update("read")


async def test_the_workers_of_a_dismissed_screen_end_before_its_widgets_but_for_the_one_that_dismisses() -> None:
    async with running() as app:
        await app.ready()
        answers = list[str | None]()
        after = asyncio.Event()

        async def dismiss(screen: Reading) -> None:
            screen.dismiss("done")
            await asyncio.sleep(0)
            after.set()

        await app.app.push_screen(screen := Reading(), answers.append)
        await app.until(lambda: screen._is_open)
        screen.run_worker(dismiss(screen))
        await app.until(lambda: not screen.is_attached)
        assert answers == ["done"] and after.is_set()
        assert screen.reading.is_cancelled and app.app.screen is app.chat
