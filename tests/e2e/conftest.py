"""Provides fixtures of these tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def on_a_measured_machine(measured_machine: None, one_core: None) -> None:
    """Avoid the bandwidth measurement: every test here may load models, on one core."""
