"""The loaded model and a recording, side by side."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Container
from textual.content import Content

from cpuchat.conversation import Conversation
from cpuchat.errors import CpuchatError
from cpuchat.present.answers import summary
from cpuchat.protocol import Failed, Generate, GenerationFinished, Message, TextDelta
from cpuchat.text import clean_line
from cpuchat.tui.markdown.transcript import Transcript, TranscriptMessage
from cpuchat.tui.tour.recording import Recording
from cpuchat.tui.widgets.dismissable import Dismissable

LIVE = "What is a draft model?"
"""What the loaded model is asked: something that the demo model knows."""


class BesideScreen(Dismissable[None]):
    """Answers live in the first pane, and plays the recording in the second one, with drafted tokens colored."""

    CSS_PATH = "beside.tcss"
    AUTO_FOCUS = ""
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-narrow"), (100, "-wide")]

    def __init__(self, conversation: Conversation, recording: Recording) -> None:
        super().__init__()
        self._conversation = conversation
        self._recording = recording
        self._stopped = False

    def compose(self) -> ComposeResult:
        with Container(id="panes"):
            yield Transcript(id="live")
            yield Transcript(id="recorded")

    def on_mount(self) -> None:
        recording, model = self._recording, self._conversation.model
        live = "" if model is None else f"{model.name} {model.quantization}, {model.n_threads} threads"
        self._entitle("#live", f"live · {live}", "")
        self._entitle("#recorded", f"recording · {recording.model}", f"{self._drafted} · {recording.machine}")

    @property
    def _drafted(self) -> str:
        """Return what drafted text of the recording: its draft model was loaded, and may have proposed none of it."""
        recording = self._recording
        names = dict.fromkeys(part.drafter for part in recording.parts if part.drafter)
        words = [recording.draft if name == "draft" else f"{name} (repeated text)" for name in names]
        return f"drafted by {', '.join(words)}" if words else "nothing drafted"

    def _entitle(self, name: str, title: str, subtitle: str) -> None:
        pane = self.query_one(name)
        pane.border_title, pane.border_subtitle = Content(clean_line(title)), Content(clean_line(subtitle))

    async def play(self) -> None:
        """Return when both have ended."""
        await asyncio.gather(self._answer(), self._replay())

    def leave(self) -> None:
        """End the recording; who calls this stops the answer."""
        self._stopped = True

    async def stop(self) -> None:
        """End both."""
        self.leave()
        await self._conversation.stop()

    def _begin(self, pane: str, name: str, question: str) -> Transcript:
        transcript = self.query_one(pane, Transcript)
        transcript.color_drafts(True)
        transcript.add_message(TranscriptMessage("user", "You", question))
        transcript.begin_answer(name, drafted=True)
        return transcript

    async def _answer(self) -> None:
        conversation = self._conversation
        pane = self._begin("#live", conversation.model_name, LIVE)
        request = Generate(
            messages=(Message(role="user", content=LIVE),),
            sampling=conversation.in_effect.sampling.sampling(),
            speculation=conversation.speculation,
            **conversation.in_effect.chat.request_options(),
        )
        note = ""
        try:
            async for event in conversation.generate_detached(request):
                match event:
                    case TextDelta():
                        pane.append(event.text, event.channel, event.drafter)
                    case GenerationFinished():
                        note = summary(event.timings, event.stop_reason)
                    case Failed():
                        note = event.message
                    case _:
                        pass
        except CpuchatError as error:
            note = error.message
        pane.finish_answer(note)

    async def _replay(self) -> None:
        recording, began = self._recording, monotonic()
        pane = self._begin("#recorded", recording.model, recording.question)
        for part in recording.parts:
            await asyncio.sleep(max(0.0, part.at - (monotonic() - began)))
            if self._stopped:
                break
            pane.append(part.text, drafter=part.drafter)
        pane.finish_answer("recording · " + summary(recording.timings, "cancelled" if self._stopped else "end"))
