"""Tests columns on the command line."""

from __future__ import annotations

from cpuchat.present.table import table


def test_cells_are_aligned_cleaned_and_empty_columns_left_out() -> None:
    rows = [("NAME", "HERE", "SIZE", "NOTE"), ("a", "", "1.5 GB", "x\x1b[2J\n"), ("longer", "", "80 MB", "")]
    assert table(rows, right=(2,)) == ["NAME      SIZE  NOTE", "a       1.5 GB  x␛[2J", "longer   80 MB"]
