"""Tests the pane with what runs on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.config.settings import Settings
from cpuchat.hardware.bandwidth.read_bandwidth import ReadBandwidth, remember
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.tui.hardware.panels import TypicalModels
from tests.support.snapshots import HostApp


@pytest.fixture
def measured_machine() -> None:
    """Measure nothing: each test sets what was measured."""


@pytest.mark.parametrize(
    ("core_share", "reason", "speeds"),
    [
        (None, "m measures the read bandwidth", False),
        (0.3, "other programs disturbed the measurement · m repeats it", False),
        (1.0, "speeds are rough · press m for exact speeds", True),
    ],
)
async def test_speeds_are_shown_or_the_reason_is(core_share: float | None, reason: str, speeds: bool) -> None:
    if core_share is not None:
        cpus = tuple(own_cpus())
        remember(ReadBandwidth(cpus, 23.5e9, (23.5e9,), (core_share,) * len(cpus)))
    pane = TypicalModels(id="runs")
    app = HostApp(pane, css="TypicalModels { width: 100%; height: 100%; }")
    async with app.run_test(size=(120, 20)) as pilot:
        await pane.read(Settings(), None, Path("/")).wait()
        await pilot.pause()
        assert (reason in str(pane.border_subtitle)) if reason else not pane.border_subtitle
        shown = "\n".join(strip.text for strip in app.screen._compositor.render_strips())
        assert "8B" in shown
        assert ("tok/s" in shown) is speeds
