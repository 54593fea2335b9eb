"""Tries another placement during a chat: measures, reloads, measures again, and reverts unless significantly faster.

The chat continues: the worker saves its KV cache before the model is reloaded. `TuneResult` is the form in which
results of tuning are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from cpuchat.base.errors import CpuchatError
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.machine import Tuned, TunedChoice
from cpuchat.protocol.messages import AnyEvent, Failed, Generate, LoadProgress, ModelLoaded, TextDelta
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.session.conversation import Conversation
from cpuchat.telemetry.answer import DecodeRate, RateChange, compare, measure_decode
from cpuchat.tune.halving import Speed, Verdict

N_TOKENS = 48
ROUNDS = 3

Stage = Literal["before", "loading", "after", "back"]


@dataclass(frozen=True, slots=True)
class TrialStep:
    """The progress of a trial: the answer `number` of `of` being measured, or the share of the load that is done
    (0-1).
    """

    stage: Stage
    number: int = 0
    of: int = 0
    done: float | None = None


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The result of a trial.

    `applied`: the model runs as was wanted, because it is faster or was not to be measured. `before` and `after` are
    None where nothing was measured. `problem` is what went wrong, in one or two sentences, "" if nothing did;
    `stopped`: the user stopped it; `lost`: no model is loaded any more, because
    the worker died or the model could not be loaded as before.
    """

    applied: bool
    before: DecodeRate | None = None
    after: DecodeRate | None = None
    problem: str = ""
    stopped: bool = False
    lost: bool = False

    @property
    def comparison(self) -> RateChange | None:
        """Return the comparison of both measurements; None when one is missing."""
        return compare(self.before, self.after) if self.before and self.after else None

    @property
    def factor(self) -> float | None:
        """Return the speed-up over before."""
        return self.after.tok_s / self.before.tok_s if self.before and self.after else None


class Trial:
    """One change of the placement. `run` once, from the conversation's event loop.

    The settings of the conversation are those of the outcome afterwards; writing them to disk is the caller's.

    Args:
        measure: measure decoding before and after.
        tell: called with every step, on the event loop.
    """

    def __init__(
        self,
        conversation: Conversation,
        wanted: PlacementSpec,
        tell: Callable[[TrialStep], None] = lambda _: None,
        *,
        measure: bool = True,
    ) -> None:
        self.wanted = wanted
        self.previous = PlacementSpec.of(conversation.settings)
        self._conversation = conversation
        self._tell = tell
        self._measure = measure
        self._stopped = False
        self._left = False

    async def stop(self) -> None:
        """Stop as soon as possible. The model is loaded as it was before, if it was changed already."""
        self._stopped = True
        await self._conversation.stop()

    def leave(self) -> None:
        """Stop without another load, because the app quits."""
        self._stopped = self._left = True

    @property
    def stopped(self) -> bool:
        """Return whether it was asked to stop."""
        return self._stopped

    async def run(self) -> TrialOutcome:
        """Run the trial. Never raises for what the backend does."""
        outcome = await self._run()
        return dataclasses.replace(outcome, lost=self._conversation.model is None)

    async def _run(self) -> TrialOutcome:
        before: DecodeRate | None = None
        model = self._conversation.model
        if self._measure and model is not None:
            try:
                before = await self._decoding("before", model)
            except CpuchatError as error:
                return TrialOutcome(False, problem="" if self._stopped else str(error), stopped=self._stopped)
            if self._stopped:
                return TrialOutcome(False, before, stopped=True)
        problem = await self._load(self.wanted, "loading", model)
        if problem or self._conversation.model is None:
            return await self._back(before, problem)
        if before is None:
            return TrialOutcome(True, stopped=self._stopped)
        try:
            after = await self._decoding("after", self._conversation.model)
        except CpuchatError as error:
            return await self._back(before, "" if self._stopped else str(error))
        if self._stopped or not compare(before, after).keep:
            return await self._back(before, "", None if self._stopped else after)
        return TrialOutcome(True, before, after)

    async def _back(self, before: DecodeRate | None, problem: str, after: DecodeRate | None = None) -> TrialOutcome:
        self._conversation.settings = self.previous.applied_to(self._conversation.settings)
        stopped = self._stopped and not problem
        if not self._left:
            again = await self._load(self.previous, "back", None)
            if again:
                problem = f"{problem} Restoring the previous placement failed too: {again}".strip()
        return TrialOutcome(False, before, after, problem=problem, stopped=stopped)

    async def _load(self, spec: PlacementSpec, stage: Stage, before: ModelInfo | None) -> str:
        """Load the model again; returns what went wrong, "" also when it was stopped."""
        conversation = self._conversation
        conversation.settings = spec.applied_to(conversation.settings)
        self._tell(TrialStep(stage))
        problem = ""
        try:
            async with contextlib.aclosing(conversation.reload()) as events:
                async for event in events:
                    problem = self._watch(event, stage, before)
        except (CpuchatError, OSError) as error:
            problem = str(error)
        return problem

    def _watch(self, event: AnyEvent, stage: Stage, before: ModelInfo | None) -> str:
        match event:
            case Failed():
                return f"{event.message} {event.hint}".strip()
            case ModelLoaded():
                lost = before is not None and before.draft and not event.model.draft
                # A draft model that cannot be used is left out of a load, with a note.
                return next(iter(event.model.notes[-1:]), "The draft model was not loaded.") if lost else ""
            case LoadProgress() if event.total > 1:  # else one step
                self._tell(TrialStep(stage, done=min(event.done / event.total, 1.0)))
        return ""

    async def _decoding(self, stage: Stage, model: ModelInfo) -> DecodeRate:
        """Measure the decode rate. Raises CpuchatError."""
        answers = 0

        async def answer(request: Generate) -> AsyncGenerator[AnyEvent, None]:
            nonlocal answers
            # The first one is a short one that does not count.
            self._tell(TrialStep(stage, min(max(answers, 1), ROUNDS), ROUNDS))
            answers += 1
            speculation = self._conversation.speculation
            if model.draft and "draft" in speculation.drafters:
                # The others would know the text from the round before.
                request = msgspec.structs.replace(
                    request, speculation=msgspec.structs.replace(speculation, drafters=("draft",))
                )
            async with contextlib.aclosing(self._conversation.generate_detached(request)) as events:
                async for event in events:
                    if self._stopped and isinstance(event, TextDelta):
                        await self._conversation.stop()  # asked for between two answers
                    yield event

        return await measure_decode(answer, n_tokens=N_TOKENS, rounds=ROUNDS)


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
