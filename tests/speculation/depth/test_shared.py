"""Tests how far the drafts of several answers are verified in one pass."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import pytest

from cpuchat.speculation.depth.shared import shared_depth

FLAT = (50.0,) * 32
STEEP = tuple(10.0 * n for n in range(1, 33))
STEPS = tuple(50.0 if n <= 8 else 200.0 for n in range(1, 33))


def sure(n: int, rate: float = 0.95) -> list[float]:
    return list(accumulate([rate] * n, mul))


def depth(
    drafts: list[list[float]], pass_ms: tuple[float, ...], n_lanes: int = 0, max_depth: int = 31, max_rows: int = 32
) -> int:
    return shared_depth(drafts, pass_ms, n_lanes or len(drafts), max_depth, max_rows)


@pytest.mark.parametrize(
    ("pass_ms", "drafts", "expected"),
    [
        (FLAT, [sure(12), sure(12)], 12),
        (FLAT, [sure(3), sure(12)], 12),  # one is done earlier, the other goes on
        (FLAT, [sure(12, 0.01), sure(12, 0.01)], 0),  # nearly nothing to gain
        (STEEP, [sure(12), sure(12)], 0),
        (STEPS, [sure(12), sure(12)], 3),  # eight tokens in all
        (STEPS, [sure(12)], 7),
        (FLAT, [[], []], 0),
        ((), [sure(12)], 0),  # not calibrated
    ],
)
def test_the_depth_with_the_most_tokens_for_the_time(
    pass_ms: tuple[float, ...], drafts: list[list[float]], expected: int
) -> None:
    assert depth(drafts, pass_ms) == expected


def test_a_draft_pays_for_the_lanes_without_one() -> None:
    rising = tuple(40.0 + 5.0 * n for n in range(1, 33))
    depths = [depth([sure(31), *[[]] * others], rising) for others in (0, 1, 3, 7)]
    assert depths == sorted(depths, reverse=True) and depths[0] > depths[1] > 0 == depths[-1]
    assert depth([sure(31)], rising, n_lanes=8) < depths[0]  # idle ones between


def test_it_ends_at_the_rows_and_the_room_of_a_pass() -> None:
    assert depth([sure(31)] * 4, FLAT) == 7
    assert depth([sure(31)] * 4, FLAT, max_rows=20) == 4
    assert depth([sure(31)] * 4, FLAT, max_depth=2) == 2
    assert depth([sure(31)] * 4, FLAT, max_depth=-1) == 0


def test_a_pass_longer_than_the_calibrated_ones_takes_as_much_more() -> None:
    assert depth([sure(31, 1.0), *[[]] * 7], FLAT, max_rows=64) == 3  # 32 tokens
