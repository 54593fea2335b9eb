"""Keeps what passes cost on this machine, in the probe and in chats, and the profile that fits them: `costs.json`.

An entry belongs to a machine, the cores in use, a memory policy, a build of the engine and a version of the cost model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from cpuchat.base import paths
from cpuchat.base.files import JsonCache
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
from cpuchat.hardware.bandwidth.read_bandwidth import ROOT, key
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


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured: by the probe of `cpus` under the policy `memory`, at `taken` (seconds since 1970), and in
    chats by the model's fingerprint.

    `slower` are later measurements of these models that did not replace those in `chats`; `files` identifies their
    files (`UsageLog`). `fitted` to probe and chats from `start`.
    """

    probe: tuple[Observation, ...] = ()
    cpus: tuple[int, ...] = ()
    memory: str = ""
    taken: float = 0.0
    chats: dict[str, tuple[Observation, ...]] = {}
    slower: dict[str, tuple[Observation, ...]] = {}
    files: dict[str, str] = {}
    start: CostProfile | None = None
    fitted: Fitted | None = None


class Costs(NamedTuple):
    """The `profile` of a set of cores, and the `source` that it is fitted to ("": nothing).

    `factors`: by how much longer passes of some models take, by their files as in `Known`.
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
        self.cpus, self.memory, self._root = tuple(cpus), memory, root
        self._key = self._key_of(cpus, memory)
        self._cache = JsonCache(paths.costs_file(), Known, version=2, max_entries=8, max_bytes=8 << 20)

    def _key_of(self, cpus: Sequence[int], memory: str) -> str:
        return f"{self._cores_key(cpus, memory)}{engine_fingerprint()[:12]} | model {COST_MODEL}"

    def _cores_key(self, cpus: Sequence[int], memory: str) -> str:
        return f"{key('costs', cpus, memory, self._root)} | engine "

    def read(self) -> Known:
        """Return what is known; nothing where nothing was measured."""
        return self._cache.read().get(self._key) or Known()

    def nearest_probe(self) -> CostLog | None:
        """Return the entry of this machine, with a probe, that shares most cores with this one; None if there is
        none."""
        probed = [
            one for name, one in self._cache.read().items()
            if one.probe and one.cpus and name == self._key_of(one.cpus, one.memory)
        ]  # fmt: skip

        def shared(one: Known) -> tuple[int, bool]:
            return len({*one.cpus} & {*self.cpus}), one.memory == self.memory

        best = max(probed, key=shared, default=None)
        return CostLog(best.cpus, best.memory, self._root) if best is not None else None

    def earlier_probe(self) -> CostLog | None:
        """Return the entry of these cores that was probed last with another build of the engine, or by another version
        of the cost model; None if there is none."""
        known = {
            name: one.taken
            for name, one in self._cache.read().items()
            if one.probe and name != self._key and name.startswith(self._cores_key(self.cpus, self.memory))
        }
        if not known:
            return None
        found = CostLog(self.cpus, self.memory, self._root)
        found._key = max(known, key=lambda name: known[name])
        return found

    def probed(self, found: Sequence[Observation]) -> None:
        """Replace the passes of the probe."""
        changes = {"cpus": self.cpus, "memory": self.memory, "taken": time.time(), "fitted": None}
        self._change(lambda known: msgspec.structs.replace(known, probe=tuple(found), **changes))

    def answered(self, model: ModelInfo, timings: Timings, file: str = "") -> None:
        """Keep what an answer of `model` tells: its plain decoding, if nothing else ran, and its calibrated passes.

        Args:
            file: identifies the model's files, as in `Known`.
        """
        known = self.read().chats.get(model.fingerprint, ())
        if not _plain_seconds(timings) and any(one.n_tokens > 1 for one in known):
            return  # its calibrated passes are known
        found = _of_answer(model, timings)
        if not found:
            return

        def changed(known: Known) -> Known:
            name, chats, slower, files = model.fingerprint, dict(known.chats), dict(known.slower), dict(known.files)
            before = chats.pop(name, ())
            chats[name], slower[name] = _renewed(before, slower.get(name, ()), found)
            files[name] = file or files.get(name, "")
            chats = dict(list(chats.items())[-_MODELS:])
            return msgspec.structs.replace(
                known,
                chats=chats,
                slower={one: slower[one] for one in chats if slower.get(one)},
                files={one: files[one] for one in chats if files.get(one)},
                fitted=known.fitted if known.chats.get(name) == chats[name] else None,
            )

        self._change(changed)

    def costs(self, start: CostProfile) -> Costs:
        """Return the profile of these cores; `start` where nothing was measured, or no profile explains it.

        Fits, which takes up to a second, when something was measured since.

        Args:
            start: what is usual of such a machine.
        """
        known = self.read()
        seen = [*known.probe, *(one for found in known.chats.values() for one in found)]
        if not seen:
            return Costs(start, "", {})
        usual, start = start, with_points(start, seen)
        fitted = known.fitted if known.start == start else None
        if fitted is None:
            from cpuchat.costs.fit import fit

            fitted = fit(start, seen)
            self._change(
                lambda now: (
                    msgspec.structs.replace(now, start=start, fitted=fitted)
                    if (now.probe, now.chats) == (known.probe, known.chats)
                    else now
                )
            )
        if not fitted.is_plausible:
            return Costs(usual, "", {})
        own = {
            known.files[name]: _factor(fitted.profile, found)
            for name, found in known.chats.items()
            if name in known.files
        }
        return Costs(fitted.profile, self._source(known), own)

    def _source(self, known: Known) -> str:
        found = [f"probe of {plural(len(self.cpus), 'core')}"] if known.probe else []
        found += [f"chats with {plural(len(known.chats), 'model')}"] if known.chats else []
        return " and ".join(found)

    def _change(self, change: Callable[[Known], Known]) -> None:
        def put_last(entries: dict[str, Known]) -> None:
            entries[self._key] = change(entries.pop(self._key, Known()))

        self._cache.update(put_last)


def _of_answer(model: ModelInfo, timings: Timings) -> tuple[Observation, ...]:
    seconds = _plain_seconds(timings)
    if not model.fingerprint or model.work is None or not (seconds or model.pass_ms):
        return ()
    work = msgspec.structs.replace(model.work, alike=0.0)  # calibrations choose tokens at random
    outside = timings.overhead_us / 1e6  # of a pass: sampling and writing a token, much beside a tiny model's pass
    found = [
        Observation(
            work=work, n_tokens=n, n_past=_CALIBRATED_PAST,
            seconds=model.pass_ms[n - 1] / 1e3 + (outside if n == 1 else 0.0), weight=_CHAT, model=model.fingerprint,
        )
        for n in KNOTS
        if n <= len(model.pass_ms) and model.pass_ms[n - 1] > 0
    ]  # fmt: skip
    if seconds:
        n_past = max(0, timings.n_past - timings.predicted_n // 2)
        found.append(
            Observation(work=work, n_tokens=1, n_past=n_past, seconds=seconds, weight=_CHAT, model=model.fingerprint)
        )
    return tuple(found)


def _factor(profile: CostProfile, found: Sequence[Observation]) -> float:
    """Return by how much longer a model takes for a token than by the profile: in its answers, before any of them in
    the calibrated pass. Longer passes say little about that: those of a tiny model are mostly overhead of their own.
    """
    tokens = [one for one in found if one.n_tokens == 1]
    if not tokens:
        return 1.0
    one = min(tokens, key=lambda one: one.n_past == _CALIBRATED_PAST)
    return one.seconds / pass_cost(profile, one.work, 1, one.n_past).seconds


def _plain_seconds(timings: Timings) -> float:
    """Return the mean seconds of a token; 0 for an answer with drafts, a short one, and one beside other programs."""
    rate = timings.predicted_per_second
    if timings.draft_n or not rate or timings.predicted_n <= _MIN_TOKENS:
        return 0.0
    if timings.cpu_wait is None or timings.cpu_wait > MAX_CPU_WAIT:
        return 0.0
    return 1 / rate


def _renewed(
    before: Sequence[Observation], slower: Sequence[Observation], now: Sequence[Observation]
) -> tuple[tuple[Observation, ...], tuple[Observation, ...]]:
    """Return the measurements that count, and those since then that were slower.

    Of passes over the same tokens and about the same context the fastest counts, as what disturbs makes them slower;
    but after `_RENEWED` slower ones in a row the fastest of those does.
    """
    best = {_place(one): one for one in before}
    waiting: dict[tuple[float, bool], list[Observation]] = {}
    for one in slower:
        waiting.setdefault(_place(one), []).append(one)
    for one in now:
        place = _place(one)
        later = waiting.setdefault(place, [])
        if place not in best or _rate(one) >= _rate(best[place]):
            best[place] = one
            later.clear()
        elif one not in later:  # the passes of one calibration come with every answer
            later.append(one)
        if len(later) >= _RENEWED:
            best[place] = max(later, key=_rate)
            later.clear()
    return tuple(best[place] for place in sorted(best)), tuple(one for later in waiting.values() for one in later)


def _place(one: Observation) -> tuple[float, bool]:
    return one.n_tokens, one.n_past == _CALIBRATED_PAST


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
    return msgspec.structs.replace(start, bandwidth=tuple((at, start.read_rate(at)) for at in sets), rates=tuple(rates))


def _types(work: ModelWork) -> list[str]:
    parts = [(one.type, one.madds) for one in (*work.dense, *work.head)]
    parts += [(one.type + ROUTED, one.madds) for one in work.experts]
    total = sum(madds for _, madds in parts)
    return [kind for kind, madds in parts if madds > _MUCH * total]
