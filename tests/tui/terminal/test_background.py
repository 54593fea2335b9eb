"""Tests that the terminal's background chooses the default theme, and that its reply is never taken for keys."""

from __future__ import annotations

import pytest
from textual import events
from textual._xterm_parser import XTermParser
from textual.message import Message

from cpuchat.config import settings
from cpuchat.config.settings import read_state
from cpuchat.tui.terminal.background import BackgroundParser, BackgroundReported, is_light_at_start, remember
from tests.support.chat_app import running

WHITE, BLACK = "\x1b]11;rgb:ffff/ffff/ffff\x1b\\", "\x1b]11;rgb:1c/1c/1c\x07"


class Parser(BackgroundParser):
    """A parser with a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(clock=lambda: self.now)

    def read(self, *data: str) -> list[str]:
        """Return the keys in what comes in, "light" and "dark" for a reply; nothing comes for a while at the end."""
        found = [message for part in data for message in (*self.feed(part), *self.tick())]
        self.now += 0.2
        return [_named(message) for message in (*found, *self.tick())]


def _named(message: Message) -> str:
    if isinstance(message, BackgroundReported):
        return "light" if message.is_light else "dark"
    assert isinstance(message, events.Key)
    return message.key


def test_a_reply_in_parts_among_keys_is_no_key() -> None:
    for cut in range(1, len(WHITE)):
        assert Parser().read("a", WHITE[:cut], WHITE[cut:] + "b") == ["a", "light", "b"], cut


def test_keys_stay_keys() -> None:
    assert Parser().read(f"a{BLACK}b", "\x1b[A") == ["dark", "a", "b", "up"]
    late = Parser()
    late.now = 100.0
    assert late.read(WHITE[:5], WHITE[5:]) == ["light"]
    assert not late._held and Parser().read("x", "\x1b")[:1] == ["x"]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 4096])
def test_a_pasted_text_is_taken_out_whole_however_it_is_cut(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    feed = XTermParser.feed
    monkeypatch.setattr(XTermParser, "feed", lambda self, data: (looked_at.append(data), feed(self, data))[1])
    text = "a line\rwith \x1b[200 and \x1b[20 in it, ä\r" * 50
    data = f"x\x1b[200~{text}\x1b[201~y\x1b[24~"
    parser = Parser()
    parts = [data[at : at + step] for at in range(0, len(data), step)]
    found = [message for part in parts for message in (*parser.feed(part), *parser.tick())]
    assert [one.text for one in found if isinstance(one, events.Paste)] == [text]
    assert [one.key for one in found if isinstance(one, events.Key)] == ["x", "y", "f12"]
    assert step < len("\x1b[200") or len("".join(looked_at)) < 20  # else it would take seconds for megabytes


async def test_the_default_theme_follows_the_background_and_a_chosen_one_stays() -> None:
    async with running() as app:
        await app.ready()
        assert app.app.theme == "cpuchat" and app.app.asks_background
        app.app.post_message(BackgroundReported(is_light=True))
        await app.until(lambda: app.app.theme == "cpuchat-light")
        assert settings.load().ui.theme == "auto"
    settings.update({"ui": {"theme": "cpuchat"}})
    async with running() as app:
        await app.ready()
        app.app.post_message(BackgroundReported(is_light=True))
        await app.pilot.pause()
        assert app.app.theme == "cpuchat"
        app.app.services.show_theme("auto")  # chosen in the settings
        assert app.app.theme == "cpuchat-light"


async def test_a_terminal_that_was_light_is_light_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLORFGBG", raising=False)
    monkeypatch.setenv("TERM_PROGRAM", "bright")
    for was_light, is_light in ((False, True), (True, False), (False, False)):
        async with running() as app:
            await app.ready()
            assert app.app.theme == ("cpuchat-light" if was_light else "cpuchat")
            app.app.post_message(BackgroundReported(is_light=is_light))
            await app.until(lambda is_light=is_light: ("bright" in read_state().light_terminals) == is_light)
    await remember(True)
    assert is_light_at_start()
    monkeypatch.setenv("COLORFGBG", "15;0")  # it says so itself
    assert not is_light_at_start()
    monkeypatch.delenv("COLORFGBG")
    monkeypatch.setenv("TERM_PROGRAM", "other")
    assert not is_light_at_start()
