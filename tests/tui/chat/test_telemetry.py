"""Tests the figures on screen: in fixed places, with units, and nothing where nothing is known."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from rich.style import Style
from textual.containers import Horizontal
from textual.events import MouseScrollDown

from cpuchat.protocol.messages import Event, ModelLoaded, Speculation
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.protocol.timings import DrafterCount, Reuse, SpeculationFigures
from cpuchat.telemetry import units
from cpuchat.telemetry.meter import ChatFigures, Meter
from cpuchat.telemetry.metric import Metric, missing
from cpuchat.telemetry.speech import Speech
from cpuchat.tui.chat import figure_sections
from cpuchat.tui.chat.figure_sections import SECTIONS, TIMING, PanelRow, all_figures
from cpuchat.tui.chat.figures import PARTS, Frame, brief, large, one_line, presentation, rough, title
from cpuchat.tui.chat.telemetry import FigureRows, Presentation, TelemetryLine, TelemetryPanel
from tests.support.meter_states import (
    COUNTED,
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

DRAWN = {"brief": brief, "all": all_figures, "line": lambda frame: [one_line(frame)], "present": presentation}
ALL_STATES = STATES | MACHINES | SERVERS
BRIEF, ALL = (33, 28), (33, 32)
"""Rows and columns of the panel at 120×40."""


def frame_of(figures: ChatFigures, size: tuple[int, int] = BRIEF, styles: dict[str, Style] | None = None) -> Frame:
    memory = None if figures.server is not None else MEMORY
    return Frame(figures, memory, size[1], size[0], styles or defaultdict(Style), "0.5B")


def drawn(what: str, state: str | Meter, size: tuple[int, int] = BRIEF, **changed: object) -> list[str]:
    """Return the rows as text."""
    meter = ALL_STATES[state][0] if isinstance(state, str) else state
    figures = dataclasses.replace(meter.figures(), **changed)  # type: ignore[arg-type]
    return ["".join(one.text for one in row).rstrip() for row in DRAWN[what](frame_of(figures, size))]


def places(rows: list[str], labels: tuple[str, ...]) -> dict[str, int]:
    return {label: y for y, row in enumerate(rows) for label in labels if row.startswith(label)}


@pytest.mark.parametrize("what", list(DRAWN))
def test_nothing_is_not_available_and_nothing_is_cut(what: str) -> None:
    sizes = {
        "brief": [(33, 28), (17, 28), (12, 28), (4, 28)], "all": [(33, 32), (17, 32), (8, 32)],
        "line": [(1, 58), (1, 78), (1, 97)], "present": [(10, 74), (14, 112), (14, 192)],
    }  # fmt: skip
    for state in ALL_STATES:
        for size in sizes[what]:
            rows = drawn(what, state, size)
            assert "n/a" not in "\n".join(rows), state
            assert all(cell_len(row) <= size[1] for row in rows), (state, rows)


LABELS = ("first token", "drafts", "memory", "context")


def test_the_brief_panel_has_ten_rows_below_its_large_figure() -> None:
    rows = drawn("brief", "done")
    assert "".join(rows[:3]).strip(" ▀▄█").strip() and not any(row for row in rows[13:])
    assert places(rows, LABELS) == {"first token": 9, "drafts": 10, "memory": 11, "context": 12}
    assert len(large(frame_of(STATES["done"][0].figures()))) == 3


@pytest.mark.parametrize("what", ["brief", "all"])
@pytest.mark.parametrize("size", [(33, 32), (17, 32), (40, 32), (9, 32)])
def test_no_row_moves_during_a_whole_answer(what: str, size: tuple[int, int]) -> None:
    """From the prompt to the end, event by event: each label stays where it was first, and so does each unit."""
    meter, found = Meter(), dict[str, set[tuple[int, int]]]()
    answer: list[Event] = [*LOADED, *READING]
    for n, event in enumerate(writing(6)):
        answer += [event, drafted(DRAFTING, n + 2)] if n % 20 == 0 else [event]
    finished = msgspec.structs.replace(FINISHED.timings, speculation=DRAFTING, draft_n=470)
    answer += [drafted(REFUSED, 240), msgspec.structs.replace(FINISHED, timings=finished)]
    meter.expect(Speculation(drafters=("suffix", "draft")))
    labels = (*LABELS, "average", "prefill", "acceptance  ", "per pass", "bandwidth", "limit by compute", "private mem")
    for n, event in enumerate(answer):
        meter.observe(event, n / 10)
        if n >= len(LOADED) and (what == "brief" or n < len(answer) - 1):
            rows = drawn(what, meter, size)
            for label, y in places(rows, labels).items():
                found.setdefault(label, set()).add((y, rows[y].find(" tok/s")))
    assert len(found) >= 3 and all(len(where) == 1 for where in found.values()), found


def test_the_timeline_ends_at_the_limit_that_applies() -> None:
    for state, words in (("writing", "55.6 limit with drafts"), ("loaded", "31.1 limit without drafts")):
        row = drawn("brief", state)[3]
        assert row.startswith("╌") and row.endswith(words)
    now = STATES["writing"][0].figures().roofline
    slow = dataclasses.replace(now, ceiling_compute=Metric(50.0))
    assert drawn("brief", "writing", roofline=slow)[3].endswith(" 50.0 limit by compute")
    assert drawn("brief", "off")[3] == "tok/s, last minute      0–50"  # withdrawn: a round number instead
    assert drawn("brief", "idle")[3] == ""


def test_a_limit_below_what_was_measured_is_in_no_view() -> None:
    meter = ALL_STATES["undrafted"][0]
    for what, size in (("brief", BRIEF), ("all", ALL), ("line", (1, 97)), ("present", (14, 112))):
        text = "\n".join(drawn(what, meter, size))
        assert "without drafts" not in text and "with drafts" not in text
    assert rough(meter.figures()) == "rough speeds" and not rough(STATES["writing"][0].figures())


def test_while_the_prompt_is_read_its_progress_is_in_the_place_of_the_timeline() -> None:
    rows = drawn("brief", "reading")
    assert rows[3:6] == ["1,792 of 2,048 tokens", "█" * 24 + "▌───", "256 tok/s · 1 s left"]
    assert rows[9] == "reused       1,536 tokens"
    assert drawn("line", "reading", (1, 78)) == ["1,792 of 2,048 tokens ██████████████── 256 tok/s · 1 s left"]
    assert drawn("brief", "loading")[4].startswith("█")
    assert drawn("line", "loading", (1, 78))[0].startswith("loading █")


@pytest.mark.parametrize(
    ("state", "words"),
    [("idle", "Now"), ("loading", "Now · loading"), ("reading", "Now · reading the prompt"), ("writing", "Now"),
     ("done", "Last answer · stopped")],
)  # fmt: skip
def test_the_title_says_of_what_the_figures_are(state: str, words: str) -> None:
    figures = STATES[state][0].figures()
    assert title(figures) == words
    if state == "done":
        assert title(dataclasses.replace(figures, stop_reason=None)) == "Last answer · failed"
        assert title(dataclasses.replace(figures, stop_reason="end")) == "Last answer"


def test_a_bar_tells_who_drafts_and_who_counts() -> None:
    assert drawn("brief", "writing")[10].endswith("─ 0.5B")
    most = DrafterCount(name="suffix", draft_n=10, draft_n_accepted=9)
    suffix = msgspec.structs.replace(DRAFTING, by_drafter=(most,))
    meter = meter_after(*LOADED, *READING, *writing(10), drafted(suffix))
    assert drawn("brief", meter)[10].endswith(" suffix")
    assert drawn("brief", "serving")[10].endswith(" server")
    assert drawn("brief", "refused")[10] == "drafts    off"


def test_bandwidth_has_marks_at_the_peak_and_at_the_limit() -> None:
    assert drawn("brief", "writing")[11] == "memory   64 % ████████▏───╎─"
    now = STATES["writing"][0].figures().roofline
    lower = dataclasses.replace(now, ceiling_compute=Metric(45.0))
    assert drawn("brief", "writing", roofline=lower)[11].count("╎") == 2
    assert drawn("brief", "cached")[11] == "memory  in L3"


@pytest.mark.parametrize(("state", "first"), [("idle", "no model loaded"), ("loaded", "ready")])
def test_before_the_first_answer_only_what_is_known_is_shown(state: str, first: str) -> None:
    for what, size in (("brief", BRIEF), ("all", ALL)):
        rows = drawn(what, state, size)
        assert rows[1].strip() == first
        assert any("limit without drafts" in row for row in rows) == (state == "loaded")


def test_all_figures_have_units_in_one_column() -> None:
    rows = drawn("all", "done", ALL)
    for row in ("average         41.2 tok/s", "first token     0.21 s", "prefill          262 tok/s",
                "reused         1,536 tokens", "written          412 tokens", "context           2,460 of 8,192",
                "private mem   312 MB", "shared mem    1.6 GB", "limit without drafts  29.9 tok/s"):  # fmt: skip
        assert row in rows, row
    assert any(row.startswith("█") and row.endswith("5,732 left") for row in rows)


def test_what_matters_of_all_figures_is_there_without_scrolling_at_120_by_40() -> None:
    for state in ("writing", "counted"):
        rows = drawn("all", state, ALL)[:33]
        for label in ("acceptance", "bandwidth", "estimated" if state == "writing" else "umc", "limit without drafts",
                      "limit with drafts", "limit by compute", "context", "private mem"):  # fmt: skip
            assert any(row.startswith(label) for row in rows), (state, label)


def test_why_not_more_was_reused_stands_below() -> None:
    told = {"message 2 was edited", "210 tokens re-evaluated", "restored from disk in 40 ms"}
    for events in (reading(EDITED), [*reading(EDITED), *writing(10), drafted(DRAFTING)]):
        rows = drawn("all", meter_after(*LOADED, *events), ALL)
        assert set(rows[-3:]) == told and "reused     1,536 of 2,048 tokens" in rows
    most = Reuse(source="memory", ms=12_345.0, changed="template", message=1234, again=131_072)
    assert all("…" not in row for row in drawn("all", meter_after(*LOADED, *reading(most)), ALL))
    full = drawn("all", "done", ALL, reuse=Reuse(), prefill_cached=Metric(131_071), prefill_total=131_072)
    assert "reused 131,071 of 131,072 tokens" in full


@pytest.mark.parametrize("state", ["serving", "served"])
def test_a_server_tells_what_the_first_token_waited_for_and_who_counted(state: str) -> None:
    rows = drawn("all", state, ALL)
    for label in ("first token", "prefill", "acceptance   74 %", "context"):
        assert any(row.startswith(label) for row in rows), label
    assert any(row.startswith("  queue           41 ms") for row in rows) == (state == "served")
    spoken = drawn("all", state, ALL, speech=Speech(reading=True, first_audio_s=0.4, cpus=(6, 7)))
    assert any(row.startswith("first audio") for row in spoken)


def test_what_a_server_does_not_report_names_the_option() -> None:
    assert "For acceptance: not reported by this server; start it with drafts" in " ".join(drawn("all", "silent", ALL))
    assert "".join(drawn("line", "silent", (1, 97))).count("≈") == 1
    before = "\n".join(drawn("all", meter_after(ModelLoaded(model=SERVED)), ALL))
    assert "acceptance" not in before and "For queue: start vLLM" in before


def test_a_counter_moves_nothing_when_an_answer_begins() -> None:
    before = counting(meter_after(*LOADED, *READING), COUNTED)
    labels = ("power", "limit without drafts", "context", "private mem")
    assert places(drawn("all", before, ALL), labels) == places(drawn("all", "counted", ALL), labels)
    rows = drawn("all", "counted", ALL)
    at = rows.index("bandwidth      36 of 51 GB/s")
    assert rows[at + 2] == "umc, of measured peak"
    assert any(row.startswith("power     143 W") for row in rows)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("off", ["120 %", "peak measured too low", "probe again"]),
        ("other load", ["96 %", "other load on this machine"]),
        ("cached", ["fits in L3: not memory-bound"]),
        ("no peak", ["no peak · run cpuchat probe"]),
    ],
)
def test_what_keeps_a_figure_from_being_believed_is_said(state: str, words: list[str]) -> None:
    text = "\n".join(drawn("all", state, ALL))
    for word in words:
        assert word in text


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


@pytest.mark.parametrize(
    "off", [None, REFUSED.off, *(DraftsOff("model", note=note) for note in ("words that go on " * 9, "x" * 90))]
)
@pytest.mark.parametrize("figures", [DRAFTING, EXTREME, SpeculationFigures()])
def test_no_row_is_cut_off(figures: SpeculationFigures, off: DraftsOff | None) -> None:
    update = drafted(msgspec.structs.replace(figures, off=off))
    meter = meter_after(*LOADED, *READING, *writing(10), update)
    for what, size in (("brief", BRIEF), ("brief", (8, 28)), ("all", ALL), ("all", (8, 32)), ("line", (1, 58))):
        for row in drawn(what, meter, size):
            assert cell_len(row) <= size[1], row


@dataclasses.dataclass(frozen=True)
class ToyFigures(ChatFigures):
    """The figures with one more, as a contributor adds it to its record."""

    toy_s: Metric[float] = dataclasses.field(default_factory=lambda: missing("no toy yet"))


@pytest.mark.parametrize(("toy", "row"), [(Metric(2.5), "toy             2.50 s"), (missing("no toy yet"), "")])
def test_a_new_figure_needs_a_field_and_a_row(toy: Metric[float], row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def value(now: ChatFigures) -> Metric[float]:
        assert isinstance(now, ToyFigures)
        return now.toy_s

    monkeypatch.setitem(SECTIONS, "timing", (*TIMING, PanelRow("toy", value, units.duration)))
    plain = STATES["writing"][0].figures()
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    figures = ToyFigures(**fields, toy_s=toy)
    rows = ["".join(one.text for one in line) for line in all_figures(frame_of(figures, ALL))]
    written = next(y for y, text in enumerate(rows) if text.startswith("written"))
    assert rows[written + 1] == row


def test_without_drafters_the_section_is_one_row() -> None:
    meter = meter_after(*LOADED, *READING, *writing(10), speculation=Speculation())
    rows = drawn("all", meter, ALL)
    assert "drafts      off (F9 or F2)" in rows and not any(row.startswith("acceptance") for row in rows)
    assert drawn("brief", meter)[10] == "drafts    off"


def test_slower_than_plain_is_not_shown_as_a_success() -> None:
    slow = msgspec.structs.replace(DRAFTING, plain_ms=10.0)
    meter = meter_after(*LOADED, *READING, *writing(10), drafted(slow))
    styles = {part: Style(color=f"color({number})") for number, part in enumerate(PARTS)}
    (shown,) = [one for row in large(frame_of(meter.figures(), BRIEF, styles)) for one in row if "×" in one.text]
    assert float(shown.text.strip("× ")) < 1
    assert shown.style == styles["limit"]


async def test_showing_figures_causes_no_layout_and_draws_changed_rows_only() -> None:
    panel, line = TelemetryPanel(), TelemetryLine()
    app = HostApp(panel, line, css="TelemetryPanel { height: 30; } TelemetryLine { height: 1; }")
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


async def test_all_figures_scroll_where_they_do_not_fit() -> None:
    panel = TelemetryPanel()
    panel.add_class("-all")
    app = HostApp(panel, css="TelemetryPanel { height: 17; width: 32; }")
    async with app.run_test(size=(40, 20)) as pilot:
        await pilot.pause()
        panel.show(STATES["writing"][0].figures(), MEMORY)
        assert not any(row.startswith("private mem") for row in rows_of(panel))
        for _ in range(20):
            panel.post_message(MouseScrollDown(panel, 0, 0, 0, 1, 0, False, False, False))
        await pilot.pause()
        assert rows_of(panel)[-2].startswith("private mem") and rows_of(panel)[-1].startswith("shared mem")


def rows_of(widget: FigureRows) -> list[str]:
    return [widget.render_line(y).text.rstrip() for y in range(widget.size.height)]


async def test_another_theme_gives_other_colours() -> None:
    panel = TelemetryPanel()
    app = HostApp(panel)
    async with app.run_test(size=(80, 34)) as pilot:
        meter, memory = STATES["writing"]
        panel.show(meter.figures(), memory)
        dark, text = panel.render_line(9), rows_of(panel)
        app.theme = "textual-light"
        await pilot.pause()
        panel.show(meter.figures(), memory)
        assert rows_of(panel) == text
        assert panel.render_line(9) != dark


@pytest.mark.parametrize("width", [58, 78, 97])
@pytest.mark.parametrize("state", list(STATES))
def test_the_line_begins_with_the_speed(width: int, state: str) -> None:
    (row,) = drawn("line", state, (1, width))
    starts = {"idle": "no model loaded", "loading": "loading", "loaded": "ready", "reading": "1,792 of 2,048 tokens"}
    assert row.startswith(starts[state]) if state in starts else row[5:11] == " tok/s"


def test_three_figures_are_readable_from_the_back_of_a_room() -> None:
    for size, scale in (((14, 112), 2), ((14, 192), 3)):
        rows = drawn("present", "writing", size)
        height = (5 * scale + 1) // 2
        assert all("█" in row or "▀" in row for row in rows[:height])
        assert rows[height].split() == ["tok/s", "vs", "plain", "memory"]
        assert rows[height + 1].endswith("55.6 limit with drafts") and len(rows) == size[0]
    assert drawn("present", "writing", (10, 74))[5].split() == ["tok/s", "×", "vs", "plain", "%", "memory"]
    assert "first token" in drawn("present", "undrafted", (14, 112))[5]
    assert "seconds left" in drawn("present", "reading", (14, 112))[5]


PICTURE = Path(__file__).parents[3] / "docs" / "figures.md"


def test_the_picture_in_the_docs_is_what_the_panel_draws() -> None:
    """`UPDATE_SNAPSHOTS=1` renews it."""
    notes = {
        1: "live tok/s, and the speed-up over plain decoding",
        3: "the limit that applies now",
        5: "tok/s of the last minute, up to that limit",
        9: "from the request to the first token",
        10: "share of drafted tokens that were accepted, and the drafter",
        11: "bandwidth; ╎ is the measured peak",
        12: "tokens in the context, and its size",
    }
    meter = meter_after(*LOADED, *READING, *writing(60), drafted(DRAFTING))
    panel = [f"{row:<28}" for row in drawn("brief", meter)[:13]]
    head = f"╭─ {title(meter.figures())} ".ljust(31, "─") + "╮"
    lines = [f"│ {row} │  {notes.get(y, '')}".rstrip() for y, row in enumerate(panel)]
    picture = "\n".join(["```text", head, *lines, f"╰{'─' * 30}╯", "```"]).replace("\u2800", " ")
    text = PICTURE.read_text(encoding="utf-8")
    begin, end = text.index("```text"), text.index("```\n", text.index("```text") + 3) + 3
    if os.environ.get("UPDATE_SNAPSHOTS"):
        PICTURE.write_text(text[:begin] + picture + text[end:], encoding="utf-8")
    else:
        assert text[begin:end] == picture


LOOKS = ["idle", "reading", "writing", "refused", "done"]


@pytest.mark.parametrize(
    ("name", "size", "chosen", "everything"),
    [
        ("telemetry-tall", (160, 48), LOOKS, False),
        ("telemetry-low", (160, 20), LOOKS, False),
        ("telemetry-all", (180, 48), LOOKS, True),
        ("roofline-tall", (160, 24), list(MACHINES), False),
        ("roofline-all", (180, 40), list(MACHINES), True),
        ("telemetry-server", (110, 24), list(SERVERS), False),
        ("telemetry-server-all", (110, 40), list(SERVERS), True),
    ],
)
async def test_looks(name: str, size: tuple[int, int], chosen: list[str], everything: bool) -> None:
    panels = [TelemetryPanel() for _ in chosen]
    lines = [TelemetryLine() for _ in chosen]
    for panel in panels:
        panel.set_class(everything, "-all")
    css = "Horizontal { height: 1fr; } TelemetryPanel { border: round $foreground 40%; padding: 0 1; height: 100%; "
    css += "width: 36; } TelemetryLine { height: 1; }" if everything else "width: 32; } TelemetryLine { height: 1; }"
    app = HostApp(Horizontal(*panels), *lines, css=css)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        for state, *widgets in zip(chosen, panels, lines, strict=True):
            meter, memory = ALL_STATES[state]
            for widget in widgets:
                widget.show(meter.figures(), memory, "0.5B")
        await pilot.pause()
        await snapshot(app, name)


async def test_the_presentation_looks() -> None:
    shown = [Presentation() for _ in ("reading", "writing", "done")]
    app = HostApp(*shown, css="Presentation { border: round $foreground 40%; padding: 0 2; height: 14; width: 120; }")
    async with app.run_test(size=(120, 42)) as pilot:
        await pilot.pause()
        for state, widget in zip(("reading", "writing", "done"), shown, strict=True):
            widget.show(ALL_STATES[state][0].figures(), None)
        await pilot.pause()
        await snapshot(app, "presentation")


def test_a_presentation_is_drawn_in_any_window() -> None:
    for height, state in itertools.product(range(1, 14), ("reading", "writing", "done")):
        assert len(drawn("present", state, (height, 20), history=(0.0, 9.0))) >= height


def test_a_context_that_is_nearly_full_has_the_color_of_limits() -> None:
    figures = meter_after(*LOADED).figures()
    assert figures.n_ctx.value == 8192
    styles = {one: Style(meta={"part": one}) for one in PARTS}
    for used, part in ((6553, "fill"), (6554, "limit")):  # 80 %
        nearly = dataclasses.replace(figures, n_past=Metric(used))
        for draw, size in ((figure_sections.context, ALL), (DRAWN["line"], (1, 97)), (brief, BRIEF)):
            rows = draw(frame_of(nearly, size, styles))
            bars = [one.style.meta["part"] for row in rows for one in row if one.style and "█" in one.text]
            assert bars == [part]
