"""Renders one message as lines: title, folded reasoning, content, note; with drafted tokens or agreement marked.

Drafted tokens are colored in the text as it was written, but for a bar beside code: the styles of Markdown would be
taken for those of drafters. Bold, plain and italic tell undrafted text and the drafters apart without colors too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from time import monotonic
from typing import Literal

from rich.cells import cell_len
from rich.style import Style

from cpuchat.base.text import Cleaner, clean, clean_line
from cpuchat.present.tools import returned, title
from cpuchat.protocol.drafters import DRAFTERS
from cpuchat.protocol.messages import ToolStep
from cpuchat.telemetry.units import plural
from cpuchat.tui.markdown.render import MAX, render
from cpuchat.tui.markdown.rows import Line, LineStream, Run, TextRow, TextStyles, plain_rows, prefix, to_line, wrap
from cpuchat.tui.markdown.streaming import Stream

Span = tuple[int, str]
"""Characters, and the drafter that proposed them ("" = the model itself)."""
Spans = tuple[Span, ...]

_NAMES = {"": "the model", **{row.name: row.name for row in DRAFTERS}}


def pieces(text: str, spans: Sequence[Span]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    at = 0
    for length, drafter in spans:
        found.append((text[at : at + length], drafter))
        at += length
    return [*found, (text[at:], "")]


AGREES = "\0"
"""Of text without a style, in `TranscriptMessage.heat`."""


def legend(spans: Spans, width: int, palette: TextStyles) -> list[TextRow]:
    counts: Counter[str] = Counter()
    for length, drafter in spans:
        counts[drafter] += length
    total = counts.total()
    runs: list[Run] = [("proposed by ", palette.dim)]
    shown = [drafter for drafter in _NAMES if counts[drafter] or not total]
    for drafter in shown:
        share = f" {100 * counts[drafter] / total:.0f} %" if total else ""
        runs += [(_NAMES[drafter], palette.of_drafter(drafter))]
        runs += [(share + (", " if drafter != shown[-1] else ""), palette.dim)]
    return wrap(TextRow(runs), width)


GUTTER = 2  # cells; the marker of the selected message stands here
LONGEST_LINE = 81
"""Cells of a line, which is what a terminal of 120 columns leaves beside the figures: no wider one has less. In a wider
view the text is centered."""
LIVE_REASONING = 3  # rows
UNFOLDED_LINES = 200  # of an attachment; all of it may be megabytes
UNFOLDED_CHARACTERS = 20_000
CURSOR = "▍"
STEP = 4000  # characters of a long message that are rendered in one go


@dataclass(frozen=True)
class TranscriptMessage:
    """A message to show. `role` "notice" is the app's own voice. Texts need not be cleaned.

    `note` is one dim line at the end ("stopped", "412 tokens · 41.3 tok/s · end"). `spans` tell who proposed which part
    of `content` (without leading line breaks); () when that is not known. `heat` has parts of `content`, as `spans` do,
    in steps of agreement with another model: "close", "matters", or `AGREES`. `id` is that of the stored message,
    `place` the one among its siblings ("2/3"). `attachments` are the titles and texts of what was sent with it; they
    are cleaned when shown, and so are `steps`. `reasoning_s` is how long it took (0: not known)."""

    role: Literal["user", "assistant", "system", "notice"]
    title: str
    content: str
    reasoning: str = ""
    note: str = ""
    spans: Spans = ()
    heat: Spans = ()
    id: int = 0
    place: str = ""
    attachments: tuple[tuple[str, str], ...] = ()
    reasoning_s: float = 0.0
    steps: tuple[ToolStep, ...] = ()

    def cleaned(self) -> TranscriptMessage:
        return replace(
            self,
            title=clean_line(self.title),
            content=clean(self.content),
            reasoning=clean(self.reasoning),
            note=clean_line(self.note),
        )


@dataclass(frozen=True)
class View:
    """How messages are drawn: `width` cells in all, gutter and right margin included.

    `color_drafts`: answers of which it is known are marked by who proposed what."""

    width: int
    palette: TextStyles
    show_reasoning: bool = False
    color_drafts: bool = False

    @property
    def text_width(self) -> int:
        return min(max(8, self.width - GUTTER - 1), LONGEST_LINE)  # the last column is the cursor's

    @property
    def gutter(self) -> str:
        return " " * max(GUTTER, (self.width - LONGEST_LINE - 1) // 2)

    def line(self, row: TextRow) -> Line:
        return to_line(row, self.width, self.palette.base, self.gutter)

    def lines(self, rows: list[TextRow]) -> list[Line]:
        return [self.line(row) for row in rows]


class Rendering:
    """Renders a complete, `cleaned` message for `view` in steps: `lines` grow, those in `content` are its text."""

    def __init__(self, message: TranscriptMessage, view: View) -> None:
        self.lines: list[Line] = []
        self.content = range(0)
        self._steps = self._render(message, view)

    def step(self) -> bool:
        """Render about `STEP` characters; returns True when nothing is left."""
        return next(self._steps, None) is None

    def _render(self, message: TranscriptMessage, view: View) -> Iterator[bool]:
        rows = title_rows(message, view) + steps_rows(message.steps, view)
        rows += fold_rows(message.reasoning, message.reasoning_s, view)
        rows += [row for attachment in message.attachments for row in attachment_rows(*attachment, view)]
        if message.role == "system" and not message.content and rows and not rows[-1].runs:
            rows.pop()  # after what is unfolded
        self.lines += view.lines(rows)
        start = len(self.lines)
        for part in _content_rows(message, view):
            self.lines += view.lines(part)
            self.content = range(start, len(self.lines))
            if len(message.content) > MAX:
                yield True
        self.lines += view.lines([*note_rows(message.note, view), TextRow()])


def _content_rows(message: TranscriptMessage, view: View) -> Iterator[list[TextRow]]:
    """Render the text of a message: a long one in steps, as while it is written."""
    text, width, palette = message.content.strip("\n"), view.text_width, view.palette
    spans = message.spans if view.color_drafts else ()
    marks = message.heat or spans
    if len(text) > MAX or message.role != "assistant" or marks:
        # What people type is shown as they typed it.
        stream = _new_stream(message.role, bool(spans), view)
        if message.heat:
            styles = {AGREES: Style(), "matters": palette.parted}
            stream = LineStream(width, lambda step: styles.get(step, palette.changed), palette.rule)
        rest = deque(pieces(text, marks))
        while rest:
            _feed(stream, rest)
            rows, tail = stream.update()
            yield rows if rest else rows + tail
        if spans and not message.heat:
            yield legend(spans, width, palette)
    else:
        yield render(text, width, palette)


def _new_stream(role: str, colored: bool, view: View) -> Stream | LineStream:
    """Return what renders the text of such a message in parts."""
    if role == "assistant" and colored:
        return LineStream(view.text_width, view.palette.of_drafter, view.palette.rule)
    if role == "assistant":
        return Stream(view.text_width, view.palette)
    styles = {"user": Style(), "system": view.palette.dim, "notice": view.palette.notice}
    return LineStream(view.text_width, lambda _: styles[role])


def _feed(stream: Stream | LineStream, rest: deque[tuple[str, str]]) -> None:
    left = STEP
    while rest and left > 0:
        text, drafter = rest.popleft()
        if len(text) > left:
            rest.appendleft((text[left:], drafter))
        stream.feed(text[:left], drafter)
        left -= len(text)


def note_rows(note: str, view: View) -> list[TextRow]:
    lines = [""]
    for part in note.split(" · "):
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if cell_len(longer) <= view.text_width:
            lines[-1] = longer
        else:
            lines.append(part)
    return [row for line in lines if line for row in wrap(TextRow([(line, view.palette.dim)]), view.text_width)]


def title_rows(message: TranscriptMessage, view: View) -> list[TextRow]:
    if not message.title:
        return []
    palette = view.palette
    styles = {"user": palette.you, "assistant": palette.model, "system": palette.dim, "notice": palette.notice}
    place = [(f"  ‹ {message.place} ›", palette.marker)] if message.place else []
    return wrap(TextRow([(message.title, styles[message.role]), *place]), view.text_width)


def fold_rows(reasoning: str, seconds: float, view: View) -> list[TextRow]:
    """Render the reasoning of a message, which took `seconds` (0: not known): one line, or all of it when unfolded."""
    if not reasoning.strip():
        return []
    sign = "▾" if view.show_reasoning else "▸"
    head = TextRow([(f"{sign} {_about_reasoning(reasoning, seconds)} (F7)", view.palette.dim)])
    if not view.show_reasoning:
        return [head]
    return [head, *_reasoning_rows(reasoning, view), TextRow()]


def _about_reasoning(reasoning: str, seconds: float) -> str:
    time = f"{seconds:,.0f} s" if seconds >= 1 else ""
    return " · ".join(filter(None, ("reasoning", time, plural(len(reasoning.split()), "word"))))


def attachment_rows(title: str, text: str, view: View) -> list[TextRow]:
    """Render an attachment: one line, or its beginning too when unfolded."""
    n_lines = text.count("\n") + (not text.endswith("\n"))
    sign = "▾" if view.show_reasoning else "▸"
    head = TextRow([(f"{sign} {clean_line(title)} · {plural(n_lines, 'line')} (F7)", view.palette.dim)])
    if not view.show_reasoning:
        return wrap(head, view.text_width)
    shown = "\n".join(text[:UNFOLDED_CHARACTERS].split("\n", UNFOLDED_LINES)[:UNFOLDED_LINES])
    rows = [*wrap(head, view.text_width), *_reasoning_rows(clean(shown), view)]
    if len(shown) < len(text.rstrip("\n")):
        rest = n_lines - shown.count("\n") - 1
        more = f"… {plural(rest, 'more line')}" if rest else "…"
        rows.append(TextRow([("│ ", view.palette.rule), (more, view.palette.dim)]))
    return [*rows, TextRow()]


def steps_rows(steps: Sequence[ToolStep], view: View, state: str = "") -> list[TextRow]:
    """Render what came before an answer: its text, and a line for each call, with the result when unfolded. `state` is
    that of the first call without one."""
    rows: list[TextRow] = []
    for step in steps:
        rows += fold_rows(clean(step.reasoning), 0.0, view)
        if said := clean(step.said).strip("\n"):
            rows += [*render(said, view.text_width, view.palette), TextRow()]
        for call, result in zip_longest(step.calls, step.results[: len(step.calls)]):
            if result is not None:
                rows += attachment_rows(title(call, result), returned(call, result), view)
            else:
                line = clean_line(f"▸ {title(call)} · {state or 'not run'}")
                rows += wrap(TextRow([(line, view.palette.dim)]), view.text_width)
                state = ""
    return [*rows, TextRow()] if rows and rows[-1].runs else rows


def _reasoning_rows(reasoning: str, view: View) -> list[TextRow]:
    bar = ("│ ", view.palette.rule)
    rows = plain_rows(reasoning.strip("\n"), view.text_width - 2, view.palette.dim)
    return prefix(rows, bar, bar)


class OpenMessage:
    """The answer being written. `update` brings `lines` up to date; those that did not change stay the same objects."""

    def __init__(self, title: str, view: View, drafted: bool = False, hint: str = "") -> None:
        """`drafted`: the drafter of each part will be known. `hint` is shown while the model reasons."""
        self._hint = hint
        self.title = title
        self.view = view
        self.drafted = drafted
        self.pending = ""
        self.lines: list[Line] = []
        self._head: list[Line] = []  # title, steps and reasoning
        self._head_of: tuple[object, ...] | None = None
        self.show_steps(())
        self.update()

    def show_steps(self, steps: tuple[ToolStep, ...], state: str = "") -> None:
        """Show these steps, and begin again with the text after them."""
        self.steps, self._step_state = steps, state
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self._cleaner, self._reasoning_cleaner = Cleaner(), Cleaner()
        self._reasoned_at: tuple[float, float] | None = None  # its first and its last text, or the first of the answer
        self._spans: list[Span] = []
        self._render_anew()

    def _render_anew(self) -> None:
        self._stream = _new_stream("assistant", self.drafted and self.view.color_drafts, self.view)
        self._fresh = deque(pieces("".join(self.content), self._spans))  # not seen by it yet
        self._done: list[Line] = []

    def restyle(self, view: View) -> int:
        """Render from the start for another width, palette or folding; returns the first changed line."""
        self.view, self._head_of = view, None
        self._render_anew()
        return self.update()

    def message(self, note: str = "") -> TranscriptMessage:
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        spans, seconds, steps = tuple(self._spans), self.reasoning_s, self.steps
        message = TranscriptMessage(
            "assistant", self.title, content, reasoning, note, spans, reasoning_s=seconds, steps=steps
        )
        return message.cleaned()

    def finish(self, note: str) -> TranscriptMessage:
        self._take(self._cleaner.flush(), "")
        self.reasoning.append(self._reasoning_cleaner.flush())
        return self.message(note)

    @property
    def reasoning_s(self) -> float:
        return self._reasoned_at[1] - self._reasoned_at[0] if self._reasoned_at is not None else 0.0

    def feed(self, text: str, reasoning: bool = False, drafter: str = "") -> None:
        """Add text that `drafter` proposed; `update` renders it."""
        if (reasoning or self._reasoned_at is not None) and not self.content:
            now = monotonic()
            self._reasoned_at = (self._reasoned_at or (now, now))[0], now
        if reasoning:
            self.reasoning.append(self._reasoning_cleaner.feed(text))
        elif cleaned := self._cleaner.feed(text):
            if not self.content:
                cleaned = cleaned.lstrip("\n")
            self._take(cleaned, drafter)

    def _take(self, text: str, drafter: str) -> None:
        if text:
            self.content.append(text)
            self._fresh.append((text, drafter))
            if self.drafted:
                spans, length = self._spans, len(text)
                if spans and spans[-1][1] == drafter:  # adjacent ones of one drafter are merged
                    length += spans.pop()[0]
                if length:
                    spans.append((length, drafter))

    @property
    def behind(self) -> bool:
        """Return whether more text has come than one `update` renders."""
        return bool(self._fresh)

    def update(self) -> int:
        """Render what came in; returns the first changed line."""
        view = self.view
        begun = (len(self.reasoning), bool(self.content), self.steps, self._step_state)
        if begun != self._head_of:
            above = title_rows(TranscriptMessage("assistant", self.title, ""), view)
            above += steps_rows(self.steps, view, self._step_state)
            self._head_of, self._head = begun, view.lines(above + self._live_reasoning())
        key = legend((), view.text_width, view.palette) if isinstance(self._stream, LineStream) else []
        _feed(self._stream, self._fresh)
        final, tail = self._stream.update()
        self._done += view.lines(final)
        waits = bool(self.pending) and not self.content
        if not tail:
            # A line is kept for what comes next: the state of the prefill, then the text's first line.
            tail = note_rows(self.pending, view) if waits else [TextRow()]
        if not waits:
            tail[-1].runs = [*tail[-1].runs, (CURSOR, view.palette.cursor)]
        old, new = self.lines, [*self._head, *self._done, *view.lines([*tail, *key]), view.line(TextRow())]
        first = len(new) if len(new) == len(old) else min(len(new), len(old))
        for index, (before, after) in enumerate(zip(old, new, strict=False)):
            if before is not after and before == after:
                new[index] = before
            elif before is not after:
                first = min(first, index)
        self.lines = new
        return first

    def _live_reasoning(self) -> list[TextRow]:
        text, view = "".join(self.reasoning), self.view
        if not text.strip():
            return []
        if self.content or view.show_reasoning:
            # Unfolded, the last part: all of it would be wrapped again with each token.
            shown = text[-UNFOLDED_CHARACTERS:] if view.show_reasoning and not self.content else text
            return fold_rows(shown, self.reasoning_s, view)
        # The last rows only, at a fixed height: what comes below does not move.
        rows = _reasoning_rows(text[-4 * LIVE_REASONING * view.width :], view)[-LIVE_REASONING:]
        rows += [TextRow([("│ ", view.palette.rule)]) for _ in range(LIVE_REASONING - len(rows))]
        head = " · ".join(filter(None, (f"▾ {_about_reasoning(text, self.reasoning_s)}", self._hint)))
        return [TextRow([(head[: view.text_width], view.palette.dim)]), *rows]
