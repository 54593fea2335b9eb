"""The app that shows itself: it asks, compares and opens screens, with one sentence for each step.

Keys only steer the tour. It keeps nothing: `cpuchat demo --tour` gives it a data folder of its own. Beside the loaded
model it plays a recorded answer of a real one, which `benchmarks/record_tour.py` writes: every text and figure of it
was measured, and parts come as they came then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, ClassVar

import msgspec
from textual import events
from textual.app import ComposeResult
from textual.containers import Container
from textual.content import Content
from textual.widgets import Static
from textual.worker import Worker

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError
from cpuchat.base.text import clean_line
from cpuchat.present.answers import summary
from cpuchat.protocol.messages import Failed, Generate, GenerationFinished, Message, TextDelta
from cpuchat.protocol.timings import Timings
from cpuchat.session.conversation import Conversation
from cpuchat.tui.app import ChatApp
from cpuchat.tui.chat.transcript import ChatTranscript
from cpuchat.tui.markdown.transcript import Transcript, TranscriptMessage
from cpuchat.tui.plan import PlanScreen
from cpuchat.tui.widgets.dialogs import Dismissable
from cpuchat.tui.widgets.prompt import Prompt


class TourText(msgspec.Struct, frozen=True, array_like=True):
    """Text that came so many seconds after the question was sent. `drafter` proposed it ("" = the model itself)."""

    at: float
    text: str
    drafter: str = ""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `model` and `draft` are names with quantization, `machine` the CPU and the threads."""

    question: str
    model: str
    draft: str
    machine: str
    parts: tuple[TourText, ...]
    timings: Timings


def load_recording() -> Recording | None:
    """Return the recording of the package; None where it has none."""
    try:
        return msgspec.json.decode(paths.recording_file().read_bytes(), type=Recording)
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return None


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


_KEYS = "→ next · Space pauses · Esc quits"
_LOOK_SECONDS = 0.1
_PATIENCE = 60.0
"""Seconds to wait for an answer or a screen."""
_LOAD_PATIENCE = 300.0
_READ = 1.5
"""Seconds in which the audience reads a question before it is sent."""
BESIDE_SECONDS = 45.0
"""Seconds that a recording is shown, at most."""

LOADING = "cpuchat chats with language models on the CPU. It is loading a first model and measuring this machine."
ANSWER = "A toy model of 8 million parameters answers on this CPU, and the panel follows each token and byte."
BESIDE = "Next to it, a recording of {model} at its speed on the machine named below. Colored text was drafted."
DRAFTING = "Drafting is forced on: colored tokens were proposed by the draft model, and the panel shows what they cost."
COMPARE = "Q4 against Q8: fewer bytes per token mean more tokens per second, and the table shows what it costs."
MACHINE = "This machine: its cores, caches and memory, and the read bandwidth that limits every model."
PREDICTION = "That bandwidth and a model's header predict its speed and memory, before anything is downloaded."
ELSEWHERE = "Other programs keep this machine busy, so this plans for another one. When it is idle: cpuchat probe."
END = "The end. Run cpuchat to open the app; Ctrl+O lists its models."


class Caption(Static):
    """The sentence of a step, over the screen that it is about."""

    DEFAULT_CSS = """
    Caption { dock: top; width: 100%; height: auto; padding: 0 1; background: $panel; }
    """


