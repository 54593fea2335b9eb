"""The transcript: one virtual scroll view over cached lines, of which only the open block is rendered again.

Stock Markdown widgets cost a multiple of the CPU (each layout walks every mounted block), and those cores belong to
inference. Here a finished message is a list of strips, and a streamed one renders what the last flush has changed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter
from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import BindingType
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from cpuchat.base.text import clean
from cpuchat.protocol.messages import Channel
from cpuchat.tui import keys
from cpuchat.tui.markdown import rows as palettes
from cpuchat.tui.markdown.message_view import GUTTER, STEP, OpenMessage, Rendering, TranscriptMessage, View, pieces
from cpuchat.tui.markdown.render import code_blocks
from cpuchat.tui.markdown.rows import CodeBlock, Line, copied_text, selected
from cpuchat.tui.threads import LoopTimer

MessageSource = TranscriptMessage | Callable[[], TranscriptMessage]


@dataclass(eq=False, slots=True)
class TranscriptEntry:
    """One message on screen. `view` is what `lines` were rendered for, None before; `message` is cleaned then. While a
    long one is rendered, in steps, `lines` are those for the view before, at first those that there are.

    `source` is the message, or makes it when it is needed: all those of a long chat at once would be felt. `open` is
    set while it is written; `message` is then its beginning. `content` are the lines of a complete message without
    its title, reasoning and note."""

    source: MessageSource
    open: OpenMessage | None = None
    view: View | None = None
    lines: list[Line] = field(default_factory=list)
    content: range = range(0)
    _rendering: tuple[View, Rendering] | None = None

    @property
    def message(self) -> TranscriptMessage:
        if not isinstance(self.source, TranscriptMessage):
            self.source = self.source()
        return self.source

    @message.setter
    def message(self, message: TranscriptMessage) -> None:
        self.source = message
        if self._rendering is not None:
            self.view = self._rendering = None

    def is_current(self, view: View | None) -> bool:
        return self._rendering is None and (self.view is view or self.view == view)

    @property
    def now(self) -> TranscriptMessage:
        if self.open is not None:
            return self.open.message()
        return self.message if self.view is not None else self.message.cleaned()

    def render(self, view: View) -> int:
        """Render `lines` for `view`, the next part of a long message; returns the first that changed."""
        if self.open is not None:
            first = self.open.update() if self.open.view == view else self.open.restyle(view)
            self.lines, self.view = self.open.lines, view
            return first
        if self._rendering is None or self._rendering[0] != view:
            if self.view is None:
                self.message = self.message.cleaned()
            self._rendering = view, Rendering(self.message, view)
        rendering = self._rendering[1]
        if done := rendering.step():
            self.view, self._rendering = view, None
        if done or not self.lines:
            self.lines = rendering.lines
        self.content = rendering.content if self.lines is rendering.lines else self.content
        return 0


class Entries(list[TranscriptEntry]):
    """Entries in order. After lines have changed, `recount` brings the line numbers up to date."""

    def __init__(self, entries: Iterable[TranscriptEntry] = ()) -> None:
        super().__init__(entries)
        self.recount()

    def recount(self) -> None:
        self.starts = [0, *accumulate(len(entry.lines) for entry in self)]

    @property
    def height(self) -> int:
        return self.starts[-1]

    def end(self, before: int, view: int, following: bool) -> int:
        """Return the line after the last that can be scrolled into a view of `view` lines; it was `before`.

        An answer that is written and followed has the view move on by a third of its height at a time: in between the
        text stands still, and only new lines are drawn."""
        if self.height <= view:
            return self.height
        step, left = view // 3, before - self.height
        if left < 0:
            left = step if following and self.open_answer() is not None else 0
        return self.height + min(left, step)

    def at(self, line: int) -> int:
        """Return the index of the entry with `line`, the nearest one beyond the ends."""
        return min(max(0, bisect_right(self.starts, line) - 1), len(self) - 1)

    def line(self, number: int) -> Line:
        index = self.at(number)
        return self[index].lines[number - self.starts[index]]

    def open_entry(self) -> TranscriptEntry | None:
        return next((entry for entry in self if entry.open is not None), None)

    def open_answer(self) -> OpenMessage | None:
        return entry.open if (entry := self.open_entry()) is not None else None


MIN_INTERVAL = 0.1  # s between flushes; more when a flush is slow, so that rendering stays near 10 % of a core
COST_FACTOR = 10
CHUNK = 6000  # characters rendered in one go when everything must be rendered again
_CHUNK_PAUSE = 0.005  # s between two of them, for keys and other widgets


class Transcript(ScrollView, can_focus=True):
    """Shows messages, follows an answer while it is written, and provides text to copy."""

    COMPONENT_CLASSES: ClassVar[set[str]] = palettes.COMPONENT_CLASSES
    DEFAULT_CSS = f"""
    Transcript {{
        height: 1fr;
        overflow-x: hidden;
        overflow-y: auto;
        scrollbar-gutter: stable;
        scrollbar-size-vertical: 1;
        {palettes.COMPONENT_CSS}
    }}
    """
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("transcript")

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.min_interval = MIN_INTERVAL
        """Seconds between two drawings of the text that is being written, at least."""
        self.on_flush: Callable[[], None] = lambda: None
        """Called after each of them, before the screen is painted."""
        self._entries = Entries()
        self._end = 0  # of what can be scrolled into view
        self._view: View | None = None
        self._show_reasoning = False
        self.colors_drafts = False
        self._current: int | None = None
        self._jump: int | None = None  # the message to scroll to, once it is rendered
        self.following = True
        """New text scrolls into view."""
        self._steering = False
        self._restyle_asked = False
        self._flush_timer = LoopTimer(self.flush)
        self._chunk_timer = LoopTimer(self._render_stale)
        self._not_before = 0.0

    # What is shown

    @property
    def messages(self) -> list[TranscriptMessage]:
        return [entry.now for entry in self._entries]

    @property
    def lines(self) -> list[Line]:
        return [line for entry in self._entries for line in entry.lines]

    @property
    def up_to_date(self) -> bool:
        """Return False while a part of a long chat is not rendered yet."""
        return self._view is not None and all(entry.is_current(self._view) for entry in self._entries)

    def set_messages(self, messages: Sequence[MessageSource], top: int | None = None) -> None:
        """Show only these, from the end or from the one at `top`, which is selected; long chats in chunks."""
        self._flush_timer.stop()
        self._entries = Entries([TranscriptEntry(message) for message in messages])
        self._current = self._jump = top
        self._end = 0
        self.following = top is None
        self._render_stale()
        if not self._entries:
            self._resized()
            self.refresh()

    def add_message(self, message: TranscriptMessage) -> None:
        self._append(TranscriptEntry(message))

    def begin_answer(self, title: str, drafted: bool = False, hint: str = "") -> None:
        """Open an answer and follow it; an open one is finished first.

        `drafted`: `append` will name the drafter of each part. `hint` is shown while the model reasons."""
        self.finish_answer()
        self._current = None
        message = TranscriptMessage("assistant", title, "").cleaned()
        self.following = True
        view = self._view or View(80, palettes.TextStyles())
        self._append(TranscriptEntry(message, OpenMessage(message.title, view, drafted, hint)))

    def reopen_answer(self, title: str, drafted: bool = False, hint: str = "") -> None:
        """Open the last answer again, with its text; see `begin_answer`."""
        at = max(at for at, entry in enumerate(self._entries) if entry.message.role == "assistant")
        before = self._entries[at].message
        self._entries = Entries(self._entries[:at])
        self.begin_answer(title, drafted, hint)
        if (answer := self._entries.open_answer()) is not None:
            answer.show_steps(before.steps)
            if before.reasoning:
                answer.feed(before.reasoning, reasoning=True)
            for text, drafter in pieces(before.content, before.spans):
                answer.feed(text, drafter=drafter)
            self.flush()

    def set_pending(self, text: str) -> None:
        """Show one dim line in the open answer until its text comes ("prefill 512/2048")."""
        text = clean(text).replace("\n", " ")
        if (answer := self._entries.open_answer()) is not None and answer.pending != text:
            answer.pending = text
            self._flush_soon()

    def append(self, text: str, channel: Channel = "answer", drafter: str = "") -> None:
        """Add to the open answer; the next flush renders it. The first text does not wait for one."""
        if (answer := self._entries.open_answer()) is not None:
            draw = self._flush_soon if answer.content or answer.reasoning else self.flush
            answer.pending = ""
            answer.feed(text, channel == "reasoning", drafter)
            draw()

    def finish_answer(self, note: str = "") -> TranscriptMessage | None:
        """Close the open answer, render it as a whole and return it; None without one."""
        self._flush_timer.stop()
        if (entry := self._entries.open_entry()) is None or entry.open is None:
            return None
        entry.message, entry.open = entry.open.finish(note), None
        self._show_whole(entry)
        return entry.message

    def toggle_reasoning(self) -> None:
        self._show_reasoning = not self._show_reasoning
        self._restyle()

    def color_drafts(self, on: bool) -> None:
        self.colors_drafts = on
        self._restyle()

    # Text for the clipboard

    def current_message_text(self) -> str:
        """Return the text of the message under the marker, or of the last answer; "" without one."""
        if self._current is not None and self._current < len(self._entries):
            return self._entries[self._current].now.content
        return next((one.now.content for one in reversed(self._entries) if one.message.role == "assistant"), "")

    def code_blocks(self) -> list[CodeBlock]:
        return code_blocks(self.current_message_text())

    # Rendering

    def _append(self, entry: TranscriptEntry) -> None:
        self._entries.append(entry)
        self._show_whole(entry)

    def _show_whole(self, entry: TranscriptEntry) -> None:
        if self._view is not None:
            entry.render(self._view)
        self._resized()
        self.refresh()
        if not entry.is_current(self._view):
            self._chunk_timer.start(_CHUNK_PAUSE)

    def _resized(self) -> None:
        """Recount the lines and keep the place in the text (or the end, when following)."""
        self._entries.recount()
        width, height = self.scrollable_content_region.size
        self._end = self._entries.end(self._end, height, self.following)
        size = Size(width, self._end)
        if size != self.virtual_size:
            self._steering = True
            # Not by assignment: that would lay out the whole screen, and nothing outside this widget moves.
            self.set_reactive(Transcript.virtual_size, size)  # pyright: ignore[reportArgumentType]
            self._scroll_update(size)
            self._steering = False
        if self.following:
            self._steer(self.max_scroll_y)

    def _steer(self, y: float) -> None:
        """Scroll without counting it as an action of the user."""
        self._steering = True
        self.scroll_to(y=y, animate=False)
        self._steering = False

    def _restyle(self) -> None:
        """Render for another width, theme or folding: what is visible now, the rest in chunks."""
        self._restyle_asked = False
        width = self.scrollable_content_region.width
        if not self.is_attached or width <= 0:
            return
        view = View(width, palettes.from_widget(self), self._show_reasoning, self.colors_drafts)
        if view != self._view:
            self._view = view
            self._end = 0
            self._render_stale()

    def _render_stale(self) -> None:
        """Render outdated entries: all visible ones, others up to `CHUNK` characters."""
        self._chunk_timer.stop()
        view = self._view
        if view is None or not self._entries:
            return
        jump = self._jump
        top = self._entries.at(self.scroll_offset.y) if jump is None else jump
        offset, height = self.scroll_offset.y - self._entries.starts[top], max(1, len(self._entries[top].lines))
        room, budget = self.size.height, CHUNK
        left = False
        start = len(self._entries) if self.following else top  # from there down, then from there up
        for entry in (*self._entries[start:], *reversed(self._entries[:start])):
            if not entry.is_current(view):
                if left or (room <= 0 and budget <= 0):
                    left = True
                    break
                entry.render(view)
                budget -= min(STEP, len(entry.message.content)) + len(entry.message.reasoning) + 100
                left = not entry.is_current(view)
            room -= len(entry.lines)
        self._resized()
        if not self.following:
            line = offset * len(self._entries[top].lines) // height if jump is None else 0
            self._steer(self._entries.starts[top] + line)
        self.refresh()
        if jump is not None and self._entries[jump].is_current(view):
            self._jump = None
        if left:
            self._chunk_timer.start(_CHUNK_PAUSE)

    def _flush_soon(self) -> None:
        self._flush_timer.start(self._not_before - perf_counter())

    def flush(self) -> None:
        """Render what has come since the last flush (a timer does it otherwise)."""
        self._flush_timer.stop()
        if (entry := self._entries.open_entry()) is None:
            return
        started = perf_counter()
        old_count, old_scroll = len(entry.lines), self.scroll_offset.y
        first = entry.render(self._view) if self._view is not None else 0
        if len(entry.lines) != old_count:
            self._resized()
        if self.scroll_offset.y == old_scroll:  # else the scroll has the whole view drawn again
            start = self._entries.starts[self._entries.index(entry)] - old_scroll
            top, bottom = max(0, start + first), min(self.size.height, start + max(len(entry.lines), old_count))
            if top < bottom:
                self.refresh(Region(0, top, self.scrollable_content_region.width, bottom - top))
        self._not_before = started + max(self.min_interval, COST_FACTOR * (perf_counter() - started))
        if entry.open is not None and entry.open.behind:
            self._flush_timer.start(_CHUNK_PAUSE)
        self.on_flush()

    # Drawing

    def render_line(self, y: int) -> Strip:
        width = self._view.width if self._view else self.scrollable_content_region.width
        base = self._view.palette.base if self._view else self.rich_style
        at = y + self.scroll_offset.y
        if at >= self._entries.height:
            return Strip.blank(width, base)
        strip = self._entries.line(at).strip
        if self._current is not None and self.has_focus and self._view and self._entries.at(at) == self._current:
            marker = Strip([Segment("▌ ", base + self._view.palette.marker)], GUTTER)
            left = len(self._view.gutter)
            strip = Strip.join([strip.crop(0, left - GUTTER), marker, strip.crop(left)])
        if (selection := self.text_selection) is not None and (span := selection.get_span(at)) is not None:
            strip = selected(strip, *span, self.screen.get_component_rich_style("screen--selection"))
        if strip.cell_length != width:
            strip = strip.adjust_cell_length(width, base)
        return strip.apply_offsets(0, at)

    # Selecting with the mouse

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        lines = self.lines
        start = (selection.start.y, selection.start.x) if selection.start else (0, 0)
        end = (selection.end.y, selection.end.x) if selection.end else (len(lines), 0)
        return copied_text(lines, start, end), "\n"

    # The marker

    def action_mark(self, step: int) -> None:
        if not self._entries:
            return
        last = len(self._entries) - 1
        self._current = last if self._current is None else min(max(0, self._current + step), last)
        first, after = self._entries.starts[self._current], self._entries.starts[self._current + 1]
        top, height = self.scroll_offset.y, self.size.height
        if first < top or (after > top + height and after - first >= height):
            self.scroll_to(y=first, animate=False)
        elif after > top + height:
            self.scroll_to(y=after - height, animate=False)
        self.refresh()

    # Events

    def action_scroll_end(self) -> None:
        self.following = True
        self._steer(self.max_scroll_y)

    def scroll_pages(self, pages: float) -> None:
        """Scroll by `pages`, or to the start or end when infinite; negative is up."""
        if pages == math.inf:
            self.action_scroll_end()
        elif math.isinf(pages):
            self.scroll_to(y=0, animate=False)
        else:  # one line of what was read stays in view
            self.scroll_relative(y=pages * max(self.size.height - 1, 1), animate=False)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if not self._steering:
            self._jump = None
            self.following = round(new_value) >= self.max_scroll_y

    def on_mount(self) -> None:
        super().on_mount()
        self._restyle_soon()

    def on_resize(self) -> None:
        self._restyle()
        self._end = 0
        self._resized()

    def on_unmount(self) -> None:
        self._flush_timer.stop()
        self._chunk_timer.stop()

    def _refresh_marker(self) -> None:
        if self._current is not None:
            self.refresh()

    on_focus = on_blur = _refresh_marker

    def notify_style_update(self) -> None:
        super().notify_style_update()
        if self.is_attached:
            self._restyle_soon()

    def _restyle_soon(self) -> None:
        if not self._restyle_asked:
            self._restyle_asked = True
            self.call_later(self._restyle)

    def on_click(self, event: events.Click) -> None:
        place = event.get_content_offset(self)  # without the border
        at = self._entries.height if place is None else place.y + self.scroll_offset.y
        if event.chain == 1 and at < self._entries.height:
            index = self._entries.at(at)
            entry = self._entries[index]
            folds = entry.message.role == "assistant" or at - self._entries.starts[index] < entry.content.start
            if folds and self._entries.line(at).text.lstrip().startswith(("▸ ", "▾ ")):
                self.toggle_reasoning()
