"""Tests that uncleaned text does not pass the gate, and that its row keeps its layout."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.widgets import Static

from cpuchat.tui.terminal.driver import Gate
from tests.support.chat_app import running

EVIL = "a\x1b]52;c;eA==\x07b\u202ec\x9b2Jd"


async def test_text_of_any_widget_passes_the_gate_and_late_timers_fire() -> None:
    async with running() as app:
        await app.ready()
        static = Static(EVIL, markup=False)
        static.border_title = "t\\[" + EVIL
        static.styles.border = ("round", "red")
        await app.chat.mount(static, before=0)
        await app.pilot.pause()
        assert "a]52;c;eA==bc2Jd" in app.screen_text
        assert not set("\x1b\x07\u202e\x9b") & set(app.screen_text)
        fired: list[bool] = []  # a timer that is late at its start fires
        app.app.set_timer(1e-9, lambda: fired.append(True))  # as when its task is preempted for so long
        await app.until(lambda: fired)


def test_links_and_line_breaks_do_not_pass_and_the_rest_is_not_touched() -> None:
    background = Color(0, 0, 0)
    good = [Segment("e\u0301 👩‍👧 ok", Style(bold=True)), Segment(" ")]
    assert Gate().apply(good, background) is good
    (text, style, _), after = Gate().apply([Segment("a\nb", Style(link="x\x1b\\", bold=True)), good[0]], background)
    assert (text, style) == ("ab", Style(bold=True))
    assert after is good[0]
