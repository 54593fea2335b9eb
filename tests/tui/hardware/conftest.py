"""The hardware screen's machines are simulated: no passes can be measured on them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuchat.bench.cost_probe.cases", lambda: [])
