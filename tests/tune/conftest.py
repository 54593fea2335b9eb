"""Fixtures of these tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def on_a_measured_machine(measured_machine: None) -> None:
    """Every test here may load models."""
