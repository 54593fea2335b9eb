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


async def test_enter_sends_and_ctrl_j_makes_a_line() -> None:
    app = Host()
    async with app.run_test() as pilot:
        await pilot.press(*"one", "ctrl+j", *"two", "enter")
        await pilot.pause()
        assert app.sent == ["one\ntwo"]
        assert app.query_one(PromptInput).text == ""


async def test_enter_does_not_overtake_what_was_typed_before_it() -> None:
    app = Host()
    async with app.run_test() as pilot:
        for key in (*"one", "ctrl+j", *"two", "enter"):  # as they come from a fast typist while the app is busy
            app.simulate_key(key)
        await pilot.pause()
        assert app.sent == ["one\ntwo"]


async def test_text_after_enter_is_the_next_message() -> None:
    app = Host()
    async with app.run_test() as pilot:
        for key in (*"first", "enter", *"second"):
            app.simulate_key(key)
        await pilot.pause()
        assert app.sent == ["first"]
        assert app.query_one(PromptInput).text == "second"


async def test_keys_that_arrive_together_act_in_the_order_typed() -> None:
    app = Host()
    async with app.run_test() as pilot:
        for key in (*"wurld", *["left"] * 4, "delete", "o", "end", *"!?", "backspace", "home", *"o "):
            app.simulate_key(key)
        await pilot.pause()
        assert app.query_one(PromptInput).text == "o world!"


async def test_shift_enter_makes_a_line_where_the_terminal_tells_it() -> None:
    app = Host()
    async with app.run_test() as pilot:
        await pilot.press("a", "shift+enter", "b")
        assert app.query_one(PromptInput).text == "a\nb"


async def test_blank_text_is_not_sent() -> None:
    app = Host()
    async with app.run_test() as pilot:
        await pilot.press("enter", "space", "enter", "ctrl+j", "enter")
        assert app.sent == []


async def test_arrows_walk_through_history_and_back_to_the_draft() -> None:
    app = Host()
    async with app.run_test() as pilot:
        prompt = app.query_one(PromptInput)
        prompt.begin_chat(["first", "second"], "")
        await pilot.press(*"draft", "up")
        assert prompt.text == "second"
        await pilot.press("up")
        assert prompt.text == "first"
        await pilot.press("up")
        assert prompt.text == "first"
        await pilot.press("down", "down")
        assert prompt.text == "draft"
        await pilot.press("down")
        assert prompt.text == "draft"


async def test_arrows_move_inside_a_text_of_several_lines() -> None:
    app = Host()
    async with app.run_test() as pilot:
        prompt = app.query_one(PromptInput)
        prompt.begin_chat(["older"], "")
        await pilot.press("a", "ctrl+j", "b", "up")
        assert prompt.text == "a\nb"
        assert prompt.cursor_location[0] == 0
        await pilot.press("up")
        assert prompt.text == "older"


async def test_what_was_sent_can_be_called_back() -> None:
    app = Host()
    async with app.run_test() as pilot:
        await pilot.press(*"hello", "enter", "up")
        assert app.query_one(PromptInput).text == "hello"
