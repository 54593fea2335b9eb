"""Measures what each setting in use is worth: one at a time is changed, in turn with all as they are."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cpuchat.base.errors import CpuchatError, Interrupted
from cpuchat.bench.why import SettingFacts, SettingGain, Worth, worth_cache
from cpuchat.config.settings import Settings, with_changes
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import Topology
from cpuchat.protocol.options import EngineOptions
from cpuchat.telemetry.rounds import InTurn, has_drifted
from cpuchat.telemetry.units import plural
from cpuchat.tune.candidates import TuningCandidate, TuningChoice, attention_choice, kv_choice, thread_choice
from cpuchat.tune.halving import Speed
from cpuchat.tune.measurer import Measurer

ROUNDS: Final = 3
LIMIT_SECONDS: Final = 300.0
_RUNG: Final = 0
"""Answers are shorter than in the first rung of tuning, so that all settings fit the time limit."""
_PROMPT_SECONDS: Final = 0.6
_DEEP_SECONDS: Final = 1.5
"""Of prefill before attention and the KV cache are measured."""


def comparisons(topology: Topology, chosen: Settings) -> list[TuningChoice]:
    """Return each setting in use with one alternative, or why it has none here. The names are those of
    `SettingProof`."""
    engine, now = chosen.engine, TuningCandidate("as set", chosen)
    half = len(place(topology, PlacementSpec.of(chosen)).cpus) // 2
    siblings = [one for one in thread_choice(topology, chosen).candidates if "two per core" in one.words]

    def either(name: str, words: str, section: str = "engine", **values: object) -> TuningChoice:
        other = TuningCandidate(words, with_changes(chosen, {section: values}))
        test = "texts" if section == "speculation" else "both"
        return TuningChoice(name, tuple(f"{section}.{key}" for key in values), now, (other,), _PROMPT_SECONDS, test)

    threads = either("threads", plural(half, "thread"), threads=half)
    load_mode = "read" if engine.load_mode == "mmap" else "mmap"
    poll = 0 if engine.poll else EngineOptions().poll
    drafters = "auto" if chosen.speculation.drafters == "off" else "off"
    return [
        threads if half else TuningChoice("threads", (), now, skipped="one thread"),
        TuningChoice("SMT siblings", (), now, tuple(siblings[:1]), _PROMPT_SECONDS),
        either("load mode", load_mode, load_mode=load_mode),
        either("poll", str(poll), poll=poll),
        either("repack", "off" if engine.use_repack else "on", repack=not engine.use_repack),
        either("kernels", kernels := "llama.cpp" if engine.kernels == "auto" else "auto", kernels=kernels),
        dataclasses.replace(attention_choice(chosen), prompt_seconds=_DEEP_SECONDS),
        dataclasses.replace(kv_choice(chosen), prompt_seconds=_DEEP_SECONDS),
        either("drafters", drafters, "speculation", drafters=drafters),
    ]


class WorthMeasurer:
    """Measures all settings that have no worth yet. `run` once; what was measured is kept whenever it stops.

    Args:
        key: what the worths depend on, in `worth_cache`.
        without: settings that have no effect here, which are not measured.
        tell: called with the progress in words.
    """

    def __init__(
        self,
        facts: SettingFacts,
        key: str,
        *,
        without: frozenset[str] = frozenset(),
        seconds: float = LIMIT_SECONDS,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._choices = [one for one in comparisons(facts.topology, facts.chosen) if one.name not in without]
        self._chosen, self._draft, self._key, self._tell = facts.chosen, facts.model.draft_path, key, tell
        self._measurer = Measurer(Path(facts.model.path))
        self._until = time.monotonic() + seconds
        self._longest = 0.0  # seconds of a round
        # The newest speed with all as set, and what it was measured with: the next setting begins with it.
        self._in_use, self._shape = Speed(prefill=1.0, decode=(1.0,)), (0.0, "")
        self.worths: dict[str, Worth] = {}
        self.stopped = False

    async def stop(self, *, kill: bool = False) -> None:
        """Stop as soon as possible; `run` returns what was measured until then."""
        self.stopped = True
        if kill:
            self.kill()
        else:
            await self._measurer.stop()

    def kill(self) -> None:
        """Stop without waiting for the worker."""
        self.stopped = True
        self._measurer.kill()

    async def run(self) -> dict[str, Worth]:
        """Return the worth of each setting. Raises CpuchatError if the model cannot be measured as it is set."""
        self.worths = worth_cache().read().get(self._key, {})
        kept = dict(self.worths)
        try:
            left = [one for one in self._choices if one.name not in self.worths]
            left += [one for one in self._choices if one.name in self.worths and self.worths[one.name].noisy]
            if any(one.candidates and not one.skipped for one in left):
                self._tell("loading the model")
                await self._measurer.first(self._chosen)
            for choice in left:
                worth = await self._decide(choice)
                if not worth.skipped:
                    self.worths[choice.name] = kept[choice.name] = worth
                    worth_cache().put(self._key, kept)
                self.worths.setdefault(choice.name, worth)
        except Interrupted:
            if not self.stopped:
                raise
        finally:
            await self._measurer.close()
        return self.worths

    async def _decide(self, choice: TuningChoice) -> Worth:
        """Return the worth over the first candidate. Raises Interrupted."""
        if choice.skipped or not choice.candidates:
            return Worth(skipped=choice.skipped or "nothing else to try")
        if time.monotonic() + ROUNDS * self._longest > self._until:
            return Worth(skipped="time limit; measuring again resumes")
        other = choice.candidates[0]
        try:
            if self._shape != (shape := (choice.prompt_seconds, choice.test)):
                self._shape, self._in_use = shape, await self._speed(choice, choice.now, 0)
            samples = [self._in_use]
            rates = InTurn(_rates(samples[0]))
            for number in range(1, ROUNDS + 1):
                begun = time.monotonic()
                rival = await self._speed(choice, other, number)
                self._in_use = await self._speed(choice, choice.now, number)
                samples.append(self._in_use)
                rates.add(_rates(rival), _rates(samples[-1]))
                self._longest = max(self._longest, time.monotonic() - begun)
                if time.monotonic() > self._until:  # fewer rounds have larger errors
                    break
        except Interrupted:
            raise
        except CpuchatError as error:
            return Worth(skipped=str(error))
        decode = [one.mean_decode for one in samples]
        return Worth(
            alternative=other.words,
            noisy=has_drifted(min(decode), max(decode)),
            decode=_worth(rates, "decode"),
            prefill=_worth(rates, "prefill") if choice.test == "both" else None,
        )

    async def _speed(self, choice: TuningChoice, candidate: TuningCandidate, number: int) -> Speed:
        if self.stopped:
            raise Interrupted("Stopped.")
        left = max(0.0, self._until - time.monotonic())
        self._tell(f"{choice.name}: {candidate.words}, round {number} of {ROUNDS} · at most {left:.0f} s left")
        draft = self._draft if choice.test == "texts" else ""
        return await self._measurer.measure(candidate.settings, choice, _RUNG, draft)


def _rates(speed: Speed) -> dict[str, float]:
    return {"decode": speed.mean_decode, "prefill": speed.prefill}


def _worth(rates: InTurn, name: str) -> SettingGain:
    """Return how much faster the setting in use is than its rival in these rounds."""
    gain = rates.gain(name)
    log = -math.log1p(gain.gain)
    return SettingGain(gain=math.expm1(log), error=gain.error, is_sure=abs(log) > math.log1p(gain.needed))
