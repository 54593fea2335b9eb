"""Tests speed from readings of a counter."""

from __future__ import annotations

import pytest

from cpuchat.models.downloads.state import WINDOW, TransferRate


def test_it_is_the_mean_of_the_last_seconds() -> None:
    rate = TransferRate()
    for second in range(60):
        rate.add(second, 1000 * second)
    assert rate.per_second == pytest.approx(1000)
    for second in range(60, 60 + int(WINDOW)):
        rate.add(second, 59_000)
    assert rate.per_second == pytest.approx(0, abs=1000 / WINDOW)
