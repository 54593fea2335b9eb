"""Tests the figures on screen: in fixed places, with units, and with a reason where there is none."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import msgspec
import pytest
from rich.cells import cell_len
from rich.style import Style
from textual.containers import Horizontal

from cpuchat.protocol.messages import ModelLoaded, Speculation
from cpuchat.protocol.timings import DrafterCount, Reuse, SpeculationFigures
from cpuchat.telemetry import units
from cpuchat.telemetry.meter import Figures
from cpuchat.telemetry.metric import Metric, missing
from cpuchat.telemetry.speech import Speech
from cpuchat.tui.chat.figure_sections import SECTIONS, TIMING, Frame, Row, context, drafting, speed
from cpuchat.tui.chat.telemetry import PARTS, TelemetryLine, TelemetryPanel
from tests.support.meter_states import (
    EDITED,
    FINISHED,
    LOADED,
    MACHINES,
    MEMORY,
    READING,
    SERVED,
    SERVERS,
    STATES,
    counting,
    drafted,
    meter_after,
    reading,
    writing,
)
from tests.support.scripted_backend import DRAFTING, REFUSED
from tests.support.snapshots import HostApp, snapshot


def rows(widget: TelemetryPanel | TelemetryLine) -> list[str]:
    return [widget.render_line(y).text.rstrip() for y in range(widget.size.height)]


async def shown(state: str, height: int = 40, width: int = 28) -> list[str]:
    panel = TelemetryPanel()
    app = HostApp(panel, css=f"TelemetryPanel {{ width: {width}; height: 100%; }}")
    async with app.run_test(size=(60, height)) as pilot:
        await pilot.pause()
        meter, memory = (STATES | MACHINES | SERVERS)[state]
        panel.show(meter.figures(), memory)
        return rows(panel)


@pytest.mark.parametrize(("state", "first"), [("idle", "no model loaded"), ("loaded", "ready")])
async def test_before_the_first_answer_only_what_is_known_is_shown(state: str, first: str) -> None:
    panel = await shown(state)
    assert panel[0] == first
    assert "n/a" not in "\n".join(panel)
    assert any(row.startswith("limit w/o drafts") for row in panel) == (state == "loaded")


async def test_loading_and_reading_have_a_bar() -> None:
    assert any(row.startswith("loading █") and row.endswith(" 61 %") for row in await shown("loading"))
    assert any(row.startswith("prefill █") and row.endswith("1792/2048") for row in await shown("reading"))


async def test_figures_have_units_in_one_column() -> None:
    panel = await shown("done")
    for row in (
        "average         41.2 tok/s",
        "first token     0.21 s",
        "prefill          262 tok/s",
        "reused         1,536 tokens",
        "written          412 tokens",
        "context       2,460 of 8,192",
        "private mem      312 MB",
        "shared mem      1.61 GB",
        "done · stopped",
    ):
        assert row in panel
    assert any(row.startswith("█") and row.endswith("5,732 left") for row in panel)


PLACES = (
    "average",
    "prefill  ",
    "acceptance  ",
    "per pass",
    "bandwidth",
    "limit w/o drafts",
    "limit by compute",
    "context",
    "tok/s, last",
)


@pytest.mark.parametrize("height", [4, 8, 12, 16, 20, 24, 33, 40])
async def test_nothing_moves_while_an_answer_is_written(height: int) -> None:
    places: dict[str, set[int]] = {}
    for state in ("reading", "undrafted", "writing", "refused"):
        panel = await shown(state, height)
        for y, row in enumerate(panel):
            for label in PLACES:
                if row.startswith(label):
                    places.setdefault(label, set()).add(y)
        assert all(cell_len(row) <= 28 for row in panel)
    assert all(len(found) == 1 for found in places.values())


def reusing(reuse: Reuse, height: int) -> list[list[str]]:
    """Return the rows while the prompt is processed, while the answer is written, and after that."""
    answering = [*reading(reuse), *writing(10), drafted(DRAFTING)]
    found = []
    for events in (reading(reuse), answering, [*answering, FINISHED]):
        frame = Frame(meter_after(*LOADED, *events).figures(), MEMORY, 28, height >= 20, defaultdict(Style))
        drawn = TelemetryPanel().compose_rows(frame, height)
        found.append(["".join(segment.text for segment in row).rstrip() for row in drawn])
    return found


TOLD = ["anew: message 2 was edited", "210 tokens re-evaluated", "restored from disk in 40 ms"]


def test_why_not_more_was_reused_stands_below_and_gives_way_to_the_curve() -> None:
    for height in (33, 40):
        prompt, answer, after = reusing(EDITED, height)
        assert all("reused 1,536 of 2,048 tokens" in rows for rows in (prompt, answer, after))
        assert set(TOLD) < set(prompt) and set(TOLD) < set(after)
        assert any(row.startswith("tok/s, last") for row in answer)
        assert (set(TOLD) < set(answer)) == (height == 40)
    assert all("anew: system prompt changed" in rows for rows in reusing(Reuse(changed="system"), 17))
    assert any(row.startswith("tok/s, last") for row in reusing(Reuse(), 33)[2])


@pytest.mark.parametrize("height", [4, 8, 12, 16, 17, 20, 24, 33, 40])
def test_what_was_reused_moves_nothing_and_fits(height: int) -> None:
    most = Reuse(source="memory", ms=12_345.0, changed="template", message=1234, again=131_072)
    for reuse in (Reuse(), EDITED, most):
        places: dict[str, set[int]] = {}
        for rows in reusing(reuse, height)[:2]:
            assert len(rows) <= height and all(cell_len(row) <= 28 and "…" not in row for row in rows)
            for y, row in enumerate(rows):
                for label in PLACES[:-1]:
                    if row.startswith(label):
                        places.setdefault(label, set()).add(y)
        assert all(len(found) == 1 for found in places.values())


def test_a_long_context_leaves_no_room_for_the_unit_of_reused_tokens() -> None:
    assert "reused    131,071 of 131,072" in drawn(
        "done", 40, reuse=Reuse(), prefill_cached=Metric(131_071), prefill_total=131_072
    )


async def test_what_matters_is_there_at_common_sizes() -> None:
    for height in (33, 17):  # of the panel at 120x40 and 120x24
        panel = await shown("writing", height)
        for label in ("acceptance", "bandwidth", "estimated", "limit w/o drafts", "limit with drafts", "context"):
            assert any(row.startswith(label) for row in panel), (height, label)
    assert any(row.startswith("tok/s, last") for row in await shown("writing", 33))


def drawn(state: str, height: int, **changed: object) -> list[str]:
    meter, memory = (STATES | SERVERS)[state]
    figures = dataclasses.replace(meter.figures(), **changed)  # type: ignore[arg-type]
    frame = Frame(figures, memory, 28, height >= 20, defaultdict(Style))
    return ["".join(segment.text for segment in row) for row in TelemetryPanel().compose_rows(frame, height)]


@pytest.mark.parametrize(("reason", "words"), [(None, "failed"), ("end", "done"), ("cancelled", "done · stopped")])
def test_an_answer_that_failed_is_not_called_done(reason: str | None, words: str) -> None:
    assert words in drawn("loaded", 23, phase="done", stop_reason=reason)


@pytest.mark.parametrize("state", ["serving", "served"])
def test_what_a_first_token_at_a_server_waited_for_stays_on_smaller_screens(state: str) -> None:
    for height in (23, 33):
        panel = drawn(state, height)
        for label in ("first token", "  network", "  queue", "prefill", "acceptance  74 % server-wide", "context"):
            assert any(row.startswith(label) for row in panel), (height, label)
        assert len(panel) == height or any(row.startswith("written") for row in panel)  # nothing is cut for nothing
    spoken = drawn(state, 23, speech=Speech(engine="hibari", reading=True, first_audio_s=0.4, cpus=(6, 7)))
    for label in ("  queue", "prefill", "acceptance  74 % server-wide", "first audio"):
        assert any(row.startswith(label) for row in spoken), label


def test_the_line_of_a_server_has_the_source_and_the_queue() -> None:
    meter = SERVERS["served"][0]
    [line] = TelemetryLine().compose_rows(Frame(meter.figures(), None, 99, False, defaultdict(Style)), 1)
    text = "".join(segment.text for segment in line)
    assert "acc  74 % server-wide  6.2/pass" in text and "first 0.21 s · queue 41 ms" in text
    silent = Frame(SERVERS["silent"][0].figures(), None, 99, False, defaultdict(Style))
    assert "".join(segment.text for segment in TelemetryLine().compose_rows(silent, 1)[0]).count("≈") == 3


async def test_bandwidth_has_its_source_and_its_peak() -> None:
    panel = await shown("writing")
    at = panel.index("bandwidth      33 of 51 GB/s")
    assert panel[at + 1].startswith("█") and panel[at + 1].endswith("╎─  64 %")
    assert panel[at + 2] == "estimated"
    assert "limit with drafts 55.6 tok/s" in panel


async def test_a_counter_of_l3_groups_moves_nothing_when_an_answer_begins() -> None:
    before = counting(meter_after(*LOADED, *READING))
    places = []
    for meter in (before, MACHINES["counted"][0]):
        frame = Frame(meter.figures(), MEMORY, 28, True, defaultdict(Style))
        drawn = ["".join(segment.text for segment in row) for row in TelemetryPanel().compose_rows(frame, 33)]
        places.append([y for y, row in enumerate(drawn) if row.startswith(("L3", "power", *PLACES))])
    assert places[0] == places[1]


async def test_a_counter_is_named_with_its_groups_and_power() -> None:
    panel = await shown("counted")
    at = panel.index("bandwidth      36 of 51 GB/s")
    assert panel[at + 2] == "hsmp, of measured peak"
    assert panel[at + 4] == "L3 ▇██▃ ≤ 11 GB/s"
    assert any(row.startswith("power     143 W") for row in panel)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("off", ["120 %", "peak measured too low", "probe again"]),
        ("other load", ["96 %", "other load on this machine"]),
        ("cached", ["fits in L3: not memory-bound"]),
        ("no peak", ["no peak · run cpuchat probe"]),
    ],
)
async def test_what_keeps_a_figure_from_being_believed_is_said(state: str, words: list[str]) -> None:
    text = "\n".join(await shown(state))
    for word in words:
        assert word in text


def test_a_server_has_no_figures_before_its_first_answer() -> None:
    frame = Frame(meter_after(ModelLoaded(model=SERVED)).figures(), None, 28, True, defaultdict(Style))
    text = "\n".join("".join(part.text for part in row) for row in TelemetryPanel().compose_rows(frame, 40))
    assert "acceptance" not in text and "running" not in text


EXTREME = msgspec.structs.replace(
    DRAFTING,
    draft_n=470,
    draft_n_accepted=470,
    recent_draft_n_accepted=200,
    passes=13,
    by_position=((13, 13),) * 31,
    by_drafter=(
        DrafterCount(name="suffix", draft_n=460, draft_n_accepted=469),
        DrafterCount(name="lookup", draft_n=10, draft_n_accepted=1),
    ),
    drafter="suffix",
    depth=31,
    overlap=True,
    plain_ms=2000.0,
)


@pytest.mark.parametrize("reason", ["", REFUSED.reason, "off: " + "words that go on " * 9, "off: " + "x" * 90])
@pytest.mark.parametrize("height", [8, 14, 40])
@pytest.mark.parametrize("figures", [DRAFTING, EXTREME, SpeculationFigures()])
def test_no_row_is_cut_off(figures: SpeculationFigures, height: int, reason: str) -> None:
    update = drafted(msgspec.structs.replace(figures, reason=reason))
    meter = meter_after(*LOADED, *READING, *writing(10), update)
    frame = Frame(meter.figures(), MEMORY, 28, height >= 20, defaultdict(Style))
    rows = TelemetryPanel().compose_rows(frame, height)
    assert len(rows) <= height
    for row in rows:
        assert sum(cell_len(segment.text) for segment in row) <= 28, [segment.text for segment in row]


@dataclasses.dataclass(frozen=True)
class ToyFigures(Figures):
    """The figures with one more, as a contributor adds it to its record."""

    toy_s: Metric[float] = dataclasses.field(default_factory=lambda: missing("no toy yet"))


@pytest.mark.parametrize(
    ("toy", "row"),
    [
        (Metric(2.5), "toy             2.50 s"),
        (missing("no toy yet"), "toy         n/a · no toy yet"),
        (missing("no toys at all"), "toy         no toys at all"),
        (missing("a reason that is longer than its place"), "toy              n/a"),
        (missing("no answer yet"), "toy              n/a"),  # as of all other figures, which the panel says once
    ],
)
def test_a_new_figure_needs_a_field_and_a_row(toy: Metric[float], row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def value(now: Figures) -> Metric[float]:
        assert isinstance(now, ToyFigures)
        return now.toy_s

    monkeypatch.setitem(SECTIONS, "timing", (*TIMING, Row("toy", value, units.duration)))
    plain = STATES["writing"][0].figures()
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    figures = ToyFigures(**fields, toy_s=toy)
    assert row in composed(Frame(figures, None, 28, True, defaultdict(Style)), 40)
    settled = dataclasses.replace(figures, phase="done", stop_reason="end")
    shown = [
        line for line in composed(Frame(settled, None, 28, True, defaultdict(Style)), 40) if line.startswith("toy")
    ]
    assert shown == ([row] if toy.value is not None else [])


def composed(frame: Frame, height: int) -> list[str]:
    """Return the rows of the panel as text."""
    rows = TelemetryPanel().compose_rows(frame, height)
    return ["".join(segment.text for segment in row).rstrip() for row in rows]


async def test_without_drafters_the_section_is_one_row() -> None:
    meter = meter_after(*LOADED, *READING, *writing(10), speculation=Speculation())
    frame = Frame(meter.figures(), MEMORY, 28, True, defaultdict(Style))
    assert ["".join(segment.text for segment in row) for row in drafting(frame)] == ["drafting    off (F9 or F2)"]


async def test_slower_than_plain_is_not_shown_as_a_success() -> None:
    slow = msgspec.structs.replace(DRAFTING, plain_ms=10.0)
    meter = meter_after(*LOADED, *READING, *writing(10), drafted(slow))
    styles = {part: Style(color=f"color({number})") for number, part in enumerate(PARTS)}
    frame = Frame(meter.figures(), MEMORY, 28, True, styles)
    (shown,) = [segment for row in speed(frame) for segment in row if "×" in segment.text]
    assert float(shown.text.strip("× ")) < 1
    assert shown.style == styles["limit"]


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
                widget.show(meter.figures(), memory)
            await pilot.pause()
        assert not layouts
        assert panel._draw() == []


async def test_another_theme_gives_other_colours() -> None:
    panel = TelemetryPanel()
    app = HostApp(panel)
    async with app.run_test(size=(80, 34)) as pilot:
        meter, memory = STATES["writing"]
        panel.show(meter.figures(), memory)
        dark, text = panel.render_line(5), rows(panel)
        app.theme = "textual-light"
        await pilot.pause()
        panel.show(meter.figures(), memory)
        assert rows(panel) == text
        assert panel.render_line(5) != dark


@pytest.mark.parametrize("width", [60, 80, 99])
@pytest.mark.parametrize("state", list(STATES))
async def test_the_line_fits_and_begins_with_the_speed(width: int, state: str) -> None:
    line = TelemetryLine()
    app = HostApp(line)
    async with app.run_test(size=(width, 3)) as pilot:
        await pilot.pause()
        meter, memory = STATES[state]
        line.show(meter.figures(), memory)
        (row,) = rows(line)
        assert cell_len(row) <= width
        starts = {"idle": "no model loaded", "loading": "loading", "loaded": "ready"}
        assert row.startswith(starts[state]) if state in starts else row[5:11] == " tok/s"


LOOKS = ["idle", "reading", "writing", "refused", "done"]


@pytest.mark.parametrize(
    ("name", "size", "chosen"),
    [
        ("telemetry-tall", (160, 48), LOOKS),
        ("telemetry-low", (160, 20), LOOKS),
        ("roofline-tall", (160, 40), list(MACHINES)),
        ("roofline-low", (160, 24), list(MACHINES)),
        ("telemetry-server", (110, 40), list(SERVERS)),
        ("telemetry-server-low", (110, 20), list(SERVERS)),
    ],
)
async def test_looks(name: str, size: tuple[int, int], chosen: list[str]) -> None:
    panels = [TelemetryPanel() for _ in chosen]
    lines = [TelemetryLine() for _ in chosen]
    css = "Horizontal { height: 1fr; } TelemetryPanel { border: round $foreground 40%; padding: 0 1; height: 100%; }"
    app = HostApp(Horizontal(*panels), *lines, css=css)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        for state, *widgets in zip(chosen, panels, lines, strict=True):
            meter, memory = (STATES | MACHINES | SERVERS)[state]
            for widget in widgets:
                widget.show(meter.figures(), memory)
        await pilot.pause()
        await snapshot(app, name)


def test_the_gauge_of_a_context_that_is_nearly_full_has_the_color_of_limits() -> None:
    figures = meter_after(*LOADED).figures()
    assert figures.n_ctx.value == 8192
    for used, part in ((6553, "fill"), (6554, "limit")):  # 80 %
        nearly = dataclasses.replace(figures, n_past=Metric(used))
        for drawn_rows in (context, lambda frame: TelemetryLine().compose_rows(frame, 1)):
            frame = Frame(nearly, None, 99, True, {one: Style(meta={"part": one}) for one in PARTS})
            bars = [one.style.meta["part"] for row in drawn_rows(frame) for one in row if one.style and "█" in one.text]
            assert bars == [part]


@pytest.mark.parametrize(("limit", "words"), [(285.4, "285"), (999.6, "1.0k"), (1407.0, "1.4k"), (16_135.0, "16k")])
def test_labels_never_run_into_large_limits(limit: float, words: str) -> None:
    ceilings = dict.fromkeys(("ceiling_plain", "ceiling_accepted", "ceiling_compute"), Metric(limit))
    now = dataclasses.replace(STATES["writing"][0].figures().roofline, **ceilings)
    shown = [row.split() for row in drawn("writing", 40, roofline=now) if row.startswith("limit")]
    assert [row[3:] for row in shown] == [[words, "tok/s"]] * 3


def test_labels_never_run_into_values() -> None:
    meter, _ = STATES["writing"]
    drafting = dataclasses.replace(meter.figures().drafting, draft_share=missing("answer too short"))
    rows = drawn("writing", 33, drafting=drafting, predicted_n=1)
    assert "drafting    answer too short" in rows
    assert any(row.startswith("written") and row.endswith(" 1 token") for row in rows)
