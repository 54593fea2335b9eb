"""Tests what the command palette finds."""

from __future__ import annotations

import pytest
from textual.fuzzy import Matcher

from cpuchat.tui import keys
from cpuchat.tui.commands import matches

COMMANDS = [
    (key.help.partition(" (")[0], key.found_by, None)
    for key in keys.KEYS
    if key.palette and key.place in ("chat", "app")
]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("theme", {"Change theme"}),  # and nothing that has only its letters
        ("DRAFT cycle", {"Cycle drafting: auto, always, off; from the next answer"}),
        ("view the", {"Toggle the figures", "Change theme", "Toggle the chat list"}),
        ("help", {"Explain keys and figures"}),
        ("tour", {"Take the tour"}),
        ("chngthm", {"Change theme"}),
        ("xyz", set[str]()),
    ],
)
def test_commands_are_found_by_their_words_and_else_by_their_letters(query: str, expected: set[str]) -> None:
    assert {title for _, title, _ in matches(Matcher(query), COMMANDS)} == expected


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("hardware", "Show topology, placement and read bandwidth"),
        ("cpu", "Show topology, placement and read bandwidth"),
        ("voice", "Toggle reading answers aloud while they are written"),
        ("dark", "Change theme"),
        ("temperature", "Change settings"),
        ("system prompt", "Change settings"),
        ("preferences", "Change settings"),
        ("retry", "Regenerate"),
        ("clipboard", "Copy the last answer or the selected message"),
        ("load", "Choose, download or delete models"),
        ("shortcuts", "Explain keys and figures"),
        ("thinking", "Choose reasoning for this chat…"),
        ("exit", "Quit"),
    ],
)
def test_users_words_find_commands(query: str, first: str) -> None:
    found = matches(Matcher(query), COMMANDS)
    assert first in [title for score, title, _ in found if score >= 1000]  # by words, not by scattered letters


def test_titles_come_before_groups() -> None:
    rows = [("Plan", "Theme", 1), ("Themes", "App", 2), ("The memory", "App", 3)]
    found = sorted(matches(Matcher("theme"), rows), reverse=True)
    assert [row for _, _, row in found] == [2, 1]
    assert [row for _, _, row in matches(Matcher("tmm"), rows)] == [3]
    assert matches(Matcher("tmm"), rows, fuzzy=False) == []
