"""Tests the figures on screen: in fixed places, with units, and nothing where nothing is known."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from rich.style import Style
from textual.containers import Horizontal
from textual.events import MouseScrollDown

from cpuchat.present.answers import load_progress
from cpuchat.protocol.messages import Event, LoadProgress, ModelLoaded, Speculation
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.protocol.timings import DrafterCount, Reuse
from cpuchat.telemetry.meter import ChatFigures, Meter
from cpuchat.telemetry.metric import Metric
from cpuchat.tui.chat import figure_sections
from cpuchat.tui.chat.figure_sections import all_figures
from cpuchat.tui.chat.figures import PARTS, TALL, Frame, brief, one_line, presented, rough, title
from cpuchat.tui.chat.telemetry import FigureRows, TelemetryLine, TelemetryPanel
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
    drafted,
    meter_after,
    reading,
    writing,
)
from tests.support.scripted_backend import DRAFTING, REFUSED
from tests.support.snapshots import HostApp, snapshot

DRAWN = {"brief": brief, "all": all_figures, "line": lambda frame: [one_line(frame)], "present": presented}
ALL_STATES = STATES | MACHINES | SERVERS
LOOKS = ["idle", "reading", "writing", "refused", "done"]
BRIEF, ALL = (33, 27), (33, 32)
"""Rows and columns of the panel at 120×40."""


def frame_of(figures: ChatFigures, size: tuple[int, int] = BRIEF, styles: dict[str, Style] | None = None) -> Frame:
    memory = None if figures.on_server else MEMORY
    return Frame(figures, memory, size[1], size[0], styles or defaultdict(Style), "0.5B")


def drawn(what: str, state: str | Meter, size: tuple[int, int] = BRIEF, **changed: object) -> list[str]:
    """Return the rows as text."""
    meter = ALL_STATES[state][0] if isinstance(state, str) else state
    figures = dataclasses.replace(meter.figures(), **changed)  # type: ignore[arg-type]
    return ["".join(one.text for one in row).rstrip() for row in DRAWN[what](frame_of(figures, size))]


def places(rows: list[str], labels: tuple[str, ...]) -> dict[str, int]:
    return {label: y for y, row in enumerate(rows) for label in labels if row.startswith(label)}


def test_nothing_is_not_available_and_nothing_is_cut() -> None:
    sizes = {"brief": [(33, 27), (12, 27), (4, 27)], "all": [(33, 32), (8, 32)], "line": [(1, 58), (1, 78), (1, 97)]}
    for state in ALL_STATES:
        for what, size in ((kind, size) for kind in sizes for size in sizes[kind]):
            rows = drawn(what, state, size)
            assert "n/a" not in "\n".join(rows), state
            assert all(cell_len(row) <= size[1] for row in rows), (state, rows)


def test_a_load_has_the_same_share_in_status_panel_and_line() -> None:
    for done in (*range(0, 1001, 10), 616, 999):
        event = LoadProgress(phase="reading", done=done, total=1000)
        meter, words = meter_after(event), load_progress("m", event)
        share = words.split()[-2]
        assert share == str(done // 10) or done % 10
        assert words.endswith(f"{share:>3} %") and drawn("line", meter, (1, 78))[0].endswith(f" {share} %")
        assert any(row.endswith(f"{share}%") for row in drawn("brief", meter, (9, 32)))


LABELS = ("first token", "drafts", "memory", "context")


@pytest.mark.parametrize(
    ("what", "size"), [("brief", (33, 32)), ("all", (40, 32)), ("brief", (9, 32)), ("all", (17, 32))]
)
def test_no_row_moves_during_a_whole_answer(what: str, size: tuple[int, int]) -> None:
    """From the prompt to the end, event by event: each label stays where it was first, and so does each unit."""
    meter, found = Meter(), dict[str, set[tuple[int, int]]]()
    answer: list[Event] = [*LOADED, *READING]
    for n, event in enumerate(writing(6)):
        answer += [event, drafted(DRAFTING, n + 2)] if n % 20 == 0 else [event]
    finished = msgspec.structs.replace(FINISHED.timings, speculation=DRAFTING, draft_n=470)
    answer += [drafted(REFUSED, 240), msgspec.structs.replace(FINISHED, timings=finished)]
    meter.asked = Speculation(drafters=("suffix", "draft"))
    labels = (*LABELS, "answer", "prefill", "acceptance  ", "per pass", "bandwidth", "limit", "private mem")
    for n, event in enumerate(answer):
        meter.observe(event, n / 10)
        if n >= len(LOADED) and (what == "brief" or n < len(answer) - 1):
            rows = drawn(what, meter, size)
            for label, y in places(rows, labels).items():
                found.setdefault(label, set()).add((y, rows[y].find(" tok/s")))
    assert len(found) >= 3 and all(len(where) == 1 for where in found.values()), found


def test_the_limit_is_a_line_of_the_timeline_and_the_same_before_and_while_drafts_pass_it() -> None:
    at: dict[str, int] = {}
    for state, limit in (("loaded", 30.7), ("writing", 30.7), ("off", 43.7)):  # raised by what was read
        ((at[state], row),) = (one for one in enumerate(drawn("brief", state)) if one[1].startswith("╌"))
        assert row.endswith(f" {limit} limit")
    assert at["loaded"] == 3 and at["writing"] > 3  # what is faster stands above it
    assert drawn("brief", "idle")[3] == ""


def test_a_speed_now_is_told_from_that_of_the_answer() -> None:
    """While it is written, both; drafts are those of the answer so far, as after it."""
    meter = meter_after(*LOADED, *READING, *writing(6), drafted(DRAFTING))
    timings = msgspec.structs.replace(FINISHED.timings, speculation=DRAFTING)
    for label, other in (("answer ", "written "), ("written ", "answer ")):
        rows = "\n".join(drawn("brief", meter))
        assert label in rows and other not in rows and "drafts    74 %" in rows
        meter.observe(msgspec.structs.replace(FINISHED, timings=timings), 9.0)


def test_an_audience_sees_what_is_known_of_an_answer_of_one_token() -> None:
    one = msgspec.structs.replace(FINISHED.timings, predicted_n=1, predicted_ms=0.0, ttft_ms=210.0)
    meter = meter_after(*LOADED, *READING, writing(6)[0], msgspec.structs.replace(FINISHED, timings=one))
    assert drawn("present", meter, (4, 60))[-1].split("  ")[0] == "s to first token"
    assert drawn("present", meter, (4, 60))[-1].split()[4] == "token"


def test_what_other_programs_take_is_a_row() -> None:
    slow = [msgspec.structs.replace(one, cpu_wait=0.66) if n % 20 == 0 else one for n, one in enumerate(writing(6))]
    meter = meter_after(*LOADED, *READING, *slow)
    assert "cores     34 % yours" in drawn("brief", meter) and rough(meter.figures()) == "rough speeds"
    assert "cores             34 % yours" in drawn("all", meter, ALL)
    assert " · cores 34 % yours · " in drawn("line", meter, (1, 97))[0]
    meter.observe(FINISHED, 9.0)  # whose worker was alone, taken as a whole
    assert not any("yours" in row for row in drawn("brief", meter))


def test_a_limit_is_not_below_what_was_measured() -> None:
    now = ALL_STATES["undrafted"][0].figures()
    limit, plain = now.roofline.ceiling_plain.value, now.drafting.plain_tok_s.value
    assert limit is not None and plain is not None and limit >= 0.99 * plain
    assert rough(now) == "rough speeds" and not rough(STATES["writing"][0].figures())


def test_why_not_more_was_reused_stands_below() -> None:
    told = {"message 2 was edited", "210 tokens re-evaluated", "restored from disk in 40 ms"}
    for events in (reading(EDITED), [*reading(EDITED), *writing(10), drafted(DRAFTING)]):
        rows = drawn("all", meter_after(*LOADED, *events), ALL)
        assert set(rows[-3:]) == told and "reused     1,536 of 2,048 tokens" in rows
    most = Reuse(source="memory", ms=12_345.0, changed="template", message=1234, again=131_072)
    assert all("…" not in row for row in drawn("all", meter_after(*LOADED, *reading(most)), ALL))
    full = drawn("all", "done", ALL, reuse=Reuse(), prefill_cached=Metric(131_071), prefill_total=131_072)
    assert "reused 131,071 of 131,072 tokens" in full


def test_what_a_server_does_not_report_names_the_option() -> None:
    assert "For acceptance: not reported by this server; start it with drafts" in " ".join(drawn("all", "silent", ALL))
    assert "".join(drawn("line", "silent", (1, 97))).count("≈") == 1
    before = "\n".join(drawn("all", meter_after(ModelLoaded(model=SERVED)), ALL))
    assert "acceptance" not in before and "For reused: start vLLM" in before


@pytest.mark.parametrize("note", ["", "words that go on " * 9, "x" * 90])
def test_no_row_is_cut_off(note: str) -> None:
    draft = DrafterCount(name="draft", draft_n=460, draft_n_accepted=469)
    suffix = DrafterCount(name="suffix", draft_n=10, draft_n_accepted=1)
    extreme = msgspec.structs.replace(
        DRAFTING,
        draft_n=470,
        draft_n_accepted=470,
        passes=13,
        by_position=((13, 13),) * 31,
        by_drafter=(draft, suffix),
        depth=31,
        off=DraftsOff("model", note=note) if note else None,
    )
    meter = meter_after(*LOADED, *READING, *writing(10), drafted(extreme))
    for what, size in (("brief", BRIEF), ("brief", (8, 27)), ("all", ALL), ("all", (8, 32)), ("line", (1, 58))):
        assert all(cell_len(row) <= size[1] for row in drawn(what, meter, size))


def test_without_drafters_the_section_is_one_row() -> None:
    meter = meter_after(*LOADED, *READING, *writing(10), speculation=Speculation())
    rows = drawn("all", meter, ALL)
    assert "drafts      off (F9 or F2)" in rows and not any(row.startswith("acceptance") for row in rows)
    assert "drafts     off" in drawn("brief", meter)


async def test_all_figures_scroll_where_they_do_not_fit() -> None:
    panel = TelemetryPanel()
    panel.add_class("-all")
    app = HostApp(panel, css="TelemetryPanel { height: 17; width: 32; }")
    async with app.run_test(size=(40, 20)) as pilot:
        await pilot.pause()
        panel.show(STATES["writing"][0].figures(), MEMORY)
        assert not any(row.endswith("by position") for row in rows_of(panel))
        for _ in range(20):
            panel.post_message(MouseScrollDown(panel, 0, 0, 0, 1, 0, False, False, False))
        await pilot.pause()
        assert rows_of(panel)[-2].endswith("by position")


def rows_of(widget: FigureRows) -> list[str]:
    return [widget.render_line(y).text.rstrip() for y in range(widget.size.height)]


def test_the_line_begins_with_the_speed() -> None:
    starts = {"idle": "no model loaded", "loading": "loading", "loaded": "ready", "reading": "1,792 of 2,048 tokens"}
    for state in STATES:
        for width in (58, 78, 97):
            (row,) = drawn("line", state, (1, width))
            assert row.startswith(starts[state]) if state in starts else " tok/s" in row[5:19]


PICTURE = Path(__file__).parents[3] / "docs" / "figures.md"


def test_the_picture_in_the_docs_is_what_the_panel_draws() -> None:
    """`UPDATE_SNAPSHOTS=1` renews it."""
    notes = {
        1: "live tok/s, and the speed-up of the answer over plain decoding",
        3: "tok/s of the last minute",
        4: "the limit of plain decoding, which drafts may pass",
        9: "average of the answer",
        10: "from the request to the first token",
        11: "share of the read bandwidth; ╎ is its peak",
        12: "tokens in the context, and its size",
        13: "share of drafted tokens that were accepted, and the drafter",
    }
    meter = meter_after(*LOADED, *READING, *writing(60), drafted(DRAFTING))
    panel = [f"{row:<27}" for row in drawn("brief", meter, (TALL + 2, 27))[: TALL + 1]]
    head = f"╭─ {title(meter.figures())} ".ljust(30, "─") + "╮"
    lines = [f"│ {row} │  {notes.get(y, '')}".rstrip() for y, row in enumerate(panel)]
    picture = "\n".join(["```text", head, *lines, f"╰{'─' * 29}╯", "```"]).replace("\u2800", " ")
    text = PICTURE.read_text(encoding="utf-8")
    begin, end = text.index("```text"), text.index("```\n", text.index("```text") + 3) + 3
    if os.environ.get("UPDATE_SNAPSHOTS"):
        PICTURE.write_text(text[:begin] + picture + text[end:], encoding="utf-8")
    else:
        assert text[begin:end] == picture


@pytest.mark.parametrize(
    ("name", "size", "chosen", "everything"),
    [
        ("telemetry-tall", (160, 48), LOOKS, False),
        ("telemetry-all", (180, 48), LOOKS, True),
        ("roofline-all", (180, 40), list(MACHINES), True),
        ("telemetry-server-all", (110, 40), list(SERVERS), True),
    ],
)
async def test_looks(name: str, size: tuple[int, int], chosen: list[str], everything: bool) -> None:
    panels = [TelemetryPanel() for _ in chosen]
    lines = [TelemetryLine() for _ in chosen]
    for panel in panels:
        panel.set_class(everything, "-all")
    css = "Horizontal { height: 1fr; } TelemetryPanel { border: round $foreground 40%; padding: 0 1; height: 100%; "
    css += "width: 36; } TelemetryLine { height: 1; }" if everything else "width: 31; } TelemetryLine { height: 1; }"
    app = HostApp(Horizontal(*panels), *lines, css=css)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        for state, *widgets in zip(chosen, panels, lines, strict=True):
            meter, memory = ALL_STATES[state]
            for widget in widgets:
                widget.show(meter.figures(), memory, "0.5B")
        await pilot.pause()
        await snapshot(app, name)


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
