"""The figures on screen: in fixed places, with units, and with a reason where there is none."""

from __future__ import annotations

import math

import pytest
from rich.cells import cell_len
from textual.containers import Horizontal

from cpuchat.protocol import (
    Event,
    GenerationFinished,
    LoadProgress,
    ModelInfo,
    ModelLoaded,
    PrefillProgress,
    TextDelta,
    Timings,
)
from cpuchat.telemetry.meter import Meter
from cpuchat.telemetry.process import ProcessMemory
from cpuchat.tui.widgets.telemetry import TelemetryLine, TelemetryPanel
from tests.support.snapshots import HostApp, snapshot

MEMORY = ProcessMemory(private=312_000_000, shared=1_610_000_000)
MODEL = ModelInfo(
    path="m.gguf", name="m", architecture="llama", quantization="Q8_0", n_params=1, size=1, n_ctx=8192,
    n_ctx_train=8192, n_vocab=1, n_layer=1, n_threads=1,
)  # fmt: skip
LOADED: list[Event] = [LoadProgress(phase="reading", done=61, total=100), ModelLoaded(model=MODEL)]
READING: list[Event] = [
    PrefillProgress(request_id=1, processed=1536, total=2048, cache_n=1536),
    PrefillProgress(request_id=1, processed=1792, total=2048, cache_n=1536),
]


def writing(seconds: float, rate: float = 41.3) -> list[Event]:
    """Deltas of an answer whose speed swings by 15 % around `rate`."""
    events: list[Event] = []
    at_ms = 210.0
    for n in range(1, int(seconds * rate)):
        events.append(TextDelta(request_id=1, text="x", predicted_n=n, at_ms=at_ms))
        at_ms += 1000 / (rate + 6 * math.sin(n / 90))
    return events


FINISHED = GenerationFinished(
    request_id=1,
    stop_reason="cancelled",
    timings=Timings(
        cache_n=1536, prompt_n=512, prompt_ms=1954, predicted_n=412, predicted_ms=9975, ttft_ms=210, n_past=2460,
        n_ctx=8192,
    ),
)  # fmt: skip


def meter_after(*events: Event) -> Meter:
    meter = Meter()
    for number, event in enumerate(events):
        meter.observe(event, number / 10)
    return meter


STATES = {
    "idle": (meter_after(), None),
    "loading": (meter_after(LOADED[0]), None),
    "loaded": (meter_after(*LOADED), MEMORY),
    "reading": (meter_after(*LOADED, *READING), MEMORY),
    "writing": (meter_after(*LOADED, *READING, *writing(60)), MEMORY),
    "done": (meter_after(*LOADED, *READING, *writing(10), FINISHED), MEMORY),
}


def rows(widget: TelemetryPanel | TelemetryLine) -> list[str]:
    return [widget.render_line(y).text.rstrip() for y in range(widget.size.height)]


async def shown(state: str, height: int = 34, width: int = 28) -> list[str]:
    panel = TelemetryPanel()
    app = HostApp(panel, css=f"TelemetryPanel {{ width: {width}; height: 100%; }}")
    async with app.run_test(size=(60, height)) as pilot:
        await pilot.pause()
        meter, memory = STATES[state]
        panel.show(meter.figures(), memory, meter.why_missing)
        return rows(panel)


async def test_idle_says_why_there_is_nothing() -> None:
    panel = await shown("idle")
    assert "idle · no answer yet" in panel
    assert "average          n/a" in panel
    assert "context     no model loaded" in panel
    assert "memory      n/a · no worker" in panel


async def test_loading_and_reading_have_a_bar() -> None:
    assert any(row.startswith("loading █") and row.endswith(" 61 %") for row in await shown("loading"))
    assert any(row.startswith("reading █") and row.endswith("1792/2048") for row in await shown("reading"))


async def test_figures_have_units_in_one_column() -> None:
    panel = await shown("done")
    for row in (
        "average         41.2 tok/s",
        "first token     0.21 s",
        "prefill          262 tok/s",
        "reused         1,536 tokens",
        "written          412 tokens",
        "context       2,460 of 8,192",
        "mem. private     312 MB",
        "mem. shared     1.61 GB",
        "done · cancelled",
    ):
        assert row in panel
    assert any(row.startswith("█") and row.endswith("5,732 left") for row in panel)


@pytest.mark.parametrize("height", [4, 8, 12, 16, 20, 24, 40])
async def test_nothing_moves_from_one_state_to_the_next(height: int) -> None:
    places: dict[str, set[int]] = {}
    for state in STATES:
        panel = await shown(state, height)
        for y, row in enumerate(panel):
            for label in ("average", "prefill", "context", "tok/s, last"):
                if row.startswith(label):
                    places.setdefault(label, set()).add(y)
        assert all(cell_len(row) <= 28 for row in panel)
    assert all(len(found) == 1 for found in places.values())


async def test_showing_figures_causes_no_layout_and_draws_changed_rows_only() -> None:
    panel, line = TelemetryPanel(), TelemetryLine()
    app = HostApp(panel, line)
    async with app.run_test(size=(80, 34)) as pilot:
        await pilot.pause()
        layouts: list[bool] = []
        refresh = app.screen._refresh_layout
        app.screen._refresh_layout = lambda *a, **k: (layouts.append(True), refresh(*a, **k))[1]  # type: ignore[method-assign]
        for meter, memory in STATES.values():
            for widget in (panel, line):
                widget.show(meter.figures(), memory, meter.why_missing)
            await pilot.pause()
        assert not layouts
        assert panel._draw() == []


@pytest.mark.parametrize("width", [60, 80, 99])
@pytest.mark.parametrize("state", list(STATES))
async def test_the_line_fits_and_begins_with_the_speed(width: int, state: str) -> None:
    line = TelemetryLine()
    app = HostApp(line)
    async with app.run_test(size=(width, 3)) as pilot:
        await pilot.pause()
        meter, memory = STATES[state]
        line.show(meter.figures(), memory, meter.why_missing)
        (row,) = rows(line)
        assert cell_len(row) <= width
        assert row[5:11] == " tok/s"


@pytest.mark.parametrize(("name", "size"), [("telemetry-tall", (132, 36)), ("telemetry-low", (132, 18))])
async def test_looks(name: str, size: tuple[int, int]) -> None:
    chosen = ["idle", "reading", "writing", "done"]
    panels = [TelemetryPanel() for _ in chosen]
    lines = [TelemetryLine() for _ in chosen]
    css = "Horizontal { height: 1fr; } TelemetryPanel { border: round $foreground 40%; padding: 0 1; height: 100%; }"
    app = HostApp(Horizontal(*panels), *lines, css=css)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        for state, *widgets in zip(chosen, panels, lines, strict=True):
            meter, memory = STATES[state]
            for widget in widgets:
                widget.show(meter.figures(), memory, meter.why_missing)
        await pilot.pause()
        snapshot(app, name)
