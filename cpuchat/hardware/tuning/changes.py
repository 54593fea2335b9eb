"""The data of a tuning plan, and reading a file's value."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cpuchat.hardware.sysfs import read_text


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One file's value: `old` is its current value, which the revert script writes back, `new` what the plan writes.

    `path` is absolute on the machine ("/sys/..."), whatever root it was read below.
    """

    knob: str
    path: str
    old: str
    new: str


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A resctrl control group to create: `schemata` is its L3 line, `cpus` the list of CPUs assigned to it."""

    path: str
    schemata: str
    cpus: str


class KnobRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """A knob that is unavailable here: `why`, and `how` to make it available ("" = not possible)."""

    knob: str
    why: str
    how: str = ""


class TuningPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The changes, in order; reverting goes in reverse. `notes` say what is left unchanged."""

    changes: tuple[Change, ...] = ()
    group: CacheGroup | None = None
    refusals: tuple[KnobRefusal, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.changes and self.group is None

    @property
    def knobs(self) -> tuple[str, ...]:
        """Return names of the knobs that change something, in the order of the plan."""
        names = [change.knob for change in self.changes] + (["l3"] if self.group is not None else [])
        return tuple(dict.fromkeys(names))


def chosen(text: str) -> str:
    """Return the value of a file; of a choice such as `always [madvise] never`, the selected word."""
    _, opening, rest = text.partition("[")
    word, closing, _ = rest.partition("]")
    return word if opening and closing else text


def below(root: Path, path: str) -> Path:
    """Return the absolute `path` of the machine, below `root`."""
    return root / path.lstrip("/")


def value_of(root: Path, path: str) -> str:
    """Return the current value of the file at the absolute `path`, as `chosen`; "" when unreadable."""
    return chosen(read_text(below(root, path)))
