"""The stage: two answers as a race on one clock, what each token cost, and how far both sides agree.

What is drawn follows from a `Recording` and a time alone, so it can be replayed where no model runs.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf
from textwrap import wrap
from time import monotonic
from typing import ClassVar, NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.renderables.digits import DIGITS, DIGITS3X3_BOLD
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget

from cpuchat.base.text import clean_line
from cpuchat.compare.agreement import Agreement
from cpuchat.compare.recording import Recording
from cpuchat.models.file_names import shortened
from cpuchat.present import compare
from cpuchat.telemetry import units
from cpuchat.tui.widgets.charts import merged, nice_max

Line = list[tuple[str, str]]
"""A row as (text, part): a part of `Stage.COMPONENT_CLASSES`, "" for plain text."""

WIDE = 92
"""Columns from which on the ratio is in large digits, and bytes and bandwidth have a row."""
_LIVE_TITLE = "one after the other"
_FLAG, _TRACK, _AFTER = "⚑", "▆", "┄"
_MARKS = {"agrees": ("■", "same"), "close": ("□", "changed"), "matters": ("◆", "parted")}
"""Of a token by its step of the agreement, tinted like that in both answers. In a cell for several, the last of these
counts."""
_STEPS: Line = [("■", "same"), (" agrees  ", "label"), ("□ close", "changed"), ("  ", ""), ("◆ matters", "parted")]
_MAX_BAR, _LABEL, _RATE = 24, 17, 12


class Scene(NamedTuple):
    """A recording with what drawing it takes. `say` is the sentence; the strip shows the `agreement` on A's answer,
    once that is known."""

    recording: Recording
    say: str = ""
    agreement: Agreement | None = None

    def rows(self, at_ms: float, width: int) -> list[Line]:
        """Draw the state `at_ms` after the first token; as many rows whatever the time."""
        wide = width >= WIDE
        if wide:
            ratio = self._ratio(at_ms)
            lines = self._tracks(at_ms, width - 16, 1, "")
            for line, text in zip(lines, _large(ratio[0]) if ratio else [""] * 3, strict=True):
                gap = width - _length(line) - len(text)
                line += [(" " * max(gap, 0), ""), (text, ratio[1] if ratio else "")]
            lines += self._costs(width)
        else:
            lines = self._tracks(at_ms, width, 0, " ")
        if (strip := self._strip(at_ms, width, wide)) is not None:
            lines.append(strip)
        said = [row for line in self.say.splitlines() for row in wrap(line, max(width, 1))]  # may have no column left
        is_shown = at_ms >= self.recording.end_ms
        return [*lines, *([(text, "value")] if is_shown else [] for text in said)]

    def _ratio(self, at_ms: float) -> tuple[str, str] | None:
        """Return the ratio and its side's part, from the first finish on."""
        recording = self.recording
        if recording.leader is None or at_ms < recording.finish_ms:
            return None
        return compare.ratio(recording), "ab"[recording.leader]

    def _tracks(self, at_ms: float, width: int, n_scales: int, tail: str) -> list[Line]:
        """Draw both tracks, below a scale; with `tail`, the ratio is at the end of the leader's."""
        recording = self.recording
        names = [f"{letter} {clean_line(side.name)}" for letter, side in zip("AB", recording.sides, strict=True)]
        names = shortened(names, width // 4)
        labels = max(map(len, names)) + 1
        ratio = self._ratio(at_ms) if tail else None
        track = max(width - labels - _RATE - (8 if tail else 0), 4)
        longest = max(len(side.tokens) for side in recording.sides)
        top = float(max(longest, 2)) if recording.complete else nice_max(max(longest, 50))
        lines: list[Line] = [_scale(labels, track, top)] * n_scales
        disturbed = recording.verdict.kind == "disturbed"  # no race then: gray, and nobody reaches a finish
        for index, (side, name) in enumerate(zip(recording.sides, names, strict=True)):
            part, rate = "label" if disturbed else "ab"[index], side.rate_at(at_ms)
            n, solid = side.n_at(at_ms), side.n_at(min(at_ms, recording.finish_ms))
            cells, full = (round(count * (track - 1) / top) for count in (n, solid))
            flag = _FLAG if side.ended and n == len(side.tokens) and not disturbed else ""
            rest = track - cells - len(flag)
            line: Line = [(name.ljust(labels), part), (_TRACK * full, part), (_AFTER * (cells - full), part),
                          (flag, part), (" " * rest, "")]  # fmt: skip
            style = "label" if disturbed else "value"
            line.append((f"{units.rate(rate):>6} tok/s" if rate is not None else " " * _RATE, style))
            if ratio is not None and ratio[1] == part:
                line.append((f"{ratio[0]:>7}", f"{part}-ratio"))
            lines.append(line)
        return lines

    def _costs(self, width: int) -> list[Line]:
        """Draw the bytes per token, and how far the memory was used."""
        sides = self.recording.sides
        sizes = [side.bytes_per_token for side in sides]
        max_size = max((size for size in sizes if size), default=0.0)
        if not max_size:
            return []
        cells = max(4, min(_MAX_BAR, (width - 74) // 4))
        line: Line = [("bytes per token".ljust(_LABEL), "label")]
        for part, size in zip("ab", sizes, strict=True):
            if size:
                filled = max(1, round(cells * size / max_size))
                line += [(f"{part.upper()} ", part), (_TRACK * filled + " " * (cells - filled), part),
                         (f" {units.size(size):<9}", "value")]  # fmt: skip
        if all(side.cached for side in sides):
            line.append(("memory bus  idle: weights fit in L3", "label"))
        elif any(side.utilization for side in sides):
            line.append((" memory bus  ", "label"))
            for part, side in zip("ab", sides, strict=True):
                if (used := side.utilization) is not None:
                    line += [(f"{part.upper()} ", part), ((_TRACK * round(cells * min(used, 1.0))).ljust(cells), part),
                             (f" {100 * used:.0f} %".ljust(7), "value")]  # fmt: skip
        return [line]

    def _strip(self, at_ms: float, width: int, wide: bool) -> Line | None:
        """Draw A's answer from left to right, token by token: whether B agrees; None where that is not known."""
        times = [ms for _, ms in self.recording.sides[0].tokens]
        tokens = self.agreement.answers[0].tokens if self.agreement is not None else ()
        if self.agreement is None or not times or not tokens:
            return None
        label = "agreement".ljust(_LABEL if wide else 10)
        text = compare.brief_agreement(self.agreement)
        room, legend = 0, list[tuple[str, str]]()
        for legend in (_STEPS, _STEPS[2:], []):
            room = width - len(label) - len(text) - 2 - (_length(legend) + 2 if legend else 0)
            if room >= 8:
                break
        n = len(tokens)
        cells = max(1, min(n, room))
        line: Line = [(label, "label")]
        for start, end in pairwise(round(n * cell / cells) for cell in range(cells + 1)):
            step = max((token.step for token in tokens[start:end]), key=[*_MARKS].index)
            line.append(_MARKS[step] if at_ms >= times[min(end, len(times)) - 1] else (" ", ""))
        line.append((f"  {text if at_ms >= self.recording.end_ms else ' ' * len(text)}", "value"))
        gap = width - _length(line) - _length(legend)
        return [*merged(line), (" " * gap, ""), *legend] if legend else merged(line)


def _length(line: Line) -> int:
    return sum(len(text) for text, _ in line)


def _scale(labels: int, track: int, top: float) -> Line:
    """Draw the scale of tokens: a number where its token is."""
    cells = [" "] * (track + _RATE)
    step = next(one for power in range(9) for base in (1, 2, 5) if (one := base * 10**power) * (track - 1) / top >= 9)
    end = 0
    for value in range(0, int(top) + 1, step):
        at, text = round(value * (track - 1) / top), f"{value:,}"
        cells[at : at + len(text)] = text
        end = at + len(text)
    cells[end : end + 7] = " tokens"
    return [(" " * labels, ""), ("".join(cells)[: track + _RATE], "label")]


def _large(text: str) -> list[str]:
    rows = ["", "", ""]
    for character in text.replace("×", "x"):
        if character in DIGITS:
            at = 3 * DIGITS.index(character)
            for row, shape in enumerate(DIGITS3X3_BOLD[at : at + 3]):
                rows[row] += shape.ljust(3)
        else:
            rows = [rows[0] + " ", rows[1] + " ", rows[2] + character]
    return rows


class Stage(Widget):
    """Shows a recording: at rest, while it is made, or replayed at real speed, but in 2.5 to 8 s."""

    PARTS: ClassVar = ("a", "b", "a-ratio", "b-ratio", "label", "value", "same", "changed", "parted")
    COMPONENT_CLASSES: ClassVar[set[str]] = {f"stage--{part}" for part in PARTS}
    MAX_S, MIN_S = 8.0, 2.5
    FRAMES_PER_S = 15

    class Replayed(Message):
        """A replay has come to its end."""

    def __init__(self, *keys: str, id: str | None = None) -> None:
        """`keys` are named where a sentence asks for another round, as of `present.compare.verdict`."""
        super().__init__(id=id)
        self._keys = keys
        self._scene: Scene | None = None
        self.at_ms = inf
        """The time that is shown, in ms after the first token; infinity for the end."""
        self._lines: list[Line] = []
        self._strips: list[Strip] = []
        self._styles: dict[str, Style] = {}  # working them out costs more than drawing does
        self._timer: Timer | None = None
        self._began = 0.0

    @property
    def recording(self) -> Recording | None:
        return self._scene.recording if self._scene is not None else None

    def show(self, recording: Recording, then: str = "") -> None:
        """Show it as it ended, with a line `then` below the verdict."""
        verdict = compare.verdict(recording.verdict, [side.name for side in recording.sides], *self._keys)
        none = "Stopped: no verdict." if recording.stopped else "No verdict without two complete answers."
        self._take(Scene(recording, "\n".join(filter(None, (clean_line(verdict or none), then)))))
        self.border_title = Content(compare.label(recording))

    def live(self, recording: Recording, status: str) -> None:
        """Show what is written so far; `status` says what runs."""
        self._take(Scene(recording, clean_line(status)))
        if str(self.border_title or "") != _LIVE_TITLE:
            self.border_title = Content(_LIVE_TITLE)

    def conclude(self, agreement: Agreement | None, say: str = "") -> None:
        """Show the agreement, and lines in place of the sentence."""
        if self._scene is not None:
            self._scene = Scene(self._scene.recording, say or self._scene.say, agreement)
            self._show_changes()
            self.refresh(layout=True)

    def show_at(self, at_ms: float) -> None:
        """Show what was written `at_ms` after the first token."""
        self.at_ms = at_ms
        self._show_changes()

    def replay(self) -> None:
        """Show it from the first token on, once more."""
        recording = self.recording
        if recording is None or not recording.complete or recording.end_ms <= 0:
            return
        self._stop()
        self._began = monotonic()
        speed = recording.end_ms / 1e3 / self._seconds(recording)
        pace = f" · shown at {units.factor(speed)} speed" if not 0.95 <= speed <= 1.05 else ""
        self.border_title = Content(compare.label(recording) + pace)
        self._timer = self.set_interval(1 / self.FRAMES_PER_S, self._advance)
        self._advance()

    def _seconds(self, recording: Recording) -> float:
        return min(max(recording.end_ms / 1e3, self.MIN_S), self.MAX_S)

    def _advance(self) -> None:
        assert self._scene is not None
        recording = self._scene.recording
        share = (monotonic() - self._began) / self._seconds(recording)
        if share >= 1:
            self._stop()
            self.border_title = Content(compare.label(recording))
            self.post_message(self.Replayed())
        self.show_at(inf if share >= 1 else share * recording.end_ms)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer = None

    def _take(self, scene: Scene) -> None:
        self._stop()
        before = len(self._lines)
        self._scene, self.at_ms = scene, inf
        self._show_changes()
        if len(self._lines) != before:
            self.refresh(layout=True)

    # Drawing

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._scene.rows(self.at_ms, width)) if self._scene is not None else 0

    def _show_changes(self) -> None:
        width = self.content_size.width
        if self._scene is None or not width or not self.is_attached:
            return
        old, self._lines = self._lines, self._scene.rows(self.at_ms, width)
        changed = [y for y, line in enumerate(self._lines) if y >= len(old) or line != old[y]]
        self._strips = (self._strips + [Strip([])] * len(self._lines))[: len(self._lines)]
        for y in changed:
            self._strips[y] = self._strip(self._lines[y], width)
        if changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def _strip(self, line: Line, width: int) -> Strip:
        if not self._styles:
            self._styles = {part: self.get_component_rich_style(f"stage--{part}") for part in self.PARTS}
            self._styles[""] = self.rich_style
        strip = Strip(Segment(text, self._styles[part]) for text, part in line if text)
        return strip.adjust_cell_length(width, self._styles[""])

    def _redraw(self) -> None:
        self._lines, self._strips, self._styles = [], [], {}
        self._show_changes()

    def on_resize(self) -> None:
        self._redraw()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self.call_later(self._redraw)

    def render_line(self, y: int) -> Strip:
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width, self.rich_style)
