"""Tests the proofs of the hardware screen with a real worker."""

from __future__ import annotations

import pytest

from cpuchat.backend.local import LocalBackend
from cpuchat.base import paths
from cpuchat.config.settings import Settings
from cpuchat.models.library.library import Library
from cpuchat.tui.hardware.screen import HardwareScreen
from cpuchat.tui.hardware.why import WhyScreen
from cpuchat.tune.halving import Speed
from cpuchat.tune.measurer import Measurer
from tests.support.chat_app import SMALL, WIDE, running
from tests.support.hardware_screen import opened
from tests.support.tuning import make_up_speeds, without_flash_attention


async def test_settings_are_proven_and_their_worth_measured_and_the_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch, measured_machine: None
) -> None:
    async def first(self: Measurer, chosen: Settings) -> Speed:
        return Speed(prefill=100, decode=(20,))

    make_up_speeds(monkeypatch, without_flash_attention)
    monkeypatch.setattr(Measurer, "first", first)
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
        await app.press("m")
        await app.until(lambda: "over off" in app.screen_text and not app.chat.busy)
        await app.pilot.resize_terminal(160, 50)
        await app.until(lambda: "± two standard errors" in " ".join(app.screen_text.split()))
        assert app.conversation.backend.model is None, "it makes room for what is measured"
        await app.press("escape")
        await app.until(lambda: isinstance(app.app.screen, HardwareScreen))
        await app.until(lambda: app.conversation.backend.model is not None and not app.chat.busy)
        await app.press("escape")
        await app.send("And why?")
        assert app.stored()[: len(messages)] == messages and len(app.stored()) == len(messages) + 2
