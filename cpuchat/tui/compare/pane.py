"""One side of a comparison: its answers as they are written, its figures in the border."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from textual.binding import BindingType
from textual.content import Content
from textual.message import Message

from cpuchat.compare.rounds import SideAnswer, Turn
from cpuchat.present import answers
from cpuchat.protocol import AnyEvent, Failed, GenerationFinished, LoadProgress, ModelLoaded, PrefillProgress, TextDelta
from cpuchat.telemetry.prefill import PrefillClock
from cpuchat.text import clean_line
from cpuchat.tui import keys
from cpuchat.tui.markdown.transcript import Transcript, TranscriptMessage


class SidePane(Transcript):
    """Shows what one side says. Only the side that writes is drawn again."""

    # Without those of the transcript in the footer, which has others here.
    BINDINGS: ClassVar[list[BindingType]] = [
        dataclasses.replace(key, footer=False).binding() for key in keys.KEYS if key.place == "transcript"
    ]

    class Scrolled(Message):
        """The user has scrolled this pane to line `y`."""

        def __init__(self, pane: SidePane, y: float) -> None:
            super().__init__()
            self.pane, self.y = pane, y

    def __init__(self, index: int, name: str) -> None:
        super().__init__(id=f"side-{'ab'[index]}")
        self.index = index
        self.name_line = f"{'AB'[index]}  {clean_line(name)}"
        self.border_title = Content(self.name_line)
        self._label = clean_line(name)
        self._open = False
        self._written = False
        self._clock = PrefillClock()

    def show_turns(self, turns: Sequence[Turn], first: int | None = None) -> None:
        """Show complete turns from the end, or from the one with the index `first`; the last answers are marked where
        they differ.
        """
        messages: list[TranscriptMessage] = []
        top: int | None = None
        for index, turn in enumerate(turns):
            top = len(messages) if index == first else top
            messages.append(TranscriptMessage("user", "You", turn.prompt))
            if turn.rounds:
                messages += self._shown(turn.rounds[-1].answers, turn.rounds[-1].complete)
        self._open = False
        self.set_messages(messages, top)

    def _compare_last(self, other: str) -> None:
        """Mark what differs in the last message from `other`."""
        if self._entries and self._entries[-1].open is None:
            entry = self._entries[-1]
            entry.message = dataclasses.replace(entry.message, other=other).cleaned()
            self._show_whole(entry)

    def _shown(self, both: tuple[SideAnswer, SideAnswer], complete: bool) -> list[TranscriptMessage]:
        answer, other = both[self.index], both[1 - self.index]
        if answer.failed is not None and not answer.content:
            return [self._failure(answer.failed)]
        note = answers.summary(answer.timings, answer.stop_reason)
        return [
            TranscriptMessage(
                "assistant", self._label, answer.content, answer.reasoning, note,
                other=other.content if complete else None,
            )
        ]  # fmt: skip

    def begin(self, before: Sequence[Turn], prompt: str) -> None:
        """Open the answer to `prompt`, after the turns `before`."""
        self.show_turns(before)
        self.add_message(TranscriptMessage("user", "You", prompt))
        self.begin_answer(self._label)
        self.set_pending("Waiting…")
        self._open, self._written, self._clock = True, False, PrefillClock()

    def show_event(self, event: AnyEvent) -> None:
        """Show what the side does."""
        match event:
            case TextDelta():
                if not self._written:
                    self._written = True
                    self.set_pending("")
                self.append(event.text, event.channel, event.drafter)
            case LoadProgress():
                self.set_pending(answers.load_progress(self._label, event))
            case PrefillProgress() if not self._written:
                self.set_pending(answers.prefill_progress(event, self._clock.seconds_left(event)))
            case ModelLoaded():
                self.set_pending("Loaded. Waiting…")
            case GenerationFinished():
                self._close(answers.summary(event.timings, event.stop_reason))
            case Failed():
                self._close("")
                self.add_message(self._failure(event))
            case _:
                pass

    def end(self, both: tuple[SideAnswer, SideAnswer], complete: bool) -> None:
        """The round is over."""
        self._close("" if self._written else "not answered")
        if complete:
            self._compare_last(both[1 - self.index].content)

    def _close(self, note: str) -> None:
        if self._open:
            self._open = False
            self.set_pending("")
            self.finish_answer(note)

    @staticmethod
    def _failure(event: Failed) -> TranscriptMessage:
        text = "\n\n".join(filter(None, (event.message, event.hint)))
        return TranscriptMessage("notice", "Failed", text or "This side failed.")

    def show_figures(self, text: str) -> None:
        """Show the figures in the border."""
        if str(self.border_subtitle or "") != text:
            self.border_subtitle = Content(text)

    def follow_line(self, y: float) -> None:
        """Scroll as the other pane was."""
        self._steer(min(y, self.max_scroll_y))
        self.following = round(self.scroll_offset.y) >= self.max_scroll_y

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if not self._steering:
            self.post_message(self.Scrolled(self, new_value))
