"""Tests the prompt: what Enter sends, the order of keys, and the history."""

from __future__ import annotations

from textual.app import ComposeResult

from cpuchat.tui.terminal.driver import OrderedKeys
from cpuchat.tui.widgets.prompt import PromptInput


class Host(OrderedKeys[None]):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []

    def compose(self) -> ComposeResult:
        yield PromptInput(self.take, id="prompt")

    def take(self, text: str) -> None:
        self.sent.append(text)
        self.query_one(PromptInput).accept()


async def test_enter_sends_what_was_typed_before_it_and_other_keys_make_a_line() -> None:
    app = Host()
    async with app.run_test() as pilot:
        prompt = app.query_one(PromptInput)
        await pilot.press("enter", "space", "enter", "ctrl+j", "enter")
        assert app.sent == []  # blank text is not sent
        prompt.clear()
        await pilot.press("ctrl+j")
        assert not prompt.text
        for key in (*"one", "ctrl+j", *"two", "enter", *"second"):  # as they come while the app is busy
            app.simulate_key(key)
        await pilot.pause()
        assert app.sent == ["one\ntwo"] and prompt.text == "second"
        prompt.clear()
        for key in (*"wurld", *["left"] * 4, "delete", "o", "end", *"!?", "backspace", "home", *"o "):
            app.simulate_key(key)
        await pilot.pause()
        assert prompt.text == "o world!"
        prompt.clear()
        await pilot.press("a", "shift+enter", "b")  # where the terminal tells it
        assert prompt.text == "a\nb"


async def test_arrows_walk_through_history_and_back_to_the_draft() -> None:
    app = Host()
    async with app.run_test() as pilot:
        prompt = app.query_one(PromptInput)
        prompt.begin_chat(["first", "second"], "")
        await pilot.press(*"draft")
        for key, text in zip(
            ("up", "up", "up", "down", "down", "down"), ("second", "first", "first", "second", "draft", "draft"),
            strict=True,
        ):  # fmt: skip
            await pilot.press(key)
            assert prompt.text == text
        prompt.clear()
        await pilot.press("a", "ctrl+j", "b", "up")  # inside a text of several lines
        assert prompt.text == "a\nb" and prompt.cursor_location[0] == 0
        await pilot.press("up")
        assert prompt.text == "second"
        await pilot.press("down", "enter", "up")  # what was sent can be called back
        assert prompt.text == app.sent[-1]
