"""Tests columns on the command line."""

from __future__ import annotations

from cpuchat.present.table import table


def test_cells_are_aligned_cleaned_and_empty_columns_left_out() -> None:
    rows = [("NAME", "HERE", "SIZE", "NOTE"), ("a", "", "1.5 GB", "x\x1b[2J\n"), ("longer", "", "80 MB", "")]
    assert table(rows, right=(2,)) == ["NAME      SIZE  NOTE", "a       1.5 GB  x␛[2J", "longer   80 MB"]


def test_columns_are_left_out_one_by_one_where_lines_are_too_long() -> None:
    rows = [("NAME", "SIZE", "USED"), ("a", "1.5 GB", "today")]
    whole = table(rows)
    assert table(rows, width=19, drop=(2, 1)) == whole and len(whole[1]) == 19
    assert table(rows, width=18, drop=(2, 1)) == table(rows, width=12, drop=(2, 1)) == ["NAME  SIZE", "a     1.5 GB"]
    assert table(rows, width=11, drop=(2, 1)) == ["NAME", "a"]
