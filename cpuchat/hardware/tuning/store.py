"""Stores plans: one folder each, the revert script saved before the apply script."""

from __future__ import annotations

import contextlib
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.base.files import read_json, write_atomically
from cpuchat.hardware.tuning.changes import TuningPlan
from cpuchat.hardware.tuning.script import apply_script, revert_script

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan and the `folder` with its two scripts and, later, its measurements."""

    folder: Path
    plan: TuningPlan

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def apply(self) -> Path:
        return self.folder / "apply.sh"

    @property
    def revert(self) -> Path:
        return self.folder / "revert.sh"

    def command(self, script: Path) -> str:
        """Return the command that runs one of the scripts."""
        return f"sudo sh {shlex.quote(str(script))}"


def plans_dir() -> Path:
    return paths.data_dir() / "tuning"


def save(plan: TuningPlan, root: Path = ROOT) -> SavedPlan:
    """Write both scripts, the one that reverts first.

    Raises:
        CpuchatError: nothing could be written; then there is no script that could be applied either.
    """
    try:
        folder = _new_folder(plans_dir())
        saved = SavedPlan(folder, plan)
        write_atomically(saved.revert, revert_script(plan, root, saved.name), mode=0o700)
        write_atomically(folder / "plan.json", msgspec.json.format(msgspec.json.encode(plan), indent=1))
        write_atomically(saved.apply, apply_script(plan, root, saved.name, saved.revert), mode=0o700)
    except OSError as error:
        raise CpuchatError(f"Cannot save the plan: {error.filename}: {error.strerror}.") from None
    return saved


def _new_folder(base: Path) -> Path:
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        folder = base / (stamp if number == 1 else f"{stamp}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return folder
    raise FileExistsError(17, "too many plans in one second", str(base))


def saved_plans() -> list[SavedPlan]:
    """Return all plans that can still be read, oldest first."""
    found: list[SavedPlan] = []
    for file in sorted(plans_dir().glob("*/plan.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append(SavedPlan(file.parent, read_json(file, msgspec.json.Decoder(TuningPlan).decode)))
    return found


def find(name: str = "") -> SavedPlan:
    """Return the plan of this name; "" is the newest.

    Raises:
        UsageError: there is none.
    """
    plans = saved_plans()
    if not plans:
        raise UsageError("No tuning plan found.", "Create one: cpuchat system plan")
    for saved in reversed(plans):
        if name in ("", saved.name):
            return saved
    raise UsageError(f"Unknown tuning plan: {name}.", "List the plans: cpuchat system list")
