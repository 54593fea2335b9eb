"""Tests the painter, which writes what painting everything anew would show, and lean screens."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pyte
import pytest
from textual import events
from textual._compositor import CompositorUpdate, LayoutUpdate
from textual.app import App, ComposeResult
from textual.events import Resize
from textual.geometry import Region, Size
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Label, Static, TextArea

from cpuchat.protocol.messages import PrefillProgress, SpeculationUpdate, TextDelta
from cpuchat.tui.commands import ActionPalette
from cpuchat.tui.terminal import painter
from cpuchat.tui.terminal.painter import LeanScreen, Painter, TypingScreen
from tests.support.chat_app import HANG_GUARD, running
from tests.support.scripted_backend import DRAFTING, WITH_DRAFT, ScriptedBackend

pytestmark = pytest.mark.usefixtures("drawn_at_once")

TEXT = "Reading **is** a matrix × matrix 日本語を読む🙂 \n\n- item\n```py\nx = 1\n```\n\n| a | b |\n"


class Emulator:
    """A terminal of the app's size that is fed with what the app would write."""

    def __init__(self) -> None:
        self.screen = pyte.Screen(80, 24)
        self._stream = pyte.Stream(self.screen)

    def write(self, app: App[Any], update: CompositorUpdate) -> None:
        if (self.screen.columns, self.screen.lines) != app.size:
            self.screen.reset()
            self.screen.resize(app.size.height, app.size.width)
        self._stream.feed(update.render_segments(app.console))

    @property
    def cells(self) -> list[list[Any]]:
        return [[self.screen.buffer[y][x] for x in range(self.screen.columns)] for y in range(self.screen.lines)]


def painted_anew(app: App[Any]) -> Emulator:
    """Return what the screen is when all of it is painted by Textual."""
    compositor = app.screen._compositor
    region = compositor.size.region
    emulator = Emulator()
    rows = [chops.values() for chops in compositor._render_chops(region, lambda y: True)]
    emulator.write(app, LayoutUpdate(rows, region))  # type: ignore[arg-type]
    return emulator


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """An emulator that is fed by every app that runs."""
    emulator = Emulator()
    display = App._display

    def shown(self: App[Any], screen: Screen[Any], update: Any) -> None:
        if isinstance(update, CompositorUpdate) and self._running and not self._batch_count:
            emulator.write(self, update)
        display(self, screen, update)

    monkeypatch.setattr(App, "_display", shown)
    return emulator


async def same(app: App[Any], terminal: Emulator, pause: Callable[[], Awaitable[Any]], what: str) -> None:
    """Wait until all is painted; fails if cells stay as they were."""
    try:
        async with asyncio.timeout(HANG_GUARD):
            await pause()
            while terminal.cells != painted_anew(app).cells:
                await pause()
    except TimeoutError:
        wanted = painted_anew(app)
        rows = [y for y, (a, b) in enumerate(zip(terminal.cells, wanted.cells, strict=False)) if a != b]
        shown = "\n".join(f"{y:3} {terminal.screen.display[y]}\n    {wanted.screen.display[y]}" for y in rows)
        pytest.fail(f"after {what} these rows are stale, as shown and as they should be:\n{shown}")


