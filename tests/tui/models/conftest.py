from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_hub_but_a_local_one(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Set offline mode, except for tests with a local hub."""
    if "hub_server" not in request.fixturenames:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
