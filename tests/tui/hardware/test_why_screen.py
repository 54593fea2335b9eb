"""Tests the proofs of the hardware screen with a real worker."""

from __future__ import annotations

from cpuchat.backend.local import LocalBackend
from cpuchat.base import paths
from cpuchat.models.library.library import Library
from cpuchat.tui.hardware.screen import HardwareScreen
from cpuchat.tui.hardware.why import WhyScreen
from tests.support.chat_app import SMALL, WIDE, running
from tests.support.hardware_screen import opened


async def test_settings_are_proven_and_the_chat_goes_on(measured_machine: None) -> None:
    async with running(LocalBackend(state_dir=paths.kv_dir()), model=Library([]).resolve("demo-q4")) as app:
        await app.ready()
        await app.send("Why does a CPU write slower than it reads the prompt?")
        messages = app.stored()
        await opened(app)
        await app.press("p")
        await app.until(lambda: isinstance(app.app.screen, WhyScreen) and "works" in app.screen_text)
        for size in (SMALL, WIDE):
            await app.pilot.resize_terminal(*size)
            await app.until(lambda: "in 7 of 7 attention nodes of the graph" in " ".join(app.screen_text.split()))
        await app.press("escape")
        await app.until(lambda: isinstance(app.app.screen, HardwareScreen))
        await app.press("escape")
        await app.send("And why?")
        assert app.stored()[: len(messages)] == messages and len(app.stored()) == len(messages) + 2
