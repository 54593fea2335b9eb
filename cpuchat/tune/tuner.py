"""Tunes the settings for one model on this machine by measuring, in a worker process of its own.

One choice after the other (threads, memory policy, CPU module, flash attention, micro-batch, drafters), each on top of
what was adopted before. None changes what a model writes, up to rounding.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Generic, Literal

import msgspec

from cpuchat.base.errors import CpuchatError, Interrupted
from cpuchat.config.settings import Settings, value_of
from cpuchat.hardware.topology import Topology, read_topology
from cpuchat.measure.difference import MATTERS, Difference
from cpuchat.measure.turns import DRIFT, C, Drifted, Rates, Rounds, Turns
from cpuchat.models.drafts.choice import choose_draft
from cpuchat.models.gguf.header import known_as
from cpuchat.models.library.library import Library
from cpuchat.models.machine import MEASURED, Tuned, TunedChoice, differences, find_tuned, keep_tuned, set_keys
from cpuchat.tune import candidates
from cpuchat.tune.candidates import TuningCandidate, TuningChoice
from cpuchat.tune.measurer import OVERALL, Measurer, Speed

Verdict = Literal["faster", "same", "noisy", "mixed", "failed"]
"""`same`: nothing that matters is gained; `mixed`: faster in one, slower in another; `noisy`: it cannot be told, also
where the machine was busy."""
GAINS: Final = ("decode", "prefill")
_ASKED: Final = 20
"""A run asks six choices, each after every round of a duel; looks at the same rounds tell much of the same."""
LIMIT_SECONDS: Final = 170.0
_LONGEST_SECONDS: Final = 900.0
_LOADS: Final = 12  # a model that takes long to load gets the time of so many loads


class SearchResult(msgspec.Struct, Generic[C], frozen=True, kw_only=True):
    """The best candidate (None: none was measured), the verdict on it, and its differences. `anchor`: typical rates of
    what is in use. `problem`: why nothing could be decided."""

    verdict: Verdict
    best: C | None = None
    differences: dict[str, Difference] = {}
    anchor: Rates = {}
    problem: str = ""


async def search(measure: Callable[[C], Awaitable[Rates | None]], now: C, candidates: Sequence[C]) -> SearchResult[C]:
    """Compare `candidates` with what is in use `now`. `measure` as of `Turns`, returns `Speed.rates`."""
    turns = Turns(measure, now, OVERALL, asked=_ASKED)
    try:
        ranked = await turns.rank(candidates)
        if not ranked:
            return SearchResult(verdict="failed")
        best, rounds = next(iter(ranked.items()))
        verdict: Verdict = "same"
        if rounds.difference(OVERALL).gain > 0:
            rounds = await turns.duel(best, GAINS)
            verdict = _verdict(rounds) if rounds.rivals else "failed"
    except Drifted as drifted:
        return SearchResult(verdict="noisy", problem=drifted.message)
    anchors = sorted(turns.anchors, key=lambda rates: rates[OVERALL])
    differences = {name: rounds.difference(name) for name in GAINS} if rounds.rivals else {}
    return SearchResult(verdict=verdict, best=best, differences=differences, anchor=anchors[len(anchors) // 2])


def _verdict(rounds: Rounds) -> Verdict:
    found = {name: rounds.difference(name) for name in rounds.rivals[0]}
    overall, gains = found.pop(OVERALL), [found[name] for name in GAINS]
    if not any(one.verdict == "faster" for one in gains):
        return "noisy" if any(one.may_gain for one in gains) else "same"
    # Nowhere slower than what rounds of the same would differ by.
    is_slower = any(one.gain <= -min(max(MATTERS, 2 * one.error), DRIFT / 2) for one in found.values())
    return "mixed" if is_slower or overall.gain <= 0 else "faster"


class ChoiceResult(msgspec.Struct, frozen=True, kw_only=True):
    """One choice: what was in use before, the best candidate (`after`, "": none was measured) and its gains as shares
    (0.05: 5 % faster), None: not measured. `reason`: why nothing was decided."""

    name: str
    before: str
    after: str = ""
    adopted: bool = False
    verdict: Verdict | None = None
    decode: float | None = None
    prefill: float | None = None
    reason: str = ""
    keys: tuple[str, ...] = ()

    @property
    def is_busy(self) -> bool:
        """Return whether other programs kept it from being decided."""
        return self.verdict == "noisy" and bool(self.reason)

    @property
    def is_of_drafters(self) -> bool:
        """Their gain depends on the text, and the rates before are of plain decoding."""
        return self.name == "drafters"


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of tuning one model. `decode` and `prefill` are tok/s (before, after), without drafters; None where
    not measured. `changes`: all settings that are tuned now, as `settings.update` takes them, and `replaced` as in
    `Tuned`. `stopped`: by the user; `out_of_time`: some choices were not measured."""

    model: str
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
        return any(one.is_busy for one in self.choices)

    def kept_as(self, earlier: Tuned | None) -> Tuned:
        """Return what to keep; choices of an `earlier` tuning that stay in effect keep their figures."""
        tuned = {f"{section}.{name}" for section, values in self.changes.items() for name in values}
        new = [
            TunedChoice(
                keys=one.keys,
                words=one.after if one.name == "threads" else f"{one.name} {one.after}",
                decode=one.decode or 0.0,
                prefill=one.prefill or 0.0,
            )
            for one in self.adopted
        ]
        replaced = {key for one in new for key in one.keys}
        old = earlier.choices if earlier is not None else ()
        old = [one for one in old if not replaced & {*one.keys} and tuned & {*one.keys}]
        return Tuned(model=self.model, changes=self.changes, replaced=self.replaced, choices=(*old, *new))


