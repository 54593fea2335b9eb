"""Tests figures as people read them."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest

from cpuchat.telemetry import units

NOW = datetime.datetime(2026, 3, 10, 12).timestamp()


def ago(then: float) -> str:
    return units.ago(then, NOW)


@pytest.mark.parametrize(
    ("words", "figures", "shown"),
    [
        (units.parameters, (12, 494_032_768, 999_600_000, 7_615_616_512), "12 494M 1.0B 7.6B"),
        (units.parameters, (70_553_706_496, 671_026_419_200), "70.6B 671B"),
        # A prediction has no more digits than it is good for.
        (units.about, (0.041, 0.1, 7.31, 9.94, 9.96, 41.3, 1407.2), "0.04 0.1 7.3 9.9 10 41 1,407"),
        (units.count, (0, 950, 1000, 12_345, 99_960, 999_499), "0 950 1.0k 12.3k 100k 999k"),
        (units.count, (999_500, 1_234_567, 234_000_000), "1.0M 1.2M 234M"),
        (ago, (0.0, NOW, NOW - 12 * 3600 - 60), "never today yesterday"),
        (ago, (NOW - 30 * 86400, NOW + 86400), "30 days ago today"),
        (units.size, (999, 99_960, 999_600, 18_100_000), "999 B 100 kB 1.0 MB 18.1 MB"),
        (units.size, (1_500_000_000, 621_000_000_000, 2_400_000_000_000), "1.5 GB 621 GB 2.4 TB"),
    ],
)  # fmt: skip
def test_figures(words: Callable[[float], str], figures: tuple[float, ...], shown: str) -> None:
    assert " ".join(map(words, figures)) == shown


@pytest.mark.parametrize(
    ("used", "size", "shown"),
    [(0, 8192, "0/8k"), (48, 8192, "48/8k"), (1024, 8192, "1k/8k"), (8100, 8192, "7.9k/8k"), (8192, 8192, "8k/8k"),
     (200, 256, "200/256"), (31_500, 32_000, "31.5k/32k"), (131_072, 131_072, "128k/128k")],
)  # fmt: skip
def test_a_context_is_never_fuller_than_it_is_long(used: int, size: int, shown: str) -> None:
    assert units.context(used, size) == shown