async def test_no_cell_is_stale_whatever_happens(terminal: Emulator) -> None:
    async with running(ScriptedBackend(model=WITH_DRAFT)) as run:
        await run.ready()
        await run.send("Hello")
        run.prompt.cursor_blink = False
        run.transcript.begin_answer("Model")
        assert isinstance(run.chat._compositor, Painter)
        meter = run.conversation.meter
        meter.observe(PrefillProgress(request_id=1, processed=9, total=9, cache_n=0), 0)
        numbers = itertools.count(1, 29)

        async def write() -> None:
            run.transcript.append(TEXT)
            run.transcript.flush()

        async def figures() -> None:
            n = next(numbers)
            meter.observe(TextDelta(request_id=1, text="", predicted_n=n, at_ms=25.0 * n), n / 40)
            meter.observe(SpeculationUpdate(request_id=1, predicted_n=n, figures=DRAFTING), n / 40)
            run.chat.figures.show()

        async def scroll_and_toast() -> None:
            run.transcript.scroll_to(y=run.transcript.max_scroll_y // 2, animate=False)
            run.app.notify("日本 words\n" * 2, severity="warning", timeout=60)

        async def narrow() -> None:
            await run.pilot.resize_terminal(61, 24)

        async def wide() -> None:
            await run.pilot.resize_terminal(120, 40)

        async def type_text() -> None:
            run.prompt.focus()
            await run.press(*"日a語")

        async def popup() -> None:
            await run.press("ctrl+p")
            await write()
            await figures()
            await run.pilot.pause()
            await run.press("escape")

        async def select() -> None:
            await run.pilot.mouse_down(run.transcript, offset=(3, 2))
            await run.pilot.hover(run.transcript, offset=(20, 9))
            await run.pilot.mouse_up(run.transcript, offset=(20, 9))

        acts = (write, figures, write, popup, figures, narrow, type_text, write, scroll_and_toast, wide, select, write)
        for act in acts:
            await act()
            await same(run.app, terminal, run.pilot.pause, act.__name__)


class Rows(Widget):
    """Records which of its rows are rendered."""

    def __init__(self) -> None:
        super().__init__()
        self.rendered: list[int] = []

    def render_line(self, y: int) -> Strip:
        self.rendered.append(y)
        return Strip.blank(self.size.width)

    def change(self, *rows: int) -> None:
        self.rendered.clear()
        self.refresh(*(Region(0, y, self.size.width, 1) for y in rows))


class Host(App[None]):
    CSS = "Rows { height: 6; } TextArea { height: 8; }"

    def get_default_screen(self) -> Screen[Any]:
        screen = TypingScreen(id="_default")
        screen._compositor = Painter()
        return screen

    def compose(self) -> ComposeResult:
        self.first, self.last = Rows(), Rows()
        yield from (self.first, TextArea(), self.last)


async def test_only_changed_rows_are_rendered_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[CompositorUpdate] = []
    monkeypatch.setattr(App, "_display", lambda self, screen, update: update and written.append(update))
    app = Host()
    async with app.run_test(size=(40, 20)) as pilot:
        await pilot.pause()
        written.clear()
        app.first.change(1)
        app.last.change(5)
        async with asyncio.timeout(HANG_GUARD):
            while not (app.first.rendered and app.last.rendered):
                await pilot.pause()
        assert (app.first.rendered, app.last.rendered) == ([1], [5])
        (update,) = written
        parts = update.render_segments(app.console).split("\x1b[")
        assert {part.split("H")[0] for part in parts if "H" in part} == {"2;1", "20;1"}


async def test_what_is_typed_does_not_wait_for_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Host()
    async with app.run_test(size=(40, 20)) as pilot:
        await pilot.pause()
        monkeypatch.setattr(app.screen._update_timer, "resume", lambda: None)  # it never comes
        shown = asyncio.Event()
        monkeypatch.setattr(App, "_display", lambda *_: shown.set())
        app.first.change(1)
        for _ in range(100):  # turns of the event loop
            await asyncio.sleep(0)
        assert not shown.is_set()  # as all else does
        app.simulate_key("x")
        async with asyncio.timeout(HANG_GUARD):
            await shown.wait()
        assert app.query_one(TextArea).text == "x"


async def test_a_click_on_what_is_gone_and_still_shown_is_no_error() -> None:
    class Shown(LeanScreen[None]):
        def compose(self) -> ComposeResult:
            yield Static("words to select")

    async with running() as app:
        await app.ready()
        screen = Shown()
        await app.app.push_screen(screen)
        await app.until(lambda: "words to select" in app.screen_text)
        with app.app.batch_update():  # nothing is laid out meanwhile
            await screen.query_one(Static).remove()
            down = events.MouseDown(None, 2, 0, 0, 0, 1, False, False, False)
            screen._forward_event(down)
        await app.pilot.pause()
        assert app.app.screen is screen


async def test_what_a_removed_widget_had_drawn_is_freed() -> None:
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


SIZES = {"-narrow", "-wide", "-low", "-high"}


class _Sized(LeanScreen[None]):
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (30, "-high")]
    composed: frozenset[str] = frozenset()

    def compose(self) -> ComposeResult:
        yield Label("text")

    def on_mount(self) -> None:
        self.composed = self.classes & SIZES


async def test_classes_are_there_before_the_first_layout_and_stay() -> None:
    screen = _Sized()
    async with App[None]().run_test(size=(100, 29)) as pilot:
        await pilot.app.push_screen(screen)
        assert screen.composed == {"-wide", "-low"}
        await pilot.resize_terminal(40, 50)
        await pilot.pause()
        assert screen.classes & SIZES == {"-narrow", "-high"}


@pytest.mark.parametrize("kind", [_Sized, ActionPalette])
async def test_a_size_that_is_queued_behind_another_stays(kind: type[Screen[None]]) -> None:
    screen, laid_out = kind(), list[Size]()

    def refresh_layout(size: Size | None = None, scroll: bool = False) -> None:
        laid_out.append(size or screen.size)
        assert len(laid_out) < 9  # they would take turns for ever
        right(size, scroll)

    async with App[None]().run_test(size=(80, 24)) as pilot:
        await pilot.app.push_screen(screen)
        await pilot.pause()
        right, screen._refresh_layout = screen._refresh_layout, refresh_layout  # type: ignore[method-assign]
        screen.post_message(Resize(Size(60, 20), Size(60, 20)))
        screen.call_later(lambda: None)  # Textual merges events that follow each other
        screen.post_message(Resize(Size(80, 24), Size(80, 24)))
        await pilot.pause()
        assert screen.size == Size(80, 24)
