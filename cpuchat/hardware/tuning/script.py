"""The shell scripts of a plan: one that applies it, one that reverts it.

Both are for `sudo sh`, need nothing but a POSIX shell, and may run twice. The first looks at every file before it
changes one: if a value has changed since the plan was made, it stops and changes nothing. The second
writes the old values wherever something else stands, says so where that is not what the plan had set, and goes on
after a failure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from cpuchat.hardware.tuning.changes import CacheGroup, Change, TuningPlan, below
from cpuchat.hardware.tuning.resctrl import MOUNT, OWN_FOLDERS

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
    """Write the function `settings DO`, which calls DO with FILE OLD NEW for every change; CPUs with the same change
    share a line.
    """
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
    """Group the changes: path before and after the CPU number, old and new value, to the CPU numbers ([""]: not per
    CPU).
    """
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
