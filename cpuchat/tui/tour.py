"""The app that shows itself: it asks, replays and opens screens, with one sentence for each step.

Keys only steer the tour. It keeps nothing: `cpuchat demo --tour` gives it a data folder of its own. What a real model
does is a recording (`benchmarks/record_stage.py`): every text and figure of it was measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ClassVar

from textual import events
from textual.content import Content
from textual.widgets import Static
from textual.worker import Worker

from cpuchat.compare.recording import RecordingError
from cpuchat.tui.app import ChatApp
from cpuchat.tui.compare.replay import ReplayScreen
from cpuchat.tui.plan import PlanScreen
from cpuchat.tui.widgets.prompt import PromptInput

_KEYS = "→ next · Space pauses · Esc quits"
_LOOK_SECONDS = 0.1
_PATIENCE = 60.0
"""Seconds to wait for an answer or a screen."""
_LOAD_PATIENCE = 300.0
_LOOK = 8.0
"""Seconds for which a screen that stands still is shown."""
_READ = 1.5
"""Seconds in which the audience reads a question before it is sent."""

LOADING = "cpuchat chats with language models on the CPU. It is loading a first model and measuring this machine."
ANSWER = "A toy model of 8 million parameters answers on this CPU. It knows the program; the panel follows each token."
REPLAYS = {
    "drafts": "A real model, plain and with drafts: a recording of two runs, on one clock. Colored words were drafted.",
    "quantizations": "The same model in Q8_0 and Q4_K_M: each had the whole machine to itself, and now they race.",
}
"""What is said of each recording; the stage says what came of it."""
MACHINE = "This machine: its cores, caches and memory, and the read bandwidth that limits every model."
PREDICTION = "That bandwidth and a model's header predict its speed and memory, before anything is downloaded."
ELSEWHERE = "Other programs keep this machine busy, so this plans for another one. When it is idle: cpuchat probe."
MODELS = "Your first model: what fits this machine, with its speed here. Run cpuchat, then Ctrl+O."


class Caption(Static):
    """The sentence of a step, over the screen that it is about."""

    DEFAULT_CSS = """
    Caption { dock: top; width: 100%; height: auto; padding: 0 1; background: $panel; }
    """


class TourApp(ChatApp):
    """See `ChatApp`; `over` once every step was shown."""

    CSS = "KeyFooter { display: none; }"  # its keys do nothing here
    PACE: ClassVar = 1.0
    """Factor of the time that is spent on each step."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.over = False
        self.captions: list[str] = []
        """The sentences shown so far."""
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
        steps: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            (ANSWER, self._show_answer),
            *((caption, partial(self._show_recording, name)) for name, caption in REPLAYS.items()),
            (MACHINE, lambda: self._show_screen(self.services.navigation.hardware)),
            (PREDICTION, self._show_plans),
        ]
        for caption, show in steps:
            self._skipped = False
            await self._show_step(caption)
            await show()
        await self._show_step(MODELS)
        await self._open_screen(self.chat_screen.commands.models)
        self.over = True
        await self._show_caption()

    async def _show_answer(self) -> None:
        await self._ask("What is cpuchat?")
        await self._hold(_LOOK)

    async def _show_recording(self, name: str) -> None:
        try:
            screen = ReplayScreen(name)
        except RecordingError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        await self._open_screen(lambda: self.push_screen(screen))
        await self._until(lambda: screen.over)
        await self._hold(_LOOK)
        await self._close_screen()

    async def _show_screen(self, show: Callable[[], object]) -> None:
        await self._open_screen(show)
        await self._hold(_LOOK)
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
        await self._hold(_LOOK)
        await self._close_screen()

    async def _ask(self, question: str) -> None:
        chat = self.chat_screen
        chat.commands.new_chat()
        chat.query_one(PromptInput).put(question)
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

    async def _until(
        self, condition: Callable[[], object], max_seconds: float = _PATIENCE, *, may_skip: bool = True
    ) -> None:
        """Wait for a condition, at most so many seconds, unless the step is skipped."""
        left = max_seconds
        while left > 0 and not condition() and not (may_skip and self._skipped):
            await asyncio.sleep(_LOOK_SECONDS)
            left -= _LOOK_SECONDS