class TourApp(ChatApp):
    """See `ChatApp`; `over` once every step was shown."""

    CSS = "Footer { display: none; }"  # its keys do nothing here
    PACE: ClassVar = 1.0
    """Factor of the time that is spent on each step."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.over = False
        self.captions: list[str] = []
        """The sentences shown so far."""
        self._recording = load_recording()
        self._paused = self._skipped = False
        self._touring: Worker[None] | None = None

    def on_mount(self) -> None:
        self._touring = self.run_worker(self._tour(), group="tour", name="tour")

    def action_leave(self) -> None:
        if self._touring is not None:
            self._touring.cancel()  # else it would ask on
        super().action_leave()

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key) and event.key not in ("ctrl+q", "ctrl+c"):
            self._steer(event.key)
        elif not isinstance(event, events.Paste | events.MouseEvent):
            await super().on_event(event)

    def _steer(self, key: str) -> None:
        if key in ("escape", "q") or self.over:
            self.action_leave()
        elif key == "space":
            self._paused = not self._paused
            self.run_worker(self._show_caption(), group="caption", exclusive=True)
        elif key in ("right", "enter", "n"):
            self._skipped, self._paused = True, False

    # Steps

    async def _tour(self) -> None:
        await self._until(lambda: self.screen.is_mounted, may_skip=False)
        await self._show_step(LOADING)
        await self._until(lambda: self.conversation.model is not None and self._is_idle, _LOAD_PATIENCE, may_skip=False)
        steps: list[tuple[str, Callable[[], Awaitable[None]]]] = [(ANSWER, self._show_answer)]
        if (recording := self._recording) is not None:
            steps.append((BESIDE.format(model=recording.model), lambda: self._show_recording(recording)))
        steps += [
            (DRAFTING, self._show_drafting),
            (COMPARE, self._show_comparison),
            (MACHINE, lambda: self._show_screen(self.services.navigation.hardware, 20)),
            (PREDICTION, self._show_plans),
        ]
        for caption, show in steps:
            self._skipped = False
            await self._show_step(caption)
            await show()
        self.over = True
        await self._show_step(END)

    async def _show_answer(self) -> None:
        await self._ask("What is cpuchat?")
        await self._hold(20)

    async def _show_recording(self, recording: Recording) -> None:
        screen = BesideScreen(self.conversation, recording)
        await self._open_screen(lambda: self.push_screen(screen))
        self.chat_screen.run_detached(screen.play(), screen.leave)
        await self._until(lambda: self._is_idle, BESIDE_SECONDS)
        await screen.stop()
        await self._settle()
        await self._hold(5)
        await self._close_screen()

    async def _show_drafting(self) -> None:
        transcript = self.chat_screen.query_one(ChatTranscript)
        self.conversation.drafting = "always"
        transcript.color_drafts(True)
        try:
            await self._ask("What is speculative decoding?")
            await self._hold(25)
        finally:
            self.conversation.drafting = "auto"
            transcript.color_drafts(self.services.settings.ui.color_drafts)

    async def _show_comparison(self) -> None:
        self.chat_screen.action_new_chat()  # else its question would be asked
        await self._open_screen(self.chat_screen.action_compare)
        await self._until(self._is_compared)
        await self._hold(20)
        await self._close_screen()

    def _is_compared(self) -> bool:
        comparison = self.services.comparison
        return comparison is None or (bool(comparison.turns) and not comparison.busy)

    async def _show_screen(self, show: Callable[[], object], seconds: float) -> None:
        await self._open_screen(show)
        await self._hold(seconds)
        await self._close_screen()

    async def _show_plans(self) -> None:
        """Show what models would do here; on another machine where this one cannot be measured."""
        await self._open_screen(self.services.navigation.plan)
        screen = self.screen
        assert isinstance(screen, PlanScreen)
        await self._until(lambda: screen.has_plans is not None)
        if screen.has_plans is False:
            screen.action_machine(1)
            await self._show_step(ELSEWHERE)
        await self._hold(25)
        await self._close_screen()

    async def _ask(self, question: str) -> None:
        chat = self.chat_screen
        chat.action_new_chat()
        chat.query_one(Prompt).put(question)
        await self._hold(_READ)
        chat.submit(question)
        await asyncio.sleep(_LOOK_SECONDS)
        await self._until(lambda: self._is_idle)
        await chat.interrupt()  # if it was skipped, or takes too long
        await self._settle()

    # Screens

    @property
    def _is_idle(self) -> bool:
        return not self.chat_screen.busy

    async def _open_screen(self, show: Callable[[], object]) -> None:
        show()
        await self._until(lambda: self.screen is not self.chat_screen and self.screen.is_mounted, may_skip=False)
        await self._show_caption()

    async def _close_screen(self) -> None:
        """Return to the chat: a screen at work takes the first request to close as one to stop."""
        deadline = asyncio.get_running_loop().time() + _PATIENCE
        while self.screen is not self.chat_screen and asyncio.get_running_loop().time() < deadline:
            await self.screen.run_action("close")
            await asyncio.sleep(_LOOK_SECONDS)
        await self._show_caption()  # it may have changed since that of the chat was shown
        await self._settle()

    async def _settle(self) -> None:
        """Wait until the chat is idle, also when the step is skipped: the next one needs it."""
        await self._until(lambda: self._is_idle, _LOAD_PATIENCE, may_skip=False)

    async def _show_step(self, caption: str) -> None:
        self.captions.append(caption)
        await self._show_caption()

    async def _show_caption(self) -> None:
        if not self.captions or not self.screen.is_mounted:
            return
        keys = (
            "Any key quits" if self.over else "Paused · → next · Space resumes · Esc quits" if self._paused else _KEYS
        )
        text = Content.assemble((self.captions[-1], "bold"), "\n", (keys, "dim"))
        shown = self.screen.query(Caption)
        if shown:
            shown.first().update(text)
        else:
            await self.screen.mount(Caption(text))

    # Time

    async def _hold(self, seconds: float) -> None:
        """Wait, unless the step is skipped; a pause does not count."""
        left = seconds * self.PACE
        while left > 0 and not self._skipped:
            await asyncio.sleep(min(left, _LOOK_SECONDS))
            left -= 0 if self._paused else _LOOK_SECONDS

    async def _until(self, condition: Callable[[], object], most: float = _PATIENCE, *, may_skip: bool = True) -> None:
        """Wait for a condition, at most so many seconds, unless the step is skipped."""
        left = most
        while left > 0 and not condition() and not (may_skip and self._skipped):
            await asyncio.sleep(_LOOK_SECONDS)
            left -= _LOOK_SECONDS
