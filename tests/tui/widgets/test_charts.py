"""Tests bars and curves: read from zero, never a layout."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.tui.widgets.charts import bar, big_digits, braille, nice_max, over_time


def drawn(fraction: float, width: int, *peaks: float) -> str:
    return "".join(text for text, _ in bar(fraction, width, *peaks))


def test_bar_in_eighths_of_a_cell_with_peaks() -> None:
    for fraction, text in (
        (0.0, "────"), (0.5, "██──"), (1.0, "████"), (0.6, "██▍─"), (1e-9, "▏───"), (2.0, "████"), (-1.0, "────"),
        (math.nan, "────"),
    ):  # fmt: skip
        assert drawn(fraction, 4) == text
    assert drawn(0.25, 4, 0.75) == "█──╎" and drawn(1.0, 4, 1.0) == "███╎" and drawn(0.25, 4, 0.5, 0.75) == "█─╎╎"
    assert [part for _, part in bar(0.25, 4, 0.75)] == ["fill", "track", "peak"]


@given(st.floats(allow_nan=True), st.integers(0, 50), st.lists(st.floats(0, 1)))
def test_bar_has_its_width(fraction: float, width: int, peaks: list[float]) -> None:
    assert len(drawn(fraction, width, *peaks)) == width


def test_large_digits_are_rectangles_of_half_blocks() -> None:
    assert big_digits("7.1") == ["▀▀█   ▄█ ", "▄▀     █ ", "▀   ▀ ▀▀▀"]
    assert len({len(row) for row in big_digits("1,407.689%")}) == 1
    assert big_digits("") == ["", "", ""]


def test_nice_max() -> None:
    for value, top in ((0, 1), (0.3, 0.5), (1, 1), (1.1, 2), (41.3, 50), (51, 100), (262, 500), (math.inf, 1)):
        assert nice_max(value) == pytest.approx(top)


def test_time_has_a_fixed_scale() -> None:
    assert over_time([1.0] * 30, 120, 40) == [1.0] * 10
    assert over_time([1.0, 2.0], 2, 4) == [1.0, 1.0, 2.0, 2.0]
    assert over_time([5.0], 120, 40) == [5.0]
    assert over_time([], 120, 40) == []


def test_braille_starts_at_zero_and_ends_at_the_right() -> None:
    assert braille([0, 0, 0, 0], 2, 1, 10) == ["⣀⣀"]
    assert braille([10, 10], 2, 1, 10) == ["\u2800⣿"]
    assert braille([10], 1, 2, 10) == ["⢸", "⢸"]
    assert braille([0, 10], 1, 1, 10) == ["⣸"]
    assert braille([], 2, 2, 1) == ["\u2800\u2800"] * 2


@given(st.lists(st.floats(0, 1e6), max_size=300), st.integers(1, 60), st.integers(1, 8))
def test_braille_has_its_size(values: list[float], columns: int, rows: int) -> None:
    picture = braille(values, columns, rows, nice_max(max(values, default=0)))
    assert [len(row) for row in picture] == [columns] * rows
