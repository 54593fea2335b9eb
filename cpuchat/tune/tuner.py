"""Tunes the settings for one model on this machine by measuring, in a worker process of its own, and words the results.

One choice after the other (threads, memory policy, CPU module, flash attention, micro-batch, drafters, KV cache types),
each on top of what was adopted before, by successive halving (`tune.halving`). Every measurement is an answer as in a
chat, with nothing reused: a prompt of built-in text, and some tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from cpuchat.base.errors import CpuchatError, Interrupted
from cpuchat.config.settings import Settings, value_of
from cpuchat.hardware.topology import Topology, read_topology
from cpuchat.models.drafts.choice import choose_draft
from cpuchat.models.library.library import Library
from cpuchat.models.machine import MEASURED, TunedSettings, differences, set_keys
from cpuchat.telemetry import units
from cpuchat.telemetry.answer import percent
from cpuchat.tune import candidates
from cpuchat.tune.candidates import TuningCandidate, TuningChoice, changed_keys
from cpuchat.tune.halving import Halving, HalvingResult, Speed
from cpuchat.tune.measurer import Measurer
from cpuchat.tune.trial import DEFAULT_PROMPT_SHARE, ChoiceResult, TuneResult, speeds

LIMIT_SECONDS: Final = 170.0
_LONGEST_SECONDS: Final = 900.0
_LOADS: Final = 12
"""A model that takes long to load gets the time of so many loads."""


class OutOfTime(Interrupted):
    """Raised when the next measurement would end after the time limit."""


@dataclass
class TuningProgress:
    """How far it is. `what` is being measured; `choices` are decided."""

    what: str = ""
    seconds: float = 0.0
    limit: float = LIMIT_SECONDS
    choices: list[ChoiceResult] = field(default_factory=list)


class Tuner:
    """Tunes one model. `run` once.

    Args:
        chosen: the user's settings.
        prompt_share: share of prompt tokens among all tokens, 0 to 1: how much prefill counts beside decoding.
        quantized_kv: also adopt KV cache types that change the output.
        seconds: the time limit; None: `LIMIT_SECONDS`, longer for models that take long to load.
        tell: called whenever `progress` changed.
    """

    def __init__(
        self,
        path: Path,
        chosen: Settings,
        *,
        prompt_share: float = DEFAULT_PROMPT_SHARE,
        quantized_kv: bool = False,
        seconds: float | None = None,
        library: Library | None = None,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        self.progress = TuningProgress(limit=seconds or LIMIT_SECONDS)
        self._may_extend = seconds is None
        self.tell = tell
        self._path, self._wanted = path, chosen
        self._share, self._quantized_kv = prompt_share, quantized_kv
        self._library = library or Library(chosen.model.folders)
        self._kept = TunedSettings()
        self._measurer = Measurer(path)
        self._start = time.monotonic()
        self._longest = 0.0  # seconds of one measurement
        self._draft = ""
        self._stopped = self._out_of_time = False
        self._before: Speed | None = None
        self._about = Speed(prefill=1.0, decode=(1.0,))

    async def stop(self, *, kill: bool = False) -> None:
        """Stop as soon as possible; `run` returns what was found until then."""
        if kill:
            self.kill()
        else:
            self._stopped = True
            await self._measurer.stop()

    def kill(self) -> None:
        """Stop without waiting for the worker."""
        self._stopped = True
        self._measurer.kill()

    async def run(self) -> TuneResult:
        """Tune, and keep what was adopted for the next loads. Raises Interrupted: stopped before the model was
        loaded; CpuchatError: the model cannot be loaded or measured as it is set now.
        """
        self._start = time.monotonic()
        earlier = await asyncio.to_thread(self._kept.find, self._path)
        chosen = earlier.applied_to(self._wanted) if earlier is not None else self._wanted
        topology = await asyncio.to_thread(read_topology)
        self._draft = await asyncio.to_thread(self._find_draft, chosen)
        try:
            self._note("loading the model")
            self._about = await self._measurer.first(chosen)
            self._longest = self.seconds
            if self._may_extend:
                self.progress.limit = min(max(LIMIT_SECONDS, _LOADS * self.seconds), _LONGEST_SECONDS)
            with contextlib.suppress(Interrupted):
                for choice_for in self._choices(topology):
                    choice = candidates.without_what_is_set(choice_for(chosen), self._wanted)
                    chosen = await self._decide(choice, chosen)
        finally:
            await self._measurer.close()
        result = self._result(chosen)
        if not self._stopped or result.adopted:
            await asyncio.to_thread(self._kept.put, self._path, result.kept_as(earlier))
        return result

    def _choices(self, topology: Topology) -> Sequence[Callable[[Settings], TuningChoice]]:
        """Return what makes the choices, in their order; each is made for the settings as they are then."""
        max_tokens = min(int(candidates.UBATCH_SECONDS * self._about.prefill), self._measurer.max_tokens)
        drafters = partial(candidates.drafter_choice, draft=self._draft)
        # Without a draft model little depends on the drafters: they come last, when the time may be over.
        last = (drafters, candidates.kv_choice) if self._draft else (candidates.kv_choice, drafters)
        engine = self._measurer.engine
        modules = [partial(candidates.module_choice, engine=engine)] if engine is not None and engine.module else []
        return (
            lambda chosen: candidates.thread_choice(topology, chosen),
            lambda chosen: candidates.memory_choice(topology, chosen),
            *modules,
            candidates.attention_choice,
            lambda chosen: candidates.ubatch_choice(chosen, max_tokens),
            *last,
        )

    def _find_draft(self, chosen: Settings) -> str:
        """Return the draft model that a load would use, "" for none."""
        try:
            draft, _ = choose_draft(self._path, chosen.speculation.wanted_draft, self._library, strict=False)
        except CpuchatError:
            return ""
        return str(draft or "")

    async def _decide(self, choice: TuningChoice, chosen: Settings) -> Settings:
        """Make a choice; returns the settings with it."""
        base = ChoiceResult(name=choice.name, before=choice.now.words)
        skipped = choice.skipped or ("" if choice.candidates else "nothing else to try")
        if skipped or self._out_of_time:
            self._done(msgspec.structs.replace(base, reason=skipped or "time limit"))
            return chosen

        draft = self._draft if choice.test == "texts" else ""

        async def measure(candidate: TuningCandidate, rung: int) -> Speed:
            self._note(f"{choice.name}: {candidate.words}")
            if self._stopped:
                raise Interrupted("Stopped.")
            if self.seconds + 1.2 * self._longest > self.progress.limit:
                raise OutOfTime("The time limit is reached.")
            begun = time.monotonic()
            speed = await self._measurer.measure(candidate.settings, choice, rung, draft)
            self._longest = max(self._longest, time.monotonic() - begun)
            return speed

        try:
            finding = await Halving(measure, self._share).run(choice.now, choice.candidates)
        except OutOfTime:
            self._out_of_time = True
            self._done(msgspec.structs.replace(base, reason="time limit"))
            return chosen
        except Interrupted:
            raise
        except CpuchatError as error:
            self._done(msgspec.structs.replace(base, verdict="failed", reason=str(error)))
            return chosen
        if self._before is None and choice.test == "both":
            self._before = finding.anchor
        result = self._decided(choice, finding)
        self._done(result)
        return finding.best.settings if result.adopted and finding.best is not None else chosen

    def _decided(self, choice: TuningChoice, finding: HalvingResult[TuningCandidate]) -> ChoiceResult:
        best, ratio = finding.best, finding.ratio
        faster = finding.verdict == "faster"
        adopted = faster and (self._quantized_kv or not choice.needs_consent)
        return ChoiceResult(
            name=choice.name,
            before=choice.now.words,
            after=best.words if best is not None else "",
            adopted=adopted,
            offered=faster and not adopted,
            verdict=finding.verdict,
            decode=ratio.decode - 1 if ratio is not None and choice.test != "prefill" else None,
            prefill=ratio.prefill - 1 if ratio is not None and choice.test != "texts" else None,
            spread=finding.spread if finding.spread else None,
            reason=finding.problem,
            keys=changed_keys(choice.now.settings, best.settings) if best is not None else (),
        )

    def _result(self, chosen: Settings) -> TuneResult:
        done = self.progress.choices
        decode, prefill = speeds(self._before, done) if self._before is not None else (None, None)
        return TuneResult(
            model=self._measurer.name or self._path.stem,
            prompt_share=self._share,
            choices=tuple(done),
            changes=differences(self._wanted, chosen),
            replaced={key: value_of(self._wanted, key) for key in set_keys(self._wanted, MEASURED) if key in MEASURED},
            seconds=self.seconds,
            decode=decode,
            prefill=prefill,
            stopped=self._stopped,
            out_of_time=self._out_of_time,
        )

    @property
    def seconds(self) -> float:
        """Return how long it has been running."""
        return time.monotonic() - self._start

    def _done(self, result: ChoiceResult) -> None:
        self.progress.choices.append(result)
        self._note("")

    def _note(self, what: str) -> None:
        self.progress.what, self.progress.seconds = what, self.seconds
        self.tell()


TUNING_HEADINGS = ("CHOICE", "BEFORE → AFTER", "DECODE", "PREFILL", "RESULT")
TUNING_RIGHT = (2, 3)


def tuning_row(one: ChoiceResult) -> tuple[str, ...]:
    """Format a choice of tuning: what was compared, its gains, and what became of it."""
    compared = f"{one.before} → {one.after}" if one.after else one.before
    gains = [percent(gain) if gain is not None else "" for gain in (one.decode, one.prefill)]
    return (one.name, compared, *gains, _decision(one))


def _decision(one: ChoiceResult) -> str:
    if one.adopted:
        return "adopted"
    if one.offered:
        return "offered: changes the output"
    match one.verdict:
        case "mixed":
            slower = "decode" if (one.decode or 0.0) < (one.prefill or 0.0) else "prefill"
            return f"not adopted: slower {slower}"
        case "busy":
            return f"undecided: {one.reason}"
        case "failed":
            return f"failed: {one.reason}"
        case None:
            return f"not tried: {one.reason}"
        case verdict:
            return verdict


def tuning_summary(result: TuneResult, *, undo: str) -> list[str]:
    """Say in a sentence or two what tuning brought; `undo` says how to revert it."""
    lines: list[str] = []
    if result.adopted and result.decode is not None and result.prefill is not None:
        figures = [
            f"{name} {units.rate(before)} → {units.rate(after)} tok/s"
            for name, (before, after) in (("decode", result.decode), ("prefill", result.prefill))
            if abs(after / before - 1) > 0.0005
        ]
        figures += [f"drafted text {percent(one.decode or 0.0)}" for one in result.adopted if one.name == "drafters"]
        what = ", ".join(figures) or "adopted"
        lines.append(f"{result.model}: {what}. Used from the next load; {undo}.")
    elif result.busy:
        lines.append("Nothing was adopted: other programs use the CPUs. Tune again when the machine is idle.")
    elif not result.stopped:
        lines.append(f"{result.model}: nothing is faster than the settings in use; nothing was changed.")
    for one in result.choices:
        if one.offered:
            lines.append(
                f"{one.after} for the {one.name} is faster (decode {percent(one.decode or 0.0)}), but changes the "
                "output. Adopt it with `cpuchat tune MODEL --quantized-kv`, or set the KV type in the settings."
            )
    if result.busy and result.adopted:
        names = ", ".join(one.name for one in result.choices if one.verdict == "busy")
        lines.append(f"Undecided, because other programs use the CPUs: {names}. Tune again when the machine is idle.")
    if result.stopped:
        kept = "what was adopted is kept" if result.adopted else "nothing was changed"
        lines.append(f"Stopped; {kept}.")
    elif result.out_of_time:
        lines.append("Time limit reached before all choices were measured.")
    return lines
