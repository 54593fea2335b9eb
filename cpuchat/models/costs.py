"""What passes cost on this machine, as the probe, answers (of chats and comparisons) and calibrations measured it.

It belongs to the cores in use, a memory policy, a build of the engine and a version of the cost model. Of models that
chats used, the calibrated pass over one token counts until an answer does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from cpuchat.costs.calibrations import MIN_COMPARED, PassCosts, TargetCosts, is_plausible
from cpuchat.costs.fit import Observation, fit
from cpuchat.costs.model import COST_MODEL, CostProfile, bytes_read, pass_cost, scaled
from cpuchat.hardware.topology import ROOT
from cpuchat.measure import store
from cpuchat.measure.store import Reading
from cpuchat.measure.subject import Subject, on_cores
from cpuchat.models.file_names import engine_fingerprint, stat_fingerprint
from cpuchat.models.gguf.header import model_files
from cpuchat.protocol.model_info import ModelInfo, ModelWork
from cpuchat.protocol.timings import MAX_CPU_WAIT, Timings
from cpuchat.telemetry.units import plural

PROBE: Final = "passes of the probe"
_PART: Final = "passes of a part of the probe"
CHATS: Final = "passes of chats"
CALIBRATED: Final = "calibrated passes"
ACCEPTED: Final = "accepted drafts"
KEPT_SECONDS: Final = 30 * 86_400.0
"""Seconds for which a calibration is valid: kernels, firmware and cooling change less often..."""
UNSTEADY_SECONDS: Final = 3_600.0
"""...and seconds if its measurements scattered, or other programs disturbed it, so that it is repeated when the machine
may be idle."""
_MIN_TOKENS = 64  # tokens of an answer from which its mean time per token counts
_CALIBRATED_PAST = 32  # tokens in the context of calibrated passes
_MODELS = 12  # whose chats count, the latest
_ANSWERS = 5  # of a model that count, the last
_LARGE = 300e6
"""Bytes of weights from which a model tells something of others where nothing was probed: passes of smaller ones are
mostly overhead."""
_TINY = 32e6
"""Bytes of weights up to which models share one factor: it tells of caches and overhead, not of a file."""


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What chats with a model tell: its `work` as it was loaded, and the key `file` of its files (`usage`).

    `calibrated` are seconds per token by its calibration, sampling included (0: none). `answers` are the plain decoding
    of its last ones: the fastest counts, as what disturbs makes them slower, until the machine has become so."""

    work: ModelWork
    file: str = ""
    calibrated: float = 0.0
    answers: tuple[Observation, ...] = ()

    @property
    def answer(self) -> Observation | None:
        return max(self.answers, key=lambda one: bytes_read(one.work, 1, one.n_past) / one.seconds, default=None)

    def factor(self, profile: CostProfile) -> float:
        """Return by how much longer a token takes than by the profile. Longer passes say little about that: those of a
        tiny model are mostly overhead of their own."""
        one = self.answer or Observation(work=self.work, n_tokens=1, n_past=_CALIBRATED_PAST, seconds=self.calibrated)
        return one.seconds / pass_cost(profile, self.work, 1, one.n_past).seconds


class Costs(NamedTuple):
    """The `profile` of a set of cores, and the measurements that it follows (`source`; "": none). `probed`: those of a
    probe are among them.

    `factors`: by how much longer passes of some models take, by the key of their files (`usage`; "": other tiny ones).
    `types`: those of tensors whose passes were measured."""

    profile: CostProfile
    source: str
    factors: dict[str, float]
    probed: bool = False
    types: frozenset[str] = frozenset()


def factor_of(factors: Mapping[str, float], model: Path) -> float:
    """Return the factor of a model among those of `Costs`; 1 for others."""
    if not factors:
        return 1.0
    try:
        files = model_files(model)
        others = factors.get("", 1.0) if sum(file.stat().st_size for file in files) <= _TINY else 1.0
        return factors.get(stat_fingerprint(files, with_times=False), others)
    except OSError:
        return 1.0


