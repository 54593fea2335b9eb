"""Tests how a quality loss is put into words."""

from __future__ import annotations

import numpy as np
import pytest

from cpuchat.present import quality
from cpuchat.quality.statistics import Scores, Summary, summarize


def summary(*shares: float, n: int = 200) -> Summary:
    """Windows of `n` positions with these shares of equal tokens."""
    flat = np.full(n, 0.1, np.float32)
    return summarize([Scores(flat, flat, flat, (np.arange(n) < share * n).astype(np.float32)) for share in shares])


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((1, 1, 1), "none of 600 tokens would differ: indistinguishable"),
        ((0.98,), "about 1 token in 50 would differ: indistinguishable"),
        ((0.95, 0.95, 0.95, 0.95), "about 1 token in 20 would differ (1 in 15 to 1 in 27): slight"),
        ((0.86, 0.86, 0.86, 0.86), "about 1 token in 7 would differ (1 in 6 to 1 in 8): noticeable"),
        ((0.85, 0.95, 0.9, 0.94), "about 1 token in 11 would differ (1 in 5 to 1 in 25): noticeable to slight"),
        ((0.5, 0.5), "about 1 token in 2 would differ (1 in 2 to 1 in 2): clear"),
    ],
)
def test_a_share_in_words(shares: tuple[float, ...], words: str) -> None:
    assert quality.in_words(summary(*shares)) == words.replace(" (1 in 2 to 1 in 2)", "")
