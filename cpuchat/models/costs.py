"""Keeps what passes cost on this machine, in the probe and in chats, and the profile that fits them: `costs.json`.

An entry belongs to a machine, the cores in use, a memory policy, a build of the engine and a version of the cost model.
The calibrated passes of models that chats used count too, as `calibrations.json` has them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from cpuchat.base import paths
from cpuchat.base.files import JsonCache
from cpuchat.costs.calibrations import Calibration, Calibrations
from cpuchat.costs.measured_on import MeasuredOn
from cpuchat.costs.model import (
    ACTIVATIONS,
    COST_MODEL,
    ROUTED,
    UNCACHED,
    CostProfile,
    Rate,
    bytes_read,
    pass_cost,
)
from cpuchat.costs.observations import KNOTS, Fitted, Observation
from cpuchat.hardware.bandwidth.read_bandwidth import ROOT, measured_on
from cpuchat.models.file_names import engine_fingerprint, stat_fingerprint
from cpuchat.models.gguf.header import model_files
from cpuchat.protocol.model_info import ModelInfo, ModelWork
from cpuchat.protocol.timings import MAX_CPU_WAIT, Timings
from cpuchat.telemetry.units import plural

_MIN_TOKENS = 64
"""Tokens of an answer from which its mean time per token counts."""
_CHAT = 0.5
"""Weight of a chat: the best of a model's answers without other load, but one number for a changing context; and of
passes that were calibrated at a load."""
_CALIBRATED_PAST = 32  # tokens in the context of calibrated passes
_MODELS = 12  # whose chats count, the latest
_RENEWED = 5
"""Slower measurements in a row of which the fastest replaces an earlier one: the machine has become slower."""
_SETS = (2e6, 16e6, 64e6, 160e6, 450e6)
"""Bytes of weights between which the bandwidth may change: those of caches, which a virtual machine does not tell."""
_MUCH = 0.05  # share of the multiply-adds from which passes say something about the rate of a type
_PER_ACTIVATION = 1000
"""Multiply-adds in the time of an activation, from which the fit starts: 1.4 to 4 ns on two cores of a Xeon."""


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What chats with a model tell: its `work` as it was loaded, the key `file` of its files (`UsageLog`), and that of
    its `calibration` ("": none).

    `outside` are seconds per token outside of a pass: sampling and writing it, much beside a tiny model's pass.
    `answer` is its plain decoding; `slower` are later answers that did not replace it.
    """

    work: ModelWork
    file: str = ""
    calibration: str = ""
    outside: float = 0.0
    answer: Observation | None = None
    slower: tuple[Observation, ...] = ()

    def with_answer(self, now: Observation) -> ModelCosts:
        """Return the costs after an answer. The fastest one counts, as what disturbs makes them slower; but after
        `_RENEWED` slower ones in a row the fastest of those does.
        """
        best, slower = self.answer, (*self.slower, now)
        if best is None or _rate(now) >= _rate(best):
            best, slower = now, ()
        elif len(slower) >= _RENEWED:
            best, slower = max(slower, key=_rate), ()
        return replace(self, answer=best, slower=slower)

    def observations(self, name: str, calibration: Calibration | None) -> list[Observation]:
        """Return its answer and its calibrated passes; `name` is its fingerprint."""
        passes = calibration.verify_ms if calibration is not None and not calibration.disturbed else ()
        answers = [self.answer] if self.answer is not None else []
        return answers + [
            Observation(work=self.work, n_tokens=n, n_past=_CALIBRATED_PAST, weight=_CHAT, model=name,
                        seconds=passes[n - 1] / 1e3 + (self.outside if n == 1 else 0.0))
            for n in KNOTS if n <= len(passes)
        ]  # fmt: skip


class CostEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured `on` some cores: by the probe, at `taken` (seconds since 1970), and in chats by the model's
    fingerprint. `fitted` to the measurements with the hash `fitted_to`.
    """

    on: MeasuredOn
    probe: tuple[Observation, ...] = ()
    taken: float = 0.0
    models: dict[str, ModelCosts] = {}
    fitted: Fitted | None = None
    fitted_to: str = ""


class Costs(NamedTuple):
    """The `profile` of a set of cores, and the `source` that it is fitted to ("": nothing).

    `factors`: by how much longer passes of some models take, by the key of their files (`UsageLog`).
    """

    profile: CostProfile
    source: str
    factors: dict[str, float]


def factor_of(factors: Mapping[str, float], model: Path) -> float:
    """Return the factor of a model among those of `Costs`; 1 for others."""
    if not factors:
        return 1.0
    try:
        return factors.get(stat_fingerprint(model_files(model), with_times=False), 1.0)
    except OSError:
        return 1.0


class CostLog:
    """Reads and writes the entry of a set of cores. Several programs may do so at once."""

    def __init__(self, cpus: Sequence[int], memory: str = "", root: Path = ROOT) -> None:
        """`memory` is the policy in the words of `mempolicy`; `root` replaces `/` in tests."""
        on = measured_on(cpus, memory, root)
        self.on = replace(on, build=engine_fingerprint(), options={"cost model": COST_MODEL})
        self._calibrations = Calibrations(paths.calibration_file())
        self._cache = JsonCache(paths.costs_file(), CostEntry, version=3, max_entries=8, max_bytes=8 << 20)

    def read(self) -> CostEntry:
        """Return what is known; nothing where nothing was measured."""
        return self._cache.read().get(self.on.key()) or CostEntry(on=self.on)

    def nearest_probe(self) -> CostLog | None:
        """Return the entry of this machine, with a probe, that shares most cores with this one; None if there is
        none."""

        def shared(on: MeasuredOn) -> tuple[int, bool]:
            return len({*on.cpus} & {*self.on.cpus}), on.memory == self.on.memory

        cores = {"cpus": self.on.cpus, "memory": self.on.memory}
        return self._at(max((one.on for one in self._probed_like(**cores)), key=shared, default=None))

    def earlier_probe(self) -> CostLog | None:
        """Return the entry of these cores that was probed last with another build of the engine, or by another version
        of the cost model; None if there is none."""
        earlier = self._probed_like(build=self.on.build, options=self.on.options)
        last = max((one for one in earlier if one.on != self.on), key=lambda one: one.taken, default=None)
        return self._at(last.on if last is not None else None)

    def _probed_like(self, **changes: Any) -> list[CostEntry]:
        """Return the entries with a probe that differ from this one in these fields at most."""
        return [one for one in self._cache.read().values() if one.probe and replace(one.on, **changes) == self.on]

    def _at(self, on: MeasuredOn | None) -> CostLog | None:
        if on is None:
            return None
        other = copy(self)
        other.on = on
        return other

    def probed(self, found: Sequence[Observation]) -> None:
        """Replace the passes of the probe."""
        self._change(lambda entry: replace(entry, probe=tuple(found), taken=time.time(), fitted=None))

    def answered(self, model: ModelInfo, timings: Timings, file: str = "") -> None:
        """Keep what an answer of `model` tells: its plain decoding, if nothing else ran, and that its calibrated passes
        count.

        Args:
            file: the key of the model's files (`UsageLog`).
        """
        name, seconds = model.fingerprint, _plain_seconds(timings)
        before = self.read().models.get(name)
        is_calibrated = bool(model.pass_ms) and not (before and before.calibration)
        if not name or model.work is None or not (seconds or is_calibrated):
            return
        work = replace(model.work, alike=0.0)  # calibrations choose tokens at random
        keys = {one.verify_ms: key for key, one in self._calibrations.entries().items() if one.target == name}
        if not seconds and model.pass_ms not in keys:
            return

        def changed(entry: CostEntry) -> CostEntry:
            models = dict(entry.models)
            now = models.pop(name, None) or ModelCosts(work=work, outside=timings.overhead_us / 1e6)
            calibration = keys.get(model.pass_ms, now.calibration)
            now = replace(now, work=work, file=file or now.file, calibration=calibration)
            if seconds:
                n_past = max(0, timings.n_past - timings.predicted_n // 2)
                now = now.with_answer(
                    Observation(work=work, n_tokens=1, n_past=n_past, seconds=seconds, weight=_CHAT, model=name)
                )
            models[name] = now
            return replace(entry, models=dict(list(models.items())[-_MODELS:]))

        self._change(changed)

    def costs(self, start: CostProfile) -> Costs:
        """Return the profile of these cores; `start` where nothing was measured, or no profile explains it.

        Fits, which takes up to a second, when something was measured since.

        Args:
            start: what is usual of such a machine.
        """
        entry = self.read()
        calibrated = self._calibrations.entries() if entry.models else {}
        chats = {name: one.observations(name, calibrated.get(one.calibration)) for name, one in entry.models.items()}
        seen = [*entry.probe, *(one for found in chats.values() for one in found)]
        if not seen:
            return Costs(start, "", {})
        usual, start = start, with_points(start, seen)
        fitted_to = hashlib.blake2b(msgspec.json.encode([start, seen]), digest_size=16).hexdigest()
        fitted = entry.fitted if entry.fitted_to == fitted_to else None
        if fitted is None:
            from cpuchat.costs.fit import fit

            fitted = fit(start, seen)
            self._change(lambda now: replace(now, fitted=fitted, fitted_to=fitted_to))
        if not fitted.is_plausible:
            return Costs(usual, "", {})
        profile, n_models = fitted.profile, sum(map(bool, chats.values()))
        sources = [f"probe of {plural(len(self.on.cpus), 'core')}"] * bool(entry.probe)
        sources += [f"chats with {plural(n_models, 'model')}"] * bool(n_models)
        factors = {one.file: _factor(profile, chats[name]) for name, one in entry.models.items() if one.file}
        return Costs(profile, " and ".join(sources), factors)

    def _change(self, change: Callable[[CostEntry], CostEntry]) -> None:
        def put_last(entries: dict[str, CostEntry]) -> None:
            key = self.on.key()
            entries[key] = change(entries.pop(key, None) or CostEntry(on=self.on))

        self._cache.update(put_last)


def _factor(profile: CostProfile, found: Sequence[Observation]) -> float:
    """Return by how much longer a model takes for a token than by the profile: in its answers, before any of them in
    the calibrated pass. Longer passes say little about that: those of a tiny model are mostly overhead of their own.
    """
    one = next((one for one in found if one.n_tokens == 1), None)
    return one.seconds / pass_cost(profile, one.work, 1, one.n_past).seconds if one is not None else 1.0


def _plain_seconds(timings: Timings) -> float:
    """Return the mean seconds of a token; 0 for an answer with drafts, a short one, and one beside other programs."""
    rate = timings.predicted_per_second
    if timings.draft_n or not rate or timings.predicted_n <= _MIN_TOKENS:
        return 0.0
    if timings.cpu_wait is None or timings.cpu_wait > MAX_CPU_WAIT:
        return 0.0
    return 1 / rate


def _rate(one: Observation) -> float:
    return bytes_read(one.work, one.n_tokens, one.n_past) / one.seconds


def with_points(start: CostProfile, seen: Sequence[Observation]) -> CostProfile:
    """Return `start` with points at which it can be fitted, for the types in which the measured models compute."""
    sets = sorted({*_SETS, *(at for at, _ in start.bandwidth)})
    kinds = dict.fromkeys([rate.type for rate in start.rates] + [kind for one in seen for kind in _types(one.work)])
    small = [one.work for one in seen if one.work.weight_bytes < UNCACHED and not one.work.is_moe]
    cached = dict.fromkeys(kind for one in small for kind in _types(one))

    def rate(kind: str, cached: bool = False) -> Rate:
        return Rate(kind, tuple((n, start.madd_rate(kind, n)) for n in KNOTS), cached)

    rates = [*map(rate, kinds), *(rate(kind, cached=True) for kind in cached)]
    if any(not one.model for one in seen):  # chats alone do not tell activations from the rest
        rates.append(Rate(ACTIVATIONS, tuple((n, start.madd_rate("Q8_0", n) / _PER_ACTIVATION) for n in KNOTS)))
    return replace(start, bandwidth=tuple((at, start.read_rate(at)) for at in sets), rates=tuple(rates))


def _types(work: ModelWork) -> list[str]:
    parts = [(one.type, one.madds) for one in (*work.dense, *work.head)]
    parts += [(one.type + ROUTED, one.madds) for one in work.experts]
    total = sum(madds for _, madds in parts)
    return [kind for kind, madds in parts if madds > _MUCH * total]
