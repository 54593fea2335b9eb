"""Small figures in words."""

from __future__ import annotations

import datetime

import pytest

from cpuchat.tui import wording

NOW = datetime.datetime(2026, 3, 10, 12).timestamp()


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0"), (950, "950"), (1000, "1.0k"), (12_345, "12.3k"), (99_960, "100k"), (999_499, "999k"),
     (999_500, "1.0M"), (1_234_567, "1.2M"), (234_000_000, "234M")],
)  # fmt: skip
def test_counts_have_five_characters_at_most(number: int, words: str) -> None:
    assert wording.count(number) == words and len(words) <= 5


@pytest.mark.parametrize(
    ("then", "words"),
    [(0.0, "never"), (NOW, "today"), (NOW - 12 * 3600 - 60, "yesterday"), (NOW - 30 * 86400, "30 days ago"),
     (NOW + 86400, "today")],
)  # fmt: skip
def test_when_that_was(then: float, words: str) -> None:
    assert wording.ago(then, NOW) == words
