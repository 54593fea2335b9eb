"""Tuning plans: the changes of some knobs, the scripts that apply and revert them, and what of them is in effect.

Both scripts are for `sudo sh`, need nothing but a POSIX shell, and may run twice. The one that applies looks at every
file before it changes one: if a value has changed since the plan was made, it stops and changes nothing. The one that
reverts writes the old values wherever something else stands, says so where that is not what the plan had set, and goes
on after a failure. A plan has a folder of its own, in which the script that reverts is saved first.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cpuchat.base import paths
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.base.files import read_json, write_atomically
from cpuchat.hardware.sysfs import read_text
from cpuchat.hardware.topology import Topology
from cpuchat.hardware.tuning import resctrl
from cpuchat.hardware.tuning.knobs import KNOBS, Change, KnobRefusal, below, knob_refusal, value_of
from cpuchat.hardware.tuning.resctrl import MOUNT, OWN_FOLDERS, CacheGroup

NAMES = (*(knob.name for knob in KNOBS), resctrl.NAME)
LOW_RISK, EXPERIMENTAL = "low risk, small gain", "experimental, gain about 0"

_VALUE = """\
# Prints the value in FILE; of "always [madvise] never", the selected word.
value() {
    text=$(cat "$1") || return 1
    case "$text" in *"["*"]"*) text=${text#*"["}; text=${text%%"]"*} ;; esac
    printf '%s' "$text"
}

say() { printf '%s\\n' "cpuchat: $1" >&2; }
"""

_APPLY = """\
changed=0
ending() {
    status=$?
    [ "$status" -ne 0 ] || return 0
    if [ "$changed" = 0 ]; then say "nothing was changed."; else say "stopped midway. To revert: $BACK"; fi
}
trap ending EXIT
trap 'exit 130' INT TERM HUP

fail() { say "$1"; exit 1; }

# FILE OLD NEW
check() {
    [ -f "$1" ] || fail "$1 no longer exists: make a new plan."
    now=$(value "$1")
    [ "$now" = "$2" ] || [ "$now" = "$3" ] || fail "$1 is now '$now', not '$2': make a new plan."
}

put() {
    [ "$(value "$1")" != "$3" ] || return 0
    changed=1
    printf '%s\\n' "$3" > "$1"
    [ "$(value "$1")" = "$3" ] || fail "$1 rejected '$3'."
}
"""

_REVERT = """\
failed=0
trap 'say "stopped midway: run it again."; exit 130' INT TERM HUP

