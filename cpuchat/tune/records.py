"""Keeps the measurements before and after a tuning plan in the plan's folder."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Literal

import msgspec

from cpuchat.errors import CpuchatError
from cpuchat.files import read_json, write_atomically
from cpuchat.model_info import ModelInfo
from cpuchat.tune.compare import RateChange, compare
from cpuchat.tune.measure import DecodeRate

Label = Literal["before", "after"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: of which model on which CPUs, and how many changes of each knob were in effect, of how many."""

    label: Label
    taken: str
    model: str
    fingerprint: str
    cpus: tuple[int, ...]
    measured: DecodeRate
    effect: dict[str, tuple[int, int]]


def make(label: Label, model: ModelInfo, measured: DecodeRate, effect: dict[str, tuple[int, int]]) -> Record:
    return Record(
        label=label,
        taken=time.strftime("%Y-%m-%d %H:%M"),
        model=model.name or Path(model.path).stem,
        fingerprint=model.fingerprint,
        cpus=model.cpus,
        measured=measured,
        effect=effect,
    )


def save(folder: Path, record: Record) -> None:
    """Keep a measurement; it replaces the one with the same label.

    Raises:
        CpuchatError: it could not be written.
    """
    file = folder / f"{record.label}.json"
    try:
        write_atomically(file, msgspec.json.encode(record) + b"\n", mode=0o644)
    except OSError as error:
        raise CpuchatError(f"Cannot save the measurement to {file}: {error.strerror}.") from None


def load(folder: Path, label: Label) -> Record | None:
    """Read the measurement with this label; None when there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(folder / f"{label}.json", msgspec.json.Decoder(Record).decode)
    return None


def judged(before: Record | None, after: Record | None) -> tuple[RateChange | None, str]:
    """Compare both measurements; None and the reason when they cannot be compared."""
    if before is None or after is None:
        missing = " and ".join(label for label, record in (("before", before), ("after", after)) if record is None)
        return None, f"{missing} not measured"
    if before.fingerprint != after.fingerprint:
        return None, f"measured with different models (before: {before.model}, after: {after.model})"
    if before.cpus != after.cpus:
        return None, "measured on different CPUs; measure both with the same settings"
    if not any(now for now, _ in after.effect.values()):
        return None, "no change of the plan was in effect for the second measurement"
    return compare(before.measured, after.measured), ""
