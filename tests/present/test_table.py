"""Tests columns on the command line."""

from __future__ import annotations

from cpuchat.present.table import table


def test_cells_stand_below_each_other_and_numbers_end_at_the_same_place() -> None:
    rows = [("NAME", "SIZE", "NOTE"), ("a", "1.5 GB", "x"), ("longer", "80 MB", "")]
    assert table(rows, right=(1,)) == [
        "NAME      SIZE  NOTE",
        "a       1.5 GB  x",
        "longer   80 MB",
    ]


def test_a_column_without_content_is_left_out() -> None:
    assert table([("NAME", "HERE", "SIZE"), ("a", "", "1")]) == ["NAME  SIZE", "a     1"]


def test_what_a_terminal_would_obey_is_replaced_and_counts_with_its_width() -> None:
    assert table([("A", "B"), ("x\x1b[2J\n", "y")]) == ["A      B", "x␛[2J  y"]


def test_the_last_column_is_wrapped_where_there_is_room() -> None:
    rows = [("A", "WHY"), ("x", "too little memory here")]
    assert table(rows, width=18) == ["A  WHY", "x  too little", "   memory here"]
    assert table(rows, width=10) == table(rows)
