"""Tests how a quality loss is put into words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpuchat.present import quality
from cpuchat.quality.statistics import Scores, Summary, published_family, summarize


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
        ((0.5, 0.5), "about 1 token in 2 would differ (1 in 2 to 1 in 2): clear"),
    ],
)
def test_a_share_in_words(shares: tuple[float, ...], words: str) -> None:
    assert quality.in_words(summary(*shares)) == words.replace(" (1 in 2 to 1 in 2)", "")


def test_an_interval_over_a_threshold_names_both_words() -> None:
    assert quality.in_words(summary(0.85, 0.95, 0.9, 0.94)).endswith(": noticeable to slight")


def loss(found: Summary, name: str = "Llama-3-8B-Instruct") -> Any:
    header = SimpleNamespace(name=name, quantization="Q4_K_M")
    return SimpleNamespace(header=header, summary=lambda: found, path=SimpleNamespace(stem=name))


@pytest.mark.parametrize("width", [40, 72, 200])
def test_the_strip_has_the_file_and_published_values_in_their_places(width: int) -> None:
    line, ends, own, published = quality.strip(loss(summary(0.5, 0.5)), width)
    assert len(line) == len(ends) == min(width, 72)
    assert abs(line.index("●") - 0.5 * len(line)) <= 1
    assert line.index("●") < line.index("2") < line.index("4") < line.index("8")
    assert ends.startswith("0 %") and ends.endswith("100 %") and own.startswith("● Q4_K_M 50.0 %")
    assert "4 Q4_K_M 91.9 %" in published and "llama.cpp" in published


def test_values_of_the_same_family_are_shown_and_else_those_of_the_best_known_one() -> None:
    assert {row.model for row in published_family("llama-2-7b-chat")} == {"Llama-2-7B"}
    assert {row.model for row in published_family("some other model")} == {"Llama-3-8B"}
    assert {row.model for row in published_family("Qwen3-4B-Instruct-2507")} == {"Llama-3-8B"}  # without such shares