# FILE OLD NEW
back() {
    if [ ! -f "$1" ]; then say "$1 no longer exists."; failed=1; return 0; fi
    now=$(value "$1") || now=
    [ "$now" != "$2" ] || return 0
    [ "$now" = "$3" ] || say "$1 was '$now', which the plan had not set; writing '$2' anyway."
    printf '%s\\n' "$2" > "$1" || true
    if [ "$(value "$1")" != "$2" ]; then say "$1 rejected '$2'."; failed=1; fi
}
"""


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


class KnobState(msgspec.Struct, frozen=True):
    """One setting now. `value` "" means that it does not exist or cannot be read; `refusal` None that a plan can
    change it; `verdict` is the effect to expect."""

    name: str
    value: str
    verdict: str
    about: str
    refusal: KnobRefusal | None = None


def knob_states(topology: Topology, root: Path) -> tuple[KnobState, ...]:
    """Return all knobs. Reads, and changes nothing."""
    states = [
        KnobState(knob.name, knob.state(topology, root), LOW_RISK, knob.about, knob_refusal(knob, topology, root))
        for knob in KNOBS
    ]
    # Whether a cache can be partitioned does not depend on the cores: take some of a target beside a draft model.
    planned = resctrl.plan_group(topology, root, [one.cpus[0] for one in topology.l3_groups if len(one.cpus) > 1])
    refusal = planned if isinstance(planned, KnobRefusal) else None
    states.append(KnobState(resctrl.NAME, resctrl.state(root), EXPERIMENTAL, resctrl.ABOUT, refusal))
    return tuple(states)


def make_plan(
    topology: Topology, root: Path, wanted: Sequence[str] = (), target_cpus: Sequence[int] = ()
) -> TuningPlan:
    """Plan the changes that set the `wanted` knobs to their recommended values. Only reads.

    Args:
        wanted: some of `NAMES`; () takes those of `KNOBS`, all of low risk.
        target_cpus: CPUs of the target while the draft model has cores of its own; only "l3" asks.

    Raises:
        UsageError: a name that is no knob.
    """
    for name in wanted:
        if name not in NAMES:
            raise UsageError(f"Unknown knob: {name}.", f"Known knobs: {', '.join(NAMES)}.")
    names = set(wanted) or {knob.name for knob in KNOBS}
    # The performance governor sets the preference too, and not every driver puts it back by itself.
    with_it = {"epp"} if "governor" in names else set()
    changes: list[Change] = []
    refusals: list[KnobRefusal] = []
    notes: list[str] = []
    for knob in KNOBS:
        if knob.name not in names | with_it:
            continue
        if refused := knob_refusal(knob, topology, root):
            refusals += [refused] if knob.name in names else []
        else:
            new, said = knob.changes(topology, root)
            changes += new
            notes += said if knob.name in names else []
    group: CacheGroup | None = None
    if resctrl.NAME in names:
        planned = resctrl.plan_group(topology, root, target_cpus)
        if isinstance(planned, CacheGroup):
            group = planned
            notes.append(resctrl.DRAFTING_ONLY)
        else:
            refusals.append(planned)
    return TuningPlan(changes=tuple(changes), group=group, refusals=tuple(refusals), notes=tuple(notes))


def effect(plan: TuningPlan, root: Path) -> dict[str, tuple[int, int]]:
    """Return for each knob of the plan how many of its changes are in effect, and how many there are."""
    counts: dict[str, tuple[int, int]] = {}
    for change in plan.changes:
        now, of = counts.get(change.knob, (0, 0))
        counts[change.knob] = (now + (value_of(root, change.path) == change.new), of + 1)
    if plan.group is not None:
        masks = resctrl.l3_masks(read_text(below(root, plan.group.path) / "schemata"))
        counts[resctrl.NAME] = (int(masks == resctrl.l3_masks(plan.group.schemata)), 1)
    return counts


def apply_script(plan: TuningPlan, root: Path, name: str, revert: Path) -> str:
    """Return the script that applies `plan` below `root`; `revert` is where the other one lies."""
    sudo = "sudo " if root == Path("/") else ""
    back = shlex.quote(f"{sudo}sh {shlex.quote(str(revert))}")
    parts = [
        f"#!/bin/sh\n# cpuchat: apply the tuning plan {name} ({', '.join(plan.knobs)}).\n"
        "# Nothing survives a reboot. revert.sh beside it reverts everything.\n"
        f"set -eu\nBACK={back}\n",
        _root_check(root),
        _VALUE,
        _APPLY,
        _listing(plan.changes, root),
    ]
    parts.append("settings check\n" + (_others_check(root) if plan.group else "") + "settings put\n")
    if plan.group is not None:
        parts.append(_make_group(plan.group, root))
    parts.append('say "applied. To revert: $BACK"\n')
    return "\n".join(part for part in parts if part)


def revert_script(plan: TuningPlan, root: Path, name: str) -> str:
    """Return the script that restores the values from when the plan was made."""
    parts = [
        f"#!/bin/sh\n# cpuchat: revert the tuning plan {name}.\nset -eu\n",
        _root_check(root),
        _VALUE,
        _REVERT,
        _listing(plan.changes[::-1], root),
    ]
    if plan.group is not None:
        group = shlex.quote(str(below(root, plan.group.path)))
        failing = '{ say "the control group could not be removed."; failed=1; }'
        parts.append(
            f"# Its CPUs and tasks go back to the default group.\n[ ! -d {group} ] || rmdir {group} || {failing}\n"
        )
    parts.append('settings back\n[ "$failed" = 0 ] || exit 1\nsay "all settings are reverted."\n')
    return "\n".join(part for part in parts if part)


def _root_check(root: Path) -> str:
    if root != Path("/"):
        return ""
    return '[ "$(id -u)" -eq 0 ] || { printf \'%s\\n\' "cpuchat: run this with sudo sh" >&2; exit 1; }\n'


def _listing(changes: Sequence[Change], root: Path) -> str:
    """Write the shell function `settings DO`: DO with FILE OLD NEW for each change; CPUs with the same share a line."""
    lines: list[str] = []
    for (before, after, old, new), numbers in _alike(changes, root).items():
        values = f"{shlex.quote(old)} {shlex.quote(new)}"
        if numbers == [""]:
            lines.append(f'    "$1" {shlex.quote(before)} {values}')
        else:
            file = f'{shlex.quote(before)}"$n"{shlex.quote(after)}'
            lines.append(f'    for n in {" ".join(numbers)}; do "$1" {file} {values}; done')
    return "settings() {\n" + "\n".join(lines or ["    :"]) + "\n}\n"


def _alike(changes: Sequence[Change], root: Path) -> dict[tuple[str, str, str, str], list[str]]:
    """Group the changes by path before and after the CPU number, old and new value; to the CPU numbers ([""]: none)."""
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for change in changes:
        path = str(below(root, change.path))
        match = re.fullmatch(r"(.*/devices/system/cpu/cpu)([0-9]+)(/.*)", path)
        before, number, after = match.groups() if match else (path, "", "")
        alike.setdefault((before, after, change.old, change.new), []).append(number)
    return alike


def _others_check(root: Path) -> str:
    """Write the check that no control group was created since."""
    mount = below(root, MOUNT)
    own = "|".join(f"*/{name}/" for name in OWN_FOLDERS)
    return (
        f"[ -f {shlex.quote(str(mount))}/schemata ] || fail 'resctrl is no longer mounted: make a new plan.'\n"
        f"for folder in {shlex.quote(str(mount))}/*/; do\n"
        f'    case "$folder" in {own}) ;; *) fail "$folder partitions the L3 now: make a new plan." ;; esac\n'
        "done\n"
    )


def _make_group(group: CacheGroup, root: Path) -> str:
    folder = shlex.quote(str(below(root, group.path)))
    status = shlex.quote(str(below(root, MOUNT) / "info/last_cmd_status"))
    return (
        f"[ -d {folder} ] || {{ changed=1; mkdir {folder}; }}\n"
        f'refused() {{ fail "resctrl: $(cat {status})"; }}\n'
        f"printf '%s\\n' {shlex.quote(group.schemata)} > {folder}/schemata || refused\n"
        f"printf '%s\\n' {shlex.quote(group.cpus)} > {folder}/cpus_list || refused\n"
        f'[ "$(cat {status})" = ok ] || refused\n'
    )


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


def save_plan(plan: TuningPlan, root: Path) -> SavedPlan:
    """Write both scripts, the reverting one first. Raises CpuchatError: nothing was written that could be applied."""
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
            found.append(SavedPlan(file.parent, read_json(file, msgspec.json.Decoder(prepared(TuningPlan)).decode)))
    return found


def find_plan(name: str = "") -> SavedPlan:
    """Return the plan of this name; "" is the newest. Raises UsageError: there is none."""
    plans = saved_plans()
    if not plans:
        raise UsageError("No tuning plan found.", "Create one: cpuchat system plan")
    for saved in reversed(plans):
        if name in ("", saved.name):
            return saved
    raise UsageError(f"Unknown tuning plan: {name}.", "List the plans: cpuchat system list")
