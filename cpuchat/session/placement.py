"""Loads a model again in another placement during a chat."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from cpuchat.base.errors import CpuchatError
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol.messages import Failed, LoadProgress, ModelLoaded
from cpuchat.session.conversation import Conversation


class PlacementChange:
    """One change of the placement, with the chat's KV cache, which the worker saves before. `run` once, from the event
    loop of the conversation, whose settings are those of the outcome afterwards; writing them to disk is the caller's.
    `tell` gets the share of the load that is done (0-1)."""

    def __init__(
        self, conversation: Conversation, wanted: PlacementSpec, tell: Callable[[float], None] = lambda _: None
    ) -> None:
        self.wanted, self.previous = wanted, PlacementSpec.of(conversation.settings)
        self.stopped = self._left = False
        self._conversation, self._tell = conversation, tell

    async def stop(self) -> None:
        """Stop as soon as possible, and load the model as it was before."""
        self.stopped = True
        await self._conversation.stop()

    def leave(self) -> None:
        """Stop without another load, because the app quits."""
        self.stopped = self._left = True

    async def run(self) -> str:
        """Load the model; as it was before if that fails. Returns why, in a sentence or two, else ""."""
        model = self._conversation.model
        problem = await self._load(self.wanted, had_draft=bool(model and model.draft))
        if not problem and self._conversation.model is not None:
            return ""
        problem = problem if problem and not self.stopped else "Cancelled."
        self._conversation.settings = self.previous.applied_to(self._conversation.settings)
        if not self._left and (again := await self._load(self.previous)):
            problem = f"{problem} Restoring the previous placement failed too: {again}"
        return problem

    async def _load(self, spec: PlacementSpec, *, had_draft: bool = False) -> str:
        """Load the model again; returns what went wrong, "" also when it was stopped."""
        conversation, problem = self._conversation, ""
        conversation.settings = spec.applied_to(conversation.settings)
        self._tell(0.0)
        try:
            async with contextlib.aclosing(conversation.reload()) as events:
                async for event in events:
                    problem = ""
                    match event:
                        case Failed():
                            problem = f"{event.message} {event.hint}".strip()
                        case ModelLoaded() if had_draft and not event.model.draft:
                            # A draft model that cannot be used is left out of a load, with a note.
                            problem = next(iter(event.model.notes[-1:]), "The draft model was not loaded.")
                        case LoadProgress() if event.total > 1:  # else one step
                            self._tell(min(event.done / event.total, 1.0))
        except (CpuchatError, OSError) as error:
            problem = str(error)
        return problem