class Tuner:
    """Tunes one model with the settings `chosen` by the user. `run` once. `what` is being measured, `choices` are
    decided. `seconds`: the limit; None: `LIMIT_SECONDS`, longer after a slow load. `tell`: called at each change."""

    def __init__(
        self, path: Path, chosen: Settings, *, seconds: float | None = None, tell: Callable[[], None] = lambda: None
    ) -> None:
        self.what, self.choices, self.limit = "", list[ChoiceResult](), seconds or LIMIT_SECONDS
        self.tell = tell
        self._may_extend = seconds is None
        self._path, self._wanted = path, chosen
        self._measurer = Measurer(path)
        self._start = time.monotonic()
        self._longest = 0.0  # seconds of one measurement
        self._draft = ""  # the draft model that a load would use
        self._out_of_time = False
        self._before: Rates | None = None

    async def stop(self, *, kill: bool = False) -> None:
        """Stop as soon as possible; `run` returns what was found until then."""
        self._measurer.stopped = True
        if kill:
            self._measurer.backend.kill()
        else:
            await self._measurer.backend.cancel()

    async def run(self) -> TuneResult:
        """Tune, and keep what was adopted for the next loads. Raises Interrupted: stopped before the model was
        loaded; CpuchatError: the model cannot be loaded or measured as it is set now."""
        self._start = time.monotonic()
        earlier = await asyncio.to_thread(find_tuned, self._path)
        chosen = earlier.applied_to(self._wanted) if earlier is not None else self._wanted
        topology = await asyncio.to_thread(read_topology)
        with contextlib.suppress(CpuchatError):  # without one
            library = Library(chosen.model.folders)
            wanted = chosen.speculation.wanted_draft
            draft, _ = await asyncio.to_thread(choose_draft, self._path, wanted, library, strict=False)
            self._draft = str(draft or "")
        try:
            self._note("loading the model")
            about = await self._measurer.first(chosen)
            self._longest = self.seconds
            if self._may_extend:
                self.limit = min(max(LIMIT_SECONDS, _LOADS * self.seconds), _LONGEST_SECONDS)
            with contextlib.suppress(Interrupted):
                for choice_for in self._choices(topology, about):
                    choice = candidates.without_what_is_set(choice_for(chosen), self._wanted)
                    chosen = await self._decide(choice, chosen)
        finally:
            await self._measurer.backend.close()
        result = self._result(chosen)
        if not self._measurer.stopped or result.adopted:
            await asyncio.to_thread(keep_tuned, self._path, result.kept_as(earlier))
        return result

    def _choices(self, topology: Topology, about: Speed) -> Iterator[Callable[[Settings], TuningChoice]]:
        """Yield what makes the choices, in their order; each is made for the settings as they are then."""
        yield lambda chosen: candidates.thread_choice(topology, chosen)
        yield lambda chosen: candidates.memory_choice(topology, chosen)
        engine = self._measurer.backend.engine
        if engine is not None and engine.module:
            yield lambda chosen: candidates.module_choice(chosen, engine)
        yield candidates.attention_choice
        max_tokens = min(int(candidates.UBATCH_SECONDS * about.prefill), self._measurer.max_tokens)
        yield lambda chosen: candidates.ubatch_choice(chosen, max_tokens)
        yield lambda chosen: candidates.drafter_choice(chosen, self._draft)

    async def _decide(self, choice: TuningChoice, chosen: Settings) -> Settings:
        """Make a choice; returns the settings with it."""
        result = ChoiceResult(name=choice.name, before=choice.now.words)
        skipped = choice.skipped or ("" if choice.candidates else "nothing else to try")
        if skipped or self._out_of_time:
            self._done(msgspec.structs.replace(result, reason=skipped or "time limit"))
            return chosen
        problem = ""

        async def measure(candidate: TuningCandidate) -> Rates | None:
            nonlocal problem
            self._note(f"{choice.name}: {candidate.words}")
            self._out_of_time = self.seconds + 1.2 * self._longest > self.limit
            if self._measurer.stopped or self._out_of_time:
                raise Interrupted("Stopped.")
            begun = time.monotonic()
            try:
                speed = await self._measurer.measure(candidate.settings, choice, self._draft)
            except CpuchatError as error:
                if candidate is choice.now or isinstance(error, Interrupted):
                    raise
                problem = str(error)
                return None
            self._longest = max(self._longest, time.monotonic() - begun)
            return speed.rates()

        try:
            finding = await search(measure, choice.now, choice.candidates)
        except Interrupted:
            if self._measurer.stopped:
                raise
            self._done(msgspec.structs.replace(result, reason="time limit"))
            return chosen
        except CpuchatError as error:
            finding, problem = SearchResult(verdict="failed"), str(error)
        if self._before is None and choice.test == "both":
            self._before = finding.anchor or None
        result = self._decided(choice, finding, problem)
        self._done(result)
        return finding.best.settings if result.adopted and finding.best is not None else chosen

    def _decided(self, choice: TuningChoice, finding: SearchResult[TuningCandidate], problem: str) -> ChoiceResult:
        best, gains = finding.best, finding.differences
        changed = differences(choice.now.settings, best.settings) if best is not None else {}
        return ChoiceResult(
            name=choice.name,
            before=choice.now.words,
            after=best.words if best is not None else "",
            adopted=finding.verdict == "faster",
            verdict=finding.verdict,
            decode=gains["decode"].gain if gains and choice.test != "prefill" else None,
            prefill=gains["prefill"].gain if gains and choice.test != "texts" else None,
            reason=finding.problem or (problem if finding.verdict == "failed" else ""),
            keys=tuple(f"{section}.{name}" for section, values in changed.items() for name in values),
        )

    def _result(self, chosen: Settings) -> TuneResult:
        speeds: dict[str, tuple[float, float]] = {}
        if self._before is not None:
            for name in GAINS:
                after = self._before[name]
                for one in self.choices:  # each was measured on top of those before it
                    if one.adopted and not one.is_of_drafters:
                        after *= 1 + (getattr(one, name) or 0.0)
                speeds[name] = (self._before[name], after)
        return TuneResult(
            model=self._measurer.name or known_as(self._path),
            choices=tuple(self.choices),
            changes=differences(self._wanted, chosen),
            replaced={key: value_of(self._wanted, key) for key in set_keys(self._wanted, MEASURED) if key in MEASURED},
            seconds=self.seconds,
            stopped=self._measurer.stopped,
            out_of_time=self._out_of_time,
            **speeds,
        )

    @property
    def seconds(self) -> float:
        """Return how long it has been running."""
        return time.monotonic() - self._start

    def _done(self, result: ChoiceResult) -> None:
        self.choices.append(result)
        self._note("")

    def _note(self, what: str) -> None:
        self.what = what
        self.tell()
