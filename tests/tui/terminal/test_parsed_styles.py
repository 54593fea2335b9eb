"""Tests keeping parsed style sheets: they are those of the theme, none is parsed twice, and no widget stays."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from textual.app import App
from textual.color import Color
from textual.css.stylesheet import Stylesheet
from textual.widgets import Label

from cpuchat.tui.terminal import painter
from tests.support.chat_app import HANG_GUARD


def test_a_sheet_is_parsed_once_for_each_theme(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, parsed = painter.parse_rules, []
    assert parse is not None

    def watched(self: Stylesheet, css: str, **options: Any) -> Any:
        parsed.append(css)
        return parse(self, css, **options)

    def color(value: str, sheet: Stylesheet | None = None) -> Any:
        sheet = sheet or Stylesheet(variables={"value": value})
        sheet.add_source("Label { color: $value; }", ("test", "parsed_styles"))
        return sheet.rules[0].styles.get_rule("color")

    painter.keep()
    monkeypatch.setattr(painter, "parse_rules", watched)
    assert [color(value) for value in ("red", "blue", "red")] == [Color.parse(one) for one in ("red", "blue", "red")]
    assert len(parsed) == 2
    sheet = Stylesheet(variables={"value": "red"})
    assert color("", sheet) == Color.parse("red")
    sheet.set_variables({"value": "blue"})
    sheet.reparse()
    assert color("", sheet) == Color.parse("blue") and len(parsed) == 2


async def test_what_a_removed_widget_had_drawn_is_freed(drawn_at_once: None) -> None:
    painter.keep()
    async with App[None]().run_test() as pilot:
        label = Label("drawn")
        await pilot.app.mount(label)
        await pilot.pause()
        drawn = weakref.ref(label._styles_cache)
        assert label._styles_cache._cache
        await label.remove()
        del label
        await pilot.app.mount(Label("the last one is remembered"))
        async with asyncio.timeout(HANG_GUARD):
            while gc.collect() >= 0 and drawn() is not None:  # messages to it may still be under way
                await pilot.pause()
