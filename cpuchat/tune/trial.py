"""Loads a model again in another placement during a chat. `TuneResult` is the form in which results of tuning are
kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from cpuchat.base.errors import CpuchatError
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.machine import Tuned, TunedChoice
from cpuchat.protocol.messages import AnyEvent, Failed, LoadProgress, ModelLoaded
from cpuchat.session.conversation import Conversation
from cpuchat.tune.halving import Speed, Verdict


class PlacementChange:
    """One change of the placement, with the chat's KV cache, which the worker saves before. `run` once, from the
    conversation's event loop.

    The settings of the conversation are those of the outcome afterwards; writing them to disk is the caller's.
    `tell`: called with the share of the load that is done (0-1), on the event loop.
    """

    def __init__(
        self, conversation: Conversation, wanted: PlacementSpec, tell: Callable[[float], None] = lambda _: None
    ) -> None:
        self.wanted = wanted
        self.previous = PlacementSpec.of(conversation.settings)
        self.stopped = False
        self._conversation = conversation
        self._tell = tell
        self._left = False

    async def stop(self) -> None:
        """Stop as soon as possible, and load the model as it was before."""
        self.stopped = True
        await self._conversation.stop()

    def leave(self) -> None:
        """Stop without another load, because the app quits."""
        self.stopped = self._left = True

    async def run(self) -> str:
        """Load the model; as it was before if that fails. Returns why, in a sentence or two, "" when it runs as
        wanted."""
        model = self._conversation.model
        had_draft = model is not None and bool(model.draft)
        problem = await self._load(self.wanted, had_draft=had_draft)
        if not problem and self._conversation.model is not None:
            return ""
        problem = problem if problem and not self.stopped else "Cancelled."
        self._conversation.settings = self.previous.applied_to(self._conversation.settings)
        if not self._left and (again := await self._load(self.previous)):
            problem = f"{problem} Restoring the previous placement failed too: {again}"
        return problem

    async def _load(self, spec: PlacementSpec, *, had_draft: bool = False) -> str:
        """Load the model again; returns what went wrong, "" also when it was stopped."""
        conversation = self._conversation
        conversation.settings = spec.applied_to(conversation.settings)
        self._tell(0.0)
        problem = ""
        try:
            async with contextlib.aclosing(conversation.reload()) as events:
                async for event in events:
                    problem = self._watch(event, had_draft)
        except (CpuchatError, OSError) as error:
            problem = str(error)
        return problem

    def _watch(self, event: AnyEvent, had_draft: bool) -> str:
        match event:
            case Failed():
                return f"{event.message} {event.hint}".strip()
            case ModelLoaded() if had_draft and not event.model.draft:
                # A draft model that cannot be used is left out of a load, with a note.
                return next(iter(event.model.notes[-1:]), "The draft model was not loaded.")
            case LoadProgress() if event.total > 1:  # else one step
                self._tell(min(event.done / event.total, 1.0))
        return ""


DEFAULT_PROMPT_SHARE = 0.5
"""Until the user's own chats tell it."""
_ENOUGH_TOKENS = 2_000


class ChoiceResult(msgspec.Struct, frozen=True, kw_only=True):
    """One choice: what was in use before, the best candidate (`after`, "": none was measured) and what it gained.

    `decode` and `prefill` are gains as shares (0.05: 5 % faster), `spread` that of the rounds; None: not measured.
    `offered`: faster, but it changes the output, and was not asked for. `reason` is why it was not adopted.
    """

    name: str
    before: str
    after: str = ""
    adopted: bool = False
    offered: bool = False
    verdict: Verdict | None = None
    decode: float | None = None
    prefill: float | None = None
    spread: float | None = None
    reason: str = ""
    keys: tuple[str, ...] = ()


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of tuning one model.

    `decode` and `prefill` are tok/s (before, after), None where not measured. `changes`: all settings that are tuned
    now, as `settings.update` takes them, and `replaced` as in `Tuned`. `stopped`: by the user; `out_of_time`: some
    choices were not measured.
    """

    model: str
    prompt_share: float
    choices: tuple[ChoiceResult, ...]
    changes: dict[str, dict[str, Any]]
    seconds: float
    replaced: dict[str, Any] = {}
    decode: tuple[float, float] | None = None
    prefill: tuple[float, float] | None = None
    stopped: bool = False
    out_of_time: bool = False

    @property
    def adopted(self) -> list[ChoiceResult]:
        return [one for one in self.choices if one.adopted]

    @property
    def busy(self) -> bool:
        """Return whether something could not be decided because of other programs."""
        return any(one.verdict == "busy" for one in self.choices)

    def kept_as(self, earlier: Tuned | None) -> Tuned:
        """Return what to keep; choices of an `earlier` tuning that stay in effect keep their figures."""
        tuned = {f"{section}.{name}" for section, values in self.changes.items() for name in values}
        new = [
            TunedChoice(keys=one.keys, words=_named(one), decode=one.decode or 0.0, prefill=one.prefill or 0.0)
            for one in self.adopted
        ]
        replaced = {key for one in new for key in one.keys}
        old = earlier.choices if earlier is not None else ()
        old = [one for one in old if not replaced & {*one.keys} and tuned & {*one.keys}]
        return Tuned(model=self.model, changes=self.changes, replaced=self.replaced, choices=(*old, *new))


def _named(one: ChoiceResult) -> str:
    """`16 threads, two per core`, `flash attention off`."""
    return one.after if one.name == "threads" else f"{one.name} {one.after}"


def speeds(before: Speed, choices: list[ChoiceResult]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return decode and prefill tok/s (before, after): each adopted choice was measured on top of those before it.

    Drafters are left out: their gain depends on the text, and `before` is plain decoding.
    """
    decode, prefill = before.mean_decode, before.prefill
    after = [decode, prefill]
    for one in choices:
        if one.adopted and one.name != "drafters":
            after[0] *= 1 + (one.decode or 0.0)
            after[1] *= 1 + (one.prefill or 0.0)
    return (decode, after[0]), (prefill, after[1])


def prompt_share_of(prompt_tokens: int, written_tokens: int) -> float | None:
    """Return the share of prompt tokens in the user's chats; None where they are too few to tell."""
    total = prompt_tokens + written_tokens
    return prompt_tokens / total if total >= _ENOUGH_TOKENS else None
