"""A machine with made-up speeds for tuning: settings are as fast as a test says, and nothing is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cpuchat.config.settings import Settings
from cpuchat.tune.candidates import TuningChoice
from cpuchat.tune.measurer import Measurer, Speed

Factors = Callable[[Settings], tuple[float, float]]
"""Factors of prefill and decoding with these settings."""


def make_up_speeds(monkeypatch: pytest.MonkeyPatch, factors: Factors, but: str = "") -> None:
    """Give every setting the speed that `factors` says, of 100 tok/s prefill and 20 tok/s decoding; all but `but`."""
    really = Measurer.measure

    async def measure(self: Measurer, chosen: Settings, choice: TuningChoice, draft: str) -> Speed:
        if choice.name == but:
            return await really(self, chosen, choice, draft)
        await asyncio.sleep(0)  # as a measurement, let others run
        prefill, decode = factors(chosen)
        return Speed(prefill=100 * prefill, decode=(20 * decode,))

    monkeypatch.setattr(Measurer, "measure", measure)


def without_flash_attention(chosen: Settings) -> tuple[float, float]:
    """Make flash attention cost a fifth of the prefill."""
    return 1.25 if chosen.engine.flash_attn == "off" else 1.0, 1.0
