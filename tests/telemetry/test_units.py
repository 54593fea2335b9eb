"""Tests figures as people read them."""

from __future__ import annotations

import datetime

import pytest

from cpuchat.telemetry import units


@pytest.mark.parametrize(
    ("count", "shown"),
    [(12, "12"), (494_032_768, "494M"), (999_600_000, "1.0B"), (7_615_616_512, "7.6B"),
     (70_553_706_496, "70.6B"), (671_026_419_200, "671B")],
)  # fmt: skip
def test_parameters_are_counted_as_names_of_models_do(count: int, shown: str) -> None:
    assert units.parameters(count) == shown


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(0.041, "0.04"), (0.1, "0.1"), (7.31, "7.3"), (9.94, "9.9"), (9.96, "10"), (41.3, "41"), (1407.2, "1,407")],
)
def test_a_prediction_has_no_more_digits_than_it_is_good_for(rate: float, shown: str) -> None:
    assert units.about(rate) == shown


@pytest.mark.parametrize(
    ("used", "size", "shown"),
    [(0, 8192, "0/8k"), (48, 8192, "48/8k"), (1024, 8192, "1k/8k"), (8100, 8192, "7.9k/8k"), (8192, 8192, "8k/8k"),
     (200, 256, "200/256"), (31_500, 32_000, "31.5k/32k"), (131_072, 131_072, "128k/128k")],
)  # fmt: skip
def test_a_context_is_never_fuller_than_it_is_long(used: int, size: int, shown: str) -> None:
    assert units.context(used, size) == shown


NOW = datetime.datetime(2026, 3, 10, 12).timestamp()


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0"), (950, "950"), (1000, "1.0k"), (12_345, "12.3k"), (99_960, "100k"), (999_499, "999k"),
     (999_500, "1.0M"), (1_234_567, "1.2M"), (234_000_000, "234M")],
)  # fmt: skip
def test_counts_have_five_characters_at_most(number: int, words: str) -> None:
    assert units.count(number) == words and len(words) <= 5


@pytest.mark.parametrize(
    ("then", "words"),
    [(0.0, "never"), (NOW, "today"), (NOW - 12 * 3600 - 60, "yesterday"), (NOW - 30 * 86400, "30 days ago"),
     (NOW + 86400, "today")],
)  # fmt: skip
def test_when_that_was(then: float, words: str) -> None:
    assert units.ago(then, NOW) == words


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (999, "999 B"), (99_960, "100 kB"), (999_600, "1.0 MB"), (18_100_000, "18.1 MB"),
        (1_500_000_000, "1.5 GB"), (621_000_000_000, "621 GB"), (2_400_000_000_000, "2.4 TB"),
    ],
)  # fmt: skip
def test_sizes(n_bytes: int, text: str) -> None:
    assert units.size(n_bytes) == text
