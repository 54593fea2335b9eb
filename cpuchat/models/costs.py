"""Keeps what passes cost on this machine, in the probe and in chats: `costs.json`.

An entry belongs to a machine, the cores in use, a memory policy, a build of the engine and a version of the cost model.
Of models that chats used, the calibrated pass over one token counts until an answer does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from cpuchat.base import paths
from cpuchat.base.files import JsonCache
from cpuchat.costs.calibrations import Calibrations
from cpuchat.costs.fit import Observation, fit
from cpuchat.costs.measured_on import MeasuredOn
from cpuchat.costs.model import COST_MODEL, CostProfile, bytes_read, pass_cost, scaled
from cpuchat.hardware.bandwidth.read_bandwidth import ROOT, measured_on
from cpuchat.models.file_names import engine_fingerprint, stat_fingerprint
from cpuchat.models.gguf.header import model_files
from cpuchat.protocol.model_info import ModelInfo, ModelWork
from cpuchat.protocol.timings import MAX_CPU_WAIT, Timings
from cpuchat.telemetry.units import plural

_MIN_TOKENS = 64
"""Tokens of an answer from which its mean time per token counts."""
_CALIBRATED_PAST = 32  # tokens in the context of calibrated passes
_MODELS = 12  # whose chats count, the latest
_RENEWED = 5
"""Slower measurements in a row of which the fastest replaces an earlier one: the machine has become slower."""
_LARGE = 300e6
"""Bytes of weights from which a model tells something of others where nothing was probed: passes of smaller ones are
mostly overhead."""


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What chats with a model tell: its `work` as it was loaded, and the key `file` of its files (`UsageLog`).

    `calibrated` are seconds per token by its calibration, sampling included (0: none). `answer` is its plain decoding;
    `slower` are later answers that did not replace it.
    """

    work: ModelWork
    file: str = ""
    calibrated: float = 0.0
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

    def factor(self, profile: CostProfile) -> float:
        """Return by how much longer a token takes than by the profile. Longer passes say little about that: those of a
        tiny model are mostly overhead of their own."""
        one = self.answer or Observation(work=self.work, n_tokens=1, n_past=_CALIBRATED_PAST, seconds=self.calibrated)
        return one.seconds / pass_cost(profile, self.work, 1, one.n_past).seconds


class CostEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured `on` some cores: by the probe, at `taken` (seconds since 1970), and in chats by the model's
    fingerprint.
    """

    on: MeasuredOn
    probe: tuple[Observation, ...] = ()
    taken: float = 0.0
    models: dict[str, ModelCosts] = {}


class Costs(NamedTuple):
    """The `profile` of a set of cores, and the measurements that it follows (`source`; "": none).

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

    def __init__(self, cpus: Sequence[int], policy: str = "", root: Path = ROOT) -> None:
        """`policy` is NUMA's, in the words of `mempolicy`; `root` replaces `/` in tests."""
        on = measured_on(cpus, policy, root)
        self.on = replace(on, build=engine_fingerprint(), options={"cost model": COST_MODEL})
        self._calibrations = Calibrations(paths.calibration_file())
        self._cache = JsonCache(paths.costs_file(), CostEntry, version=4, max_entries=8, max_bytes=8 << 20)

    def read(self) -> CostEntry:
        """Return what is known; nothing where nothing was measured."""
        return self._cache.read().get(self.on.key()) or CostEntry(on=self.on)

    def nearest_probe(self) -> CostLog | None:
        """Return the entry of this machine, with a probe, that shares most cores with this one; None if there is
        none."""
        cores = {"cpus": self.on.cpus, "memory_policy": self.on.memory_policy}
        probed = (one.on for one in self._cache.read().values() if one.probe and replace(one.on, **cores) == self.on)
        shared = max(
            probed,
            key=lambda on: (len({*on.cpus} & {*self.on.cpus}), on.memory_policy == self.on.memory_policy),
            default=None,
        )
        if shared is None:
            return None
        other = copy(self)
        other.on = shared
        return other

    def probed(self, found: Sequence[Observation]) -> None:
        """Replace the passes of the probe."""
        self._change(lambda entry: replace(entry, probe=tuple(found), taken=time.time()))

    def answered(self, model: ModelInfo, timings: Timings, file: str = "") -> None:
        """Keep what an answer of `model` tells: its plain decoding, if nothing else ran, and that its calibrated passes
        count.

        Args:
            file: the key of the model's files (`UsageLog`).
        """
        name, seconds, before = model.fingerprint, _plain_seconds(timings), self.read().models.get(model.fingerprint)
        calibrated = before.calibrated if before is not None else 0.0
        if model.pass_ms and not calibrated:
            entries = self._calibrations.entries().values()
            if any((one.target, one.verify_ms, one.disturbed) == (name, model.pass_ms, False) for one in entries):
                calibrated = model.pass_ms[0] / 1e3 + timings.overhead_us / 1e6
        is_new = calibrated and not (before and before.calibrated)
        if not name or model.work is None or not (seconds or is_new):
            return
        work = replace(model.work, alike=0.0)  # calibrations choose tokens at random

        def changed(entry: CostEntry) -> CostEntry:
            models = dict(entry.models)
            now = models.pop(name, None) or ModelCosts(work=work)
            now = replace(now, work=work, file=file or now.file, calibrated=calibrated)
            if seconds:
                n_past = max(0, timings.n_past - timings.predicted_n // 2)
                now = now.with_answer(Observation(work=work, n_tokens=1, n_past=n_past, seconds=seconds))
            models[name] = now
            return replace(entry, models=dict(list(models.items())[-_MODELS:]))

        self._change(changed)

    def costs(self, start: CostProfile) -> Costs:
        """Return the profile of these cores; without a probe `start`, what is usual of such a machine, as fast as the
        large models of chats were."""
        entry = self.read()
        profile = fit(start, entry.probe)
        known = [(one, one.factor(profile)) for one in entry.models.values()]
        large = [factor for one, factor in known if one.work.weight_bytes > _LARGE and not entry.probe]
        usual = statistics.median(large) if large else 1.0
        sources = [f"probe of {plural(len(self.on.cpus), 'core')}"] * bool(entry.probe)
        sources += [f"chats with {plural(len(known), 'model')}"] * bool(known)
        factors = {one.file: factor / usual for one, factor in known if one.file}
        return Costs(scaled(profile, 1 / usual) if large else profile, " and ".join(sources), factors)

    def _change(self, change: Callable[[CostEntry], CostEntry]) -> None:
        def put_last(entries: dict[str, CostEntry]) -> None:
            key = self.on.key()
            entries[key] = change(entries.pop(key, None) or CostEntry(on=self.on))

        self._cache.update(put_last)


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
