"""The decode rate of each model with the engine's build, kept to notice when a new build is slower.

One short measurement per model, build and way of running.
"""

from __future__ import annotations

import hashlib

import msgspec

from cpuchat import paths
from cpuchat.bench.environment import engine_build
from cpuchat.files import JsonCache
from cpuchat.greedy import Answering
from cpuchat.model_info import EngineInfo, ModelInfo
from cpuchat.settings import EngineSection
from cpuchat.telemetry import units
from cpuchat.tune.compare import compare, percent
from cpuchat.tune.measure import DecodeRate, measure_decode


class BuildSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed measured with one build; `commit` names it to users."""

    build: str
    commit: str
    measured: DecodeRate


class BuildSpeeds:
    """The newest measurement of each model and way of running. Reads and writes a file: call it in threads."""

    def __init__(self) -> None:
        self._cache = JsonCache(paths.build_speeds_file(), BuildSpeed, version=1, max_entries=200)

    def newest(self, key: str) -> BuildSpeed | None:
        """Return the measurement of the newest build."""
        return self._cache.read().get(key)

    def put(self, key: str, speed: BuildSpeed) -> None:
        self._cache.put(key, speed)


def speed_key(model: ModelInfo, engine: EngineSection) -> str:
    """Identify a model and what its decode rate depends on beside the build."""
    parts = (model.fingerprint, model.cpus, engine.memory, engine.cache_type_k, engine.cache_type_v, engine.flash_attn,
             engine.load_mode, engine.repack, engine.poll, engine.experts)  # fmt: skip
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=12).hexdigest()


def is_measured(known: BuildSpeed | None, engine: EngineInfo) -> bool:
    """Return whether this very build was measured."""
    return known is not None and known.build == engine_build(engine)


async def measure_build(
    answer: Answering, engine: EngineInfo, model: ModelInfo, known: BuildSpeed | None
) -> tuple[BuildSpeed, str]:
    """Measure the build in use; returns what to keep, and a notice when it is slower than the `known` one, else "".

    What seems to be slower is measured twice, and the faster of both counts: other programs come and go.

    Raises:
        MeasureFailed: as `measure_decode`.
    """
    measured = await measure_decode(answer)
    if known is not None and _is_slower(known.measured, measured):
        again = await measure_decode(answer)
        measured = max(measured, again, key=lambda rate: rate.tok_s)
    speed = BuildSpeed(build=engine_build(engine), commit=engine.llama_commit or engine.version, measured=measured)
    if known is None or not _is_slower(known.measured, measured):
        return speed, ""
    change = percent(compare(known.measured, measured).gain)
    return speed, (
        f"{model.name} is slower since the engine was updated: {units.rate(known.measured.tok_s)} tok/s with "
        f"llama.cpp {known.commit}, {units.rate(measured.tok_s)} with {speed.commit} ({change})."
    )


def _is_slower(before: DecodeRate, now: DecodeRate) -> bool:
    found = compare(before, now)
    return found.gain < -found.needed