class CostLog:
    """What was measured on a set of cores, `on`."""

    def __init__(self, cpus: Sequence[int], policy: str = "", root: Path = ROOT) -> None:
        """`policy` is NUMA's, in the words of `mempolicy`; `root` replaces `/` in tests."""
        self.on = on_cores(cpus, policy, root, build=engine_fingerprint(), settings={"cost model": COST_MODEL})

    @property
    def probe(self) -> Reading[tuple[Observation, ...]] | None:
        """Return the passes of the probe; None where there was none."""
        return store.find(self.on, PROBE, tuple[Observation, ...])

    @property
    def models(self) -> list[ModelCosts]:
        """Return what chats tell, of the models that were used last."""
        found = store.find_all(CHATS, ModelCosts)
        return [one.value for one in found if replace(one.subject, model=()) == self.on][-_MODELS:]

    @property
    def part(self) -> tuple[Observation, ...]:
        """Return the passes of a probe that is not complete."""
        found = store.find(self.on, _PART, tuple[Observation, ...])
        return found.value if found is not None else ()

    def probed(self, found: Sequence[Observation], *, is_whole: bool = True) -> None:
        """Keep the passes of a probe, or of a part of one."""
        store.keep(self.on, PROBE if is_whole else _PART, tuple(found), n=len(found))
        if is_whole:
            store.forget(self.on, _PART)

    def answered(self, model: ModelInfo, timings: Timings, file: str = "") -> None:
        """Keep what an answer of `model` tells: its plain decoding, if nothing else ran, and its calibrated passes.
        `file`: the key of the model's files (`usage`)."""
        rate, waited = timings.predicted_per_second, timings.cpu_wait
        is_long, is_alone = timings.predicted_n > _MIN_TOKENS, waited is not None and waited <= MAX_CPU_WAIT
        seconds = 1 / rate if rate and is_long and is_alone and not timings.draft_n else 0.0  # of a plain pass
        if not model.fingerprint or model.work is None or not (seconds or model.pass_ms):
            return
        work = replace(model.work, alike=0.0)  # calibrations choose tokens at random

        def changed(before: ModelCosts | None) -> ModelCosts:
            now = replace(before or ModelCosts(work=work), work=work)
            if file:
                now = replace(now, file=file)
            if model.pass_ms and not now.calibrated:
                now = replace(now, calibrated=model.pass_ms[0] / 1e3 + timings.overhead_us / 1e6)
            if seconds:
                n_past = max(0, timings.n_past - timings.predicted_n // 2)
                answer = Observation(work=work, n_tokens=1, n_past=n_past, seconds=seconds)
                now = replace(now, answers=(*now.answers, answer)[-_ANSWERS:])
            return now

        store.change(replace(self.on, model=(model.fingerprint,)), CHATS, ModelCosts, changed)

    def costs(self, start: CostProfile) -> Costs:
        """Return the profile of these cores; without a probe `start`, what is usual of such a machine, as fast as the
        large models of chats were."""
        whole = self.probe
        probe = whole.value if whole is not None else self.part
        profile = fit(start, probe)
        known = [(one, one.factor(profile)) for one in self.models]
        large = [factor for one, factor in known if one.work.weight_bytes > _LARGE and not probe]
        usual = statistics.median(large) if large else 1.0
        part = "part of a " if whole is None else ""
        sources = [f"{part}probe of {plural(len(self.on.cores), 'core')}"] * bool(probe)
        sources += [f"chats with {plural(len(large), 'model')}"] * bool(large)
        factors = {one.file: factor / usual for one, factor in known if one.file}
        if tiny := [one.file for one, _ in known if one.file and one.work.weight_bytes <= _TINY]:
            factors |= dict.fromkeys((*tiny, ""), statistics.median(factors[file] for file in tiny))
        types = frozenset(one.main.type for one in probe)
        profile = scaled(profile, 1 / usual) if large else profile
        return Costs(profile, " and ".join(sources), factors, whole is not None, types)


def calibration(on: Subject) -> Reading[PassCosts] | None:
    """Return the calibrated costs of a target, with a draft model if `on` names one, however old; None if there are no
    plausible ones."""
    found = store.find(on, CALIBRATED, PassCosts)
    return found if found is not None and is_plausible(found.value.verify_ms) else None


def is_due(found: Reading[PassCosts]) -> bool:
    """Return whether a calibration is so old that it should be repeated."""
    kept = KEPT_SECONDS if found.value.steady and not found.disturbed else UNSTEADY_SECONDS
    return time.time() - found.at > kept


def keep_calibration(on: Subject, costs: PassCosts) -> None:
    """Keep costs if they are plausible."""
    if is_plausible(costs.verify_ms):
        store.keep(on, CALIBRATED, costs, disturbed=costs.disturbed)


def accepted(target: str, draft: str) -> tuple[float, float]:
    """Return how many tokens of a draft model in earlier answers the target wrote too, and of how many, older ones
    counting less. Both by fingerprints."""
    found = store.find(Subject(model=(target, draft)), ACCEPTED, tuple[float, float])
    return found.value if found is not None else (0.0, 0.0)


def keep_accepted(target: str, draft: str, counts: tuple[float, float]) -> None:
    store.keep(Subject(model=(target, draft)), ACCEPTED, counts)


def costs_of_target(fingerprint: str) -> TargetCosts:
    """Return the latest undisturbed costs of a model file, whatever cores they were made with."""
    found = [
        one for one in store.find_all(CALIBRATED, PassCosts)
        if fingerprint and one.subject.model[:1] == (fingerprint,) and not one.disturbed
        and is_plausible(one.value.verify_ms)
    ]  # fmt: skip
    draft_ms = {one.subject.model[-1]: one.value.draft_ms for one in found if one.value.draft_ms > 0}
    counts = {
        one.subject.model[-1]: one.value for one in store.find_all(ACCEPTED, tuple[float, float])
        if fingerprint and one.subject.model[0] == fingerprint
    }  # fmt: skip
    rates = {draft: written / n for draft, (written, n) in counts.items() if n >= MIN_COMPARED}
    return TargetCosts(found[-1].value.verify_ms if found else (), draft_ms, rates)
