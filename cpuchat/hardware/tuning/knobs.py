"""The settings that a plan can change: their files, the recommended value, and when they are unavailable.

Files: Documentation/admin-guide/pm/{cpufreq,intel_pstate,amd-pstate}.rst, admin-guide/mm/transhuge.rst,
admin-guide/sysctl/kernel.rst.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.sysfs import read_text
from cpuchat.hardware.topology import Topology
from cpuchat.hardware.tuning.changes import Change, KnobRefusal, below, chosen, value_of

CPUS = "/sys/devices/system/cpu"
THP = "/sys/kernel/mm/transparent_hugepage"
BALANCING = "/proc/sys/kernel/numa_balancing"


def _boost_words(path: str, value: str) -> str:
    on = "0" if path.endswith("no_turbo") else "1"
    return "on" if value == on else "off" if value in ("0", "1") else value


def _balancing_words(path: str, value: str) -> str:
    return {"0": "off", "1": "on", "2": "on (memory tiers)"}.get(value, value)


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting.

    `about`: what it does. `files`: its absolute paths, `{cpu}` in them for each CPU, and the value of each that is good
    for decoding. `offered_in`: the neighboring file that lists the possible values, "" where any is accepted.
    `words(path, value)` says a value for people. `of_kernel`: a setting of the kernel alone, which a virtual machine
    has for itself. `hint`: where else to look when the files are missing.
    """

    name: str
    about: str
    files: dict[str, str]
    offered_in: str = ""
    words: Callable[[str, str], str] = lambda path, value: value
    of_kernel: bool = False
    hint: str = ""

    def all_files(self, topology: Topology) -> dict[str, str]:
        """Return the paths of this machine, and the recommended values."""
        return {path.format(cpu=cpu): value for path, value in self.files.items() for cpu in topology.online}

    def present(self, topology: Topology, root: Path) -> dict[str, str]:
        """Return the files that exist, and their recommended values."""
        return {path: new for path, new in self.all_files(topology).items() if below(root, path).is_file()}

    def changes(self, topology: Topology, root: Path) -> tuple[list[Change], list[str]]:
        """Return what to write, and notes about files that are left unchanged."""
        changes: list[Change] = []
        odd: dict[str, list[str]] = {}
        for path, new in self.present(topology, root).items():
            text = read_text(below(root, path))
            old = chosen(text)
            offered = read_text(below(root, path).with_name(self.offered_in)) if self.offered_in else new
            if not old or "\n" in text:
                odd.setdefault("is unreadable", []).append(path)
            elif new not in (old, *re.split(r"[\s\[\]]+", offered)):
                odd.setdefault("does not offer the recommended value", []).append(path)
            elif new != old:
                changes.append(Change(knob=self.name, path=path, old=old, new=new))
        notes = [
            f"{self.name}: unchanged, {paths[0]} {why}" + (f" (and {len(paths) - 1} more)" if len(paths) > 1 else "")
            for why, paths in odd.items()
        ]
        return changes, notes or ([] if changes else [f"{self.name}: already set"])

    def state(self, topology: Topology, root: Path) -> str:
        """Return the current value in words; "" where it does not exist."""
        paths = self.present(topology, root)
        values = Counter(self.words(path, value_of(root, path)) or "?" for path in paths)
        if len(values) == 1:
            return next(iter(values))
        return ", ".join(f"{value} ({n} of {len(paths)})" for value, n in values.most_common())


# In the order of the script. The preference comes before the governor: under the performance governor the kernel
# refuses to change it, so the way there and, reversed, the way back both work.
KNOBS: tuple[Knob, ...] = (
    Knob(
        name="epp",
        about="energy performance preference: how fast cores raise their frequency",
        files={f"{CPUS}/cpu{{cpu}}/cpufreq/energy_performance_preference": "performance"},
        offered_in="energy_performance_available_preferences",
        hint="Only the drivers amd_pstate=active and intel_pstate provide it.",
    ),
    Knob(
        name="governor",
        about="frequency governor: performance keeps the highest frequency",
        files={f"{CPUS}/cpu{{cpu}}/cpufreq/scaling_governor": "performance"},
        offered_in="scaling_available_governors",
        hint="No frequency driver is loaded: enable CPPC or P-states in the firmware setup.",
    ),
    Knob(
        name="boost",
        about="frequencies above the base clock (turbo)",
        files={f"{CPUS}/cpufreq/boost": "1", f"{CPUS}/intel_pstate/no_turbo": "0"},
        words=_boost_words,
        hint="The frequency driver does not provide it: check the firmware setup.",
    ),
    Knob(
        name="thp",
        about="transparent huge pages for copied weights (repacked, or load-mode read); mapped files get none",
        files={f"{THP}/enabled": "always"},
        offered_in="enabled",
        of_kernel=True,
    ),
    Knob(
        name="numa-balancing",
        about="automatic page migration between nodes, which interrupts the threads that read them",
        files={BALANCING: "0"},
        words=_balancing_words,
        of_kernel=True,
    ),
)


def refusal_of(name: str, topology: Topology, root: Path, *, of_kernel: bool = False) -> KnobRefusal | None:
    """Return why no setting can be changed from here; None when it can."""
    if place := container(root):
        why = f"this is a container ({place}) that shares the host's kernel"
        return KnobRefusal(knob=name, why=why, how="Run cpuchat on the host.")
    if limit := limited(topology):
        return KnobRefusal(knob=name, why=limit, how="Run cpuchat without that limit, or ask the administrator.")
    if topology.virtual and not of_kernel:
        why = f"virtual machine ({topology.virtual})"
        return KnobRefusal(knob=name, why=why, how="Change it on the host.")
    return None


def knob_refusal(knob: Knob, topology: Topology, root: Path) -> KnobRefusal | None:
    """Return why `knob` is unavailable on this machine; None when it is available."""
    if refused := refusal_of(knob.name, topology, root, of_kernel=knob.of_kernel):
        return refused
    if not knob.present(topology, root):
        missing = next(iter(knob.all_files(topology)), "its file")
        return KnobRefusal(knob=knob.name, why=f"{missing} does not exist", how=knob.hint)
    if knob.name == "numa-balancing" and len(topology.nodes) < 2:
        return KnobRefusal(knob=knob.name, why="there is only one NUMA node")
    return None


def limited(topology: Topology) -> str:
    """Return what limits this process to a part of the machine; "" when nothing does."""
    if topology.quota is not None:
        return f"cgroup CPU quota: {topology.quota:g}"
    if len(topology.allowed) < len(topology.online):
        allowed, online = format_cpu_list(topology.allowed), format_cpu_list(topology.online)
        return f"this process is limited to CPUs {allowed} of {online}"
    if topology.memory_limit is not None:
        return f"cgroup memory limit: {topology.memory_limit / 1e9:.1f} GB"
    return ""


def container(root: Path) -> str:
    """Return the evidence that this is a container; "" without any."""
    for name in (".dockerenv", "run/.containerenv", "run/systemd/container", "var/run/secrets/kubernetes.io"):
        if (root / name).exists():
            return f"/{name}"
    match = re.search(r"docker|kubepods|containerd|libpod|lxc", read_text(root / "proc/self/cgroup"))
    return f"{match[0]} in /proc/self/cgroup" if match else ""
