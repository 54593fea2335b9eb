"""Keeps what passes cost on this machine, in the probe and in chats, and the profile that fits them: `costs.json`.

An entry belongs to a machine, the cores in use, a memory policy and a build of the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from cpuchat import paths
from cpuchat.costmodel.observations import KNOTS, Fitted, Observation
from cpuchat.costmodel.profile import UNCACHED, CostProfile, Rate
from cpuchat.costmodel.work import ACTIVATIONS, ROUTED, ModelWork, bytes_read
from cpuchat.errors import CpuchatError
from cpuchat.files import JsonCache
from cpuchat.hardware.bandwidth.cache import ROOT, key
from cpuchat.models.fingerprint import stat_fingerprint
from cpuchat.models.gguf.header import read_model
from cpuchat.models.work import model_work
from cpuchat.protocol import ModelInfo
from cpuchat.telemetry.units import plural
from cpuchat.timings import Timings

_MIN_TOKENS = 64
"""Tokens of an answer from which its mean time per token counts."""
_MAX_CPU_WAIT = 0.05
"""Share of the time that threads may have waited for a core: beside other load a chat tells nothing of the machine."""
_CHAT = 0.5
"""Weight of a chat: the best of a model's answers without other load, but one number for a changing context; and of
passes that were calibrated at a load."""
_CALIBRATED_PAST = 32  # tokens in the context of calibrated passes
_MODELS = 12  # whose chats count, the latest
_SETS = (2e6, 16e6, 64e6, 160e6, 450e6)
"""Bytes of weights between which the bandwidth may change: those of caches, which a virtual machine does not tell."""
_MUCH = 0.05  # share of the multiply-adds from which passes say something about the rate of a type
_PER_ACTIVATION = 1000
"""Multiply-adds in the time of an activation, from which the fit starts: 1.4 to 4 ns on two cores of a Xeon."""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured: by the probe, and in chats by the model's fingerprint; `fitted` to it from `start`."""

    probe: tuple[Observation, ...] = ()
    chats: dict[str, tuple[Observation, ...]] = {}
    start: CostProfile | None = None
    fitted: Fitted | None = None


class CostLog:
    """Reads and writes the entry of a set of cores. Several programs may do so at once."""

    def __init__(self, cpus: Sequence[int], memory: str = "", root: Path = ROOT) -> None:
        """`memory` is the policy in the words of `mempolicy`; `root` replaces `/` in tests."""
        self._key = f"{key('costs', cpus, memory, root)} | engine {_engine_build()}"
        self._n_cpus = len(cpus)
        self._cache = JsonCache(paths.costs_file(), Known, version=2, max_entries=8, max_bytes=8 << 20)

    def read(self) -> Known:
        """Return what is known; nothing where nothing was measured."""
        return self._cache.read().get(self._key) or Known()

    def probed(self, found: Sequence[Observation]) -> None:
        """Replace the passes of the probe."""
        self._change(lambda known: msgspec.structs.replace(known, probe=tuple(found), fitted=None))

    def answered(self, model: ModelInfo, timings: Timings) -> None:
        """Keep what an answer of `model` tells: its plain decoding, if nothing else ran, and its calibrated passes."""
        if not _plain_seconds(timings) and model.fingerprint in self.read().chats:
            return  # its calibrated passes are known
        found = _of_answer(model, timings)
        if not found:
            return

        def changed(known: Known) -> Known:
            chats = dict(known.chats)
            before = chats.pop(model.fingerprint, ())
            chats[model.fingerprint] = _better(before, found)
            if chats[model.fingerprint] == before:
                return known
            return msgspec.structs.replace(known, chats=dict(list(chats.items())[-_MODELS:]), fitted=None)

        self._change(changed)

    def profile(self, start: CostProfile) -> tuple[CostProfile, str]:
        """Return the profile of these cores and what it is fitted to ("": nothing; then it is `start`).

        Fits, which takes up to a second, when something was measured since.

        Args:
            start: what is usual of such a machine.
        """
        known = self.read()
        seen = [*known.probe, *(one for found in known.chats.values() for one in found)]
        if not seen:
            return start, ""
        fitted = known.fitted if known.start == start else None
        if fitted is None:
            from cpuchat.costmodel.fit import fit

            fitted = fit(with_points(start, seen), seen)
            self._change(
                lambda now: (
                    msgspec.structs.replace(now, start=start, fitted=fitted)
                    if (now.probe, now.chats) == (known.probe, known.chats)
                    else now
                )
            )
        return fitted.profile, self._source(known)

    def _source(self, known: Known) -> str:
        found = [f"probe of {plural(self._n_cpus, 'core')}"] if known.probe else []
        found += [f"chats with {plural(len(known.chats), 'model')}"] if known.chats else []
        return " and ".join(found)

    def _change(self, change: Callable[[Known], Known]) -> None:
        def put_last(entries: dict[str, Known]) -> None:
            entries[self._key] = change(entries.pop(self._key, Known()))

        self._cache.update(put_last)


@functools.cache
def _engine_build() -> str:
    """Identify the engine that is installed, without loading it; "" without one."""
    found = find_spec("llama_cpp")
    folder = Path(found.origin).parent / "lib" if found is not None and found.origin else None
    files = sorted(folder.glob("lib*")) if folder is not None else []
    return stat_fingerprint(files)[:12] if files else ""


def _of_answer(model: ModelInfo, timings: Timings) -> tuple[Observation, ...]:
    seconds = _plain_seconds(timings)
    if not model.fingerprint or not (seconds or model.pass_ms):
        return ()
    try:
        work = model_work(read_model(Path(model.path)), n_experts=model.n_expert_used)
    except CpuchatError:  # its file no longer exists
        return ()
    found = [
        Observation(
            work=work, n_tokens=n, n_past=_CALIBRATED_PAST, seconds=model.pass_ms[n - 1] / 1e3,
            weight=_CHAT, model=model.fingerprint,
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


def _plain_seconds(timings: Timings) -> float:
    """Return the mean seconds of a token; 0 for an answer with drafts, a short one, and one beside other programs."""
    rate = timings.predicted_per_second
    if timings.draft_n or not rate or timings.predicted_n <= _MIN_TOKENS:
        return 0.0
    if timings.cpu_wait is None or timings.cpu_wait > _MAX_CPU_WAIT:
        return 0.0
    return 1 / rate


def _better(before: Sequence[Observation], now: Sequence[Observation]) -> tuple[Observation, ...]:
    """Return the passes of both, of the same tokens and about the same context the faster ones: what disturbs makes
    them slower."""
    best: dict[tuple[float, bool], Observation] = {}
    for one in (*before, *now):
        place = one.n_tokens, one.n_past == _CALIBRATED_PAST
        if place not in best or _rate(one) > _rate(best[place]):
            best[place] = one
    return tuple(best[place] for place in sorted(best))


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
