"""Tests everything about one model on a page."""

from __future__ import annotations

from cpuchat.base import paths
from cpuchat.base.errors import ModelDamaged
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.tui.models.reader import InspectionScreen
from tests.support.chat_app import SMALL, RunningApp, running
from tests.support.snapshots import snapshot

DEMO = paths.demo_dir() / DEMO_FILES["demo"]


async def opened(app: RunningApp, header: GGUFHeader) -> InspectionScreen:
    await app.ready()
    screen = InspectionScreen("a model", lambda: header)
    await app.app.push_screen(screen)
    await app.until(lambda: screen.query(".rows"))
    return screen


async def test_the_page_ends_with_the_chat_template() -> None:
    async with running(size=SMALL) as app:
        await opened(app, read_model(DEMO))
        await app.press("end")
        await app.until(lambda: "<|im_start|>" in app.screen_text)
        await app.press("escape")
        await app.until(lambda: app.app.screen is app.chat)


async def test_a_file_that_cannot_be_read_says_why() -> None:
    def broken() -> GGUFHeader:
        raise ModelDamaged("x\x1b.gguf is cut short.", "Download it again.")

    async with running(size=SMALL) as app:
        await app.ready()
        await app.app.push_screen(InspectionScreen("x", broken))
        await app.until(lambda: "x␛.gguf is cut short. Download it again." in app.screen_text)


async def test_snapshots() -> None:
    async with running(size=SMALL) as app:
        await opened(app, read_model(DEMO))
        await app.pilot.pause()
        await snapshot(app.app, "inspection-80x24")
