"""Tests that text fields take a grapheme cluster as one character: cursor, deletion, selection, mouse, wrapping."""

from __future__ import annotations

from random import Random

import pytest
from textual import events
from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.widgets import Input, TextArea

from cpuchat.base.text import cluster_edge, clusters
from cpuchat.tui.widgets import graphemes
from cpuchat.tui.widgets.prompt import PromptInput

FAMILY = "👨\u200d👩\u200d👧"
CLUSTERS = (
    FAMILY, "🇩🇪", "👍🏽", "👩🏾\u200d💻", "🏳\ufe0f\u200d🌈",
    "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "❤\ufe0f", "〽\ufe0f", "1\ufe0f\u20e3", "e\u0301\u0323", "\u1112\u1161\u11ab", "가\u11ab", "नि", "क्षि", "กำ",
    "か\u3099", "\U0001faff\u200d\U0001faff",  # not assigned yet
)  # fmt: skip


class Fields(App[None]):
    def __init__(self) -> None:
        graphemes.install()
        super().__init__()

    def compose(self) -> ComposeResult:
        yield PromptInput(lambda text: None, id="prompt")
        yield Input(compact=True, select_on_focus=False)


async def put(pilot: Pilot[None], field: TextArea | Input, text: str) -> None:
    field.focus()
    await pilot.pause()
    if isinstance(field, Input):
        field.value, field.cursor_position = text, len(text)
    else:
        field.load_text(text)
        field.move_cursor(field.document.end)


async def press(pilot: Pilot[None], *keys: str) -> None:
    """Press keys in one read, and wait until they have acted."""
    for key in keys:
        pilot.app.simulate_key(key)
    await pilot.pause()


def state(field: TextArea | Input) -> tuple[str, int]:
    """Return the text, and the column of the cursor."""
    return (field.value, field.cursor_position) if isinstance(field, Input) else (field.text, field.cursor_location[1])


@pytest.mark.parametrize("kind", [TextArea, Input])
async def test_a_cluster_is_one_character_for_every_key(kind: type[TextArea | Input]) -> None:
    app = Fields()
    async with app.run_test() as pilot:
        field = app.query_one(kind)
        for one in CLUSTERS:
            await put(pilot, field, f"a{one}{one}b")
            await press(pilot, "left", "left", "left", "right")
            assert state(field) == (f"a{one}{one}b", 1 + len(one)), one
            await press(pilot, "shift+left")
            assert field.selected_text == one
            await press(pilot, "right", "shift+right")
            assert field.selected_text == one
            await press(pilot, "left", "backspace", "delete")
            assert state(field) == ("ab", 1), one


async def test_a_combining_mark_leaves_the_cursor_after_it_and_divides_no_word() -> None:
    app = Fields()
    async with app.run_test() as pilot:
        prompt = app.query_one(PromptInput)
        await put(pilot, prompt, "कष")
        await pilot.press("left")
        prompt.post_message(events.Key("devanagari_sign_virama", "\u094d"))
        await pilot.pause()
        assert state(prompt) == ("क्ष", 3)
        await put(pilot, prompt, "नमस्ते दुनिया cafe\u0301 x")
        columns = list[int]()
        for _ in range(4):
            await pilot.press("ctrl+left")
            columns.append(state(prompt)[1])
        assert columns == [20, 14, 7, 0]


def test_a_line_is_wrapped_between_clusters() -> None:
    graphemes.install()
    for one in CLUSTERS:
        area = TextArea(one * 9)
        for width in (4, 5, 6, 7):
            area.wrapped_document.wrap(width, 4)
            offsets = area.wrapped_document.get_offsets(0)
            assert offsets and set(offsets) <= set(clusters(one * 9)), (one, width)


async def test_up_down_and_the_mouse_stay_outside_of_clusters() -> None:
    app = Fields()
    async with app.run_test() as pilot:
        prompt = app.query_one(PromptInput)
        await put(pilot, prompt, f"{FAMILY * 3}xy\nabcdefgh\n{FAMILY * 3}")
        for x, column in ((0, 0), (1, 0), (2, 5), (3, 5), (6, 15), (7, 16), (30, 17)):
            offset = (prompt.content_region.x + x, prompt.content_region.y)
            await pilot.click(offset=offset)
            assert prompt.cursor_location == (0, column)
        prompt.move_cursor((1, 5))
        await pilot.press("down")
        assert prompt.cursor_location == (2, 10)
        prompt.move_cursor((1, 3))
        await pilot.press("up")
        assert prompt.cursor_location == (0, 5)


def test_edges_of_clusters() -> None:
    assert clusters("") == (0,) and clusters("ab") == (0, 1, 2)
    assert clusters("🇩🇪🇫🇷🇯") == (0, 2, 4, 5)
    assert [cluster_edge("a🇩🇪b", at) for at in range(5)] == [0, 1, 1, 3, 4]
    assert [cluster_edge("a🇩🇪b", at, forward=True) for at in range(5)] == [0, 1, 3, 3, 4]
    assert clusters("\u200d👩") == (0, 1, 2)  # a joiner that joins nothing
    assert clusters("漢字、かな") == (0, 1, 2, 3, 4, 5)


async def test_any_keys_in_any_place_edit_a_text() -> None:
    """Deleting the last line whole names a place behind it."""
    app, random = Fields(), Random(7)
    keys = ["ctrl+shift+k", "delete", "backspace", "up", "down", "left", "right", "home", "end", "f7", "f6", "x"]
    keys += [f"ctrl+{one}" for one in (*"kuwfa", "left", "right")]
    keys += [f"shift+{one}" for one in ("up", "down", "left", "end")]
    async with app.run_test(size=(20, 8)) as pilot:
        for kind in (TextArea, Input):
            field = app.query_one(kind)
            for text in ("", "é", "👩🏾\u200d💻🇩🇪", "ab\nकि ü\n\n🇩🇪" if kind is TextArea else "ab कि ü 🇩🇪"):
                await put(pilot, field, text)
                await press(pilot, "ctrl+shift+k", *random.choices(keys, k=40))
                assert app.is_running
