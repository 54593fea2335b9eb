"""Provides fixtures of these tests."""

from __future__ import annotations

import pytest

from cpuchat.hardware.placement.cores import BusyCores
from cpuchat.tui.chat.probes import PassProbe
from tests.support import idle

idle.install()


@pytest.fixture(autouse=True)
def on_a_measured_machine(measured_machine: None) -> None:
    """Avoid the bandwidth measurement: every test here may load models."""


@pytest.fixture(autouse=True)
def without_idle_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the probe, which begins after some idle seconds, out of tests that take long on a busy machine."""
    monkeypatch.setattr(PassProbe, "CHECK_SECONDS", 3600.0)


@pytest.fixture(autouse=True)
def on_idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what waits for idle cores begin while tests keep them busy."""
    monkeypatch.setattr(BusyCores, "since_last", lambda self, cpus: 0.0)


@pytest.fixture
def drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw screens whenever they change, as in a terminal."""
    idle.draw_at_once(monkeypatch)
