"""Short words for tests of the models screen."""

from __future__ import annotations

from pathlib import Path

from textual.widgets import Input

from cpuchat.models.library.places import LocalModel
from cpuchat.tui.models.screen import ModelsScreen
from cpuchat.tui.widgets.model_list import ModelList
from tests.support.chat_app import RunningApp
from tests.support.shelf import shelf_reader

REPO = "maker/Tiny-GGUF"


def list_of(app: RunningApp) -> ModelList:
    return app.app.screen.query_one(ModelList)


def marked(app: RunningApp) -> str:
    return list_of(app).marked


def keys(app: RunningApp) -> list[str]:
    return [row.key for row in list_of(app).rows if row.key]


def about(app: RunningApp) -> str:
    """Return the text of the details pane."""
    x, y, width, height = app.app.screen.query_one("#details").region
    return " ".join(" ".join(line[x : x + width] for line in app.screen_text.split("\n")[y : y + height]).split())


async def opened(app: RunningApp) -> ModelsScreen:
    """Open the screen over the app's own library, and wait until it has read everything."""
    await app.ready()
    await app.press("ctrl+o")
    return await settled(app)


async def opened_shelf(app: RunningApp, tmp_path: Path) -> ModelsScreen:
    """Open the screen over models that are the same everywhere."""
    await app.ready()
    await app.app.push_screen(ModelsScreen(app.app.services, shelf_reader(tmp_path / "no-hub")))
    app.app.screen.query_one("#filter", Input).cursor_blink = False
    return await settled(app)


async def settled(app: RunningApp) -> ModelsScreen:
    screen = await app.opens(ModelsScreen)
    await app.until(lambda: screen.state.local is not None and screen.predictions)
    await looked(app, screen)
    return screen


async def looked(app: RunningApp, screen: ModelsScreen) -> None:
    """Wait until everything about the marked entry is known."""

    def known() -> bool:
        entry = screen.entry
        if entry is None or not isinstance(entry.subject, LocalModel):
            return entry is not None
        return bool(entry.subject.damaged) or entry.key in screen.details

    await app.until(known)


async def type_in(app: RunningApp, text: str, key: str = "") -> None:
    """Put a text into the box, and wait until the line with `key`, if any, is selected."""
    app.app.screen.query_one("#filter", Input).value = text
    await app.until(lambda: not key or marked(app) == key)


async def mark(app: RunningApp, key: str) -> None:
    """Select a line of the list once it is there."""
    await app.until(lambda: key in keys(app))
    list_of(app).mark(key)
    await app.pilot.pause()
