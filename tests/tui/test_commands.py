"""Tests what the command palette finds, and that a key of the table is everywhere."""

from __future__ import annotations

import pytest
from textual.app import App, ComposeResult
from textual.screen import Screen

from cpuchat.tui import keys
from cpuchat.tui.commands import matches, offered
from cpuchat.tui.help import key_sections
from cpuchat.tui.widgets.key_footer import KeyFooter

COMMANDS = [(key.title, key.found_by, None) for key in keys.KEYS if key.palette and key.place in ("chat", "app")]


def test_commands_are_found_by_all_of_the_words() -> None:
    for query, expected in (
        ("theme", {"Choose the theme"}),
        ("DRAFTING toggle", {"Toggle drafting from the next answer on"}),
        ("view the", {"Cycle the figures: in brief, all, hidden", "Toggle the chat list", "Choose the theme"}),
        ("xyz", set[str]()),
    ):
        assert {title for _, title, _ in matches(query, COMMANDS)} == expected


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("cpu", "Show topology, placement and read bandwidth"),
        ("voice", "Toggle reading answers aloud while they are written"),
        ("temperature", "Change settings"),
        ("retry", "Regenerate"),
        ("load", "Choose, download or delete models"),
        ("shortcuts", "Explain keys and figures"),
        ("thinking", "Change this chat: system prompt, sampling, reasoning, context, tools"),
    ],
)
def test_users_words_find_commands(query: str, first: str) -> None:
    assert first in [title for _, title, _ in matches(query, COMMANDS)]


def test_titles_come_before_groups() -> None:
    rows = [("Plan", "Theme", 1), ("Themes", "App", 2), ("The memory", "App", 3)]
    assert [row for _, _, row in sorted(matches("theme", rows), reverse=True)] == [2, 1]


def test_a_word_of_the_title_comes_before_a_part_of_one() -> None:
    rows = [("Load the model", "", 1), ("Delete the model", "", 2)]
    assert max(matches("del", rows))[2] == 2


async def test_a_key_of_the_table_works_and_is_in_footer_help_and_palette(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding a key is its line of the table and the action on its screen; everything else follows."""
    wave = keys.Key("toy.wave", "f9", "wave", "wave", "Wave to the user", "View", footer=True, words="greet")
    monkeypatch.setattr(keys, "KEYS", (*keys.KEYS, wave))
    waved: list[bool] = []

    class ToyScreen(keys.Keyed, Screen[None], keys="toy"):
        def compose(self) -> ComposeResult:
            yield KeyFooter()

        def action_wave(self) -> None:
            waved.append(True)

    async with App[None]().run_test(size=(80, 24)) as pilot:
        screen = ToyScreen()
        await pilot.app.push_screen(screen)
        await pilot.press("f9")
        await pilot.pause()
        assert waved == [True]
        assert [one[:3] for one in screen.query_one(KeyFooter).keys] == [("f9", "f9", "wave")]
        [(_, title, run)] = [row for row in offered(screen) if row[0].id == "toy.wave"]
        assert matches("greet", [(title, wave.found_by, None)]) and title == "Wave to the user"
        await run()
        assert waved == [True, True]
    rows = dict(key_sections(keys.moved({"toy.wave": "f8"})))["View"]
    assert ("F8", "Wave to the user", wave.found_by) in rows
