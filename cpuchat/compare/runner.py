"""One side of a comparison at work: its worker, its history, its answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from cpuchat.backend.base import Backend
from cpuchat.compare.rounds import SideAnswer, Turn
from cpuchat.compare.side import Side
from cpuchat.conversation import Conversation
from cpuchat.errors import CpuchatError
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.model_info import ModelInfo
from cpuchat.models.library.library import Library
from cpuchat.protocol import (
    AnyEvent,
    Failed,
    Generate,
    GenerationFinished,
    LoadCancelled,
    Message,
    ModelLoaded,
    Sampling,
    TextDelta,
)
from cpuchat.settings import Settings


class Runner:
    """One side with its conversation. `failed` is why it cannot answer, None when it can; `model` is the one that was
    loaded last, also after its worker crashed."""

    def __init__(self, side: Side, settings: Settings, backend: Backend, library: Library) -> None:
        self.side = side
        self.settings = settings
        self.conversation = Conversation(settings=settings, backend=backend, store=None, library=library)
        self.conversation.logs_speed = False  # on half of the cores, or with other settings than the user's
        self.failed: Failed | None = None
        self.model: ModelInfo | None = None
        self.n_prompts = 0
        """The number of prompts in its history."""
        self._loaded: Settings | None = None

    async def load(self, spec: PlacementSpec, probe: bool, tell: Callable[[AnyEvent], None]) -> bool:
        """Load with this placement, unless it is already; returns whether it can answer."""
        wanted = spec.applied_to(self.settings)
        wanted.hardware = msgspec.structs.replace(wanted.hardware, probe=probe and wanted.hardware.probe)
        if self.conversation.model is not None and self._loaded == wanted:
            return True
        self.conversation.settings, self._loaded, self.failed = wanted, wanted, None
        try:
            async with contextlib.aclosing(self.conversation.load_model(Path(self.side.path))) as events:
                async for event in events:
                    if isinstance(event, Failed):
                        self.failed = event
                    elif isinstance(event, ModelLoaded):
                        self.model = event.model
                    elif isinstance(event, LoadCancelled):
                        return False
                    tell(event)
        except (CpuchatError, OSError) as error:
            self.failed = _failed(error)
            tell(self.failed)
        if self.failed is not None or self.conversation.model is None:
            return False
        await self._warm_up()
        return True

    async def _warm_up(self) -> None:
        """Answer two tokens that nobody sees: the first prompt after a load starts the template's process and meets
        cold caches, and would take from the figures of whichever side answers then."""
        request = Generate(
            messages=(Message(role="user", content="Hello"),), sampling=Sampling(temperature=0.0), max_tokens=2
        )
        async with contextlib.aclosing(self.conversation.generate_detached(request)) as events:
            async for _ in events:  # what fails here fails again in the answer
                pass

    async def answer(
        self,
        turns: Sequence[Turn],
        into: SideAnswer,
        tell: Callable[[AnyEvent], None],
        stopped: Callable[[], bool],
    ) -> None:
        """Answer the prompt of the last of `turns`, from the start: nothing of an earlier answer is reused."""
        conversation = self.conversation
        await conversation.backend.forget("")
        if self.n_prompts == len(turns):
            stream = conversation.regenerate()
        else:
            stream, self.n_prompts = conversation.send(turns[-1].prompt), len(turns)
        try:
            async with contextlib.aclosing(stream) as events:
                async for event in events:
                    self._take(event, into)
                    tell(event)
                    if stopped():  # asked for when it had not begun
                        await conversation.stop()
        except CpuchatError as error:
            into.failed = _failed(error)
            tell(into.failed)

    def _take(self, event: AnyEvent, into: SideAnswer) -> None:
        match event:
            case TextDelta():
                into.written.add(event)
                if event.channel == "reasoning":
                    into.reasoning += event.text
                else:
                    into.content += event.text
            case ModelLoaded():
                self.model = event.model
            case GenerationFinished():
                into.timings, into.stop_reason = event.timings, event.stop_reason
                into.roofline, into.model = self.conversation.figures().roofline, self.model
            case Failed():
                into.failed, into.stop_reason = event, event.code
            case _:
                pass


def _failed(error: Exception) -> Failed:
    if isinstance(error, CpuchatError):
        return Failed(code=error.code, message=error.message, hint=error.hint)
    return Failed(code="error", message=str(error))
