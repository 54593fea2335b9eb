"""The settings that a plan can change: their files, the recommended value, and when they are unavailable.

Files: Documentation/admin-guide/pm/{cpufreq,intel_pstate,amd-pstate,cpuidle}.rst, admin-guide/mm/transhuge.rst,
admin-guide/sysctl/kernel.rst.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cpuchat.hardware.cgroups import read_number, read_text
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.topology import Topology
from cpuchat.hardware.tuning.changes import (
    EXPERIMENTAL,
    LOW_RISK,
    Change,
    KnobRefusal,
    Verdict,
    below,
    chosen,
    value_of,
)

CPUS = "/sys/devices/system/cpu"
THP = "/sys/kernel/mm/transparent_hugepage"
BALANCING = "/proc/sys/kernel/numa_balancing"

DEEP_MICROSECONDS = 10
"""Exit latency in µs from which an idle state counts as deep: C1 takes 1 or 2, C1E 10, C2 of an EPYC 18 to 800, C6 more
than 100.
"""

Files = Callable[[Topology, Path], Iterable[str]]
Proposal = Callable[[Path, str, str], str | None]
Words = Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting.

    `about`: what it does. `files(topology, root)` lists its absolute paths; `propose(root, path, text)` is the value
    that is good for decoding, None to leave it; `words(path, value)` says a value for people. `of_kernel`: a setting
    of the kernel alone, which a virtual machine has for itself. `hint`: where else to look when the files are missing.
    """

    name: str
    about: str
    verdict: Verdict
    files: Files
    propose: Proposal
    words: Words = lambda path, value: value
    of_kernel: bool = False
    hint: str = ""

    def present(self, topology: Topology, root: Path) -> list[str]:
        """Return the files of the knob that exist."""
        return [path for path in self.files(topology, root) if below(root, path).is_file()]

    def changes(self, topology: Topology, root: Path) -> tuple[list[Change], list[str]]:
        """Return what to write, and notes about files that are left unchanged."""
        changes: list[Change] = []
        odd: dict[str, list[str]] = {}
        for path in self.present(topology, root):
            text = read_text(below(root, path))
            old, new = chosen(text), self.propose(root, path, text)
            if not old or "\n" in text:
                odd.setdefault("is unreadable", []).append(path)
            elif new is None:
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


def _per_cpu(name: str) -> Files:
    return lambda topology, root: (f"{CPUS}/cpu{cpu}/cpufreq/{name}" for cpu in topology.online)


def _fixed(*paths: str) -> Files:
    return lambda topology, root: paths


def _idle_states(topology: Topology, root: Path) -> Iterable[str]:
    """Yield the `disable` files of the deep idle states."""
    for cpu in topology.online:
        folder = below(root, f"{CPUS}/cpu{cpu}/cpuidle")
        for name in sorted(_states(folder), key=lambda name: int(name.removeprefix("state"))):
            if (read_number(folder / name / "latency") or 0) > DEEP_MICROSECONDS:
                yield f"{CPUS}/cpu{cpu}/cpuidle/{name}/disable"


def _states(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if re.fullmatch(r"state[0-9]{1,3}", path.name)]
    except OSError:
        return []


def _value(value: str) -> Proposal:
    return lambda root, path, text: value


def _offered(value: str) -> Proposal:
    """Propose `value` if the file's own list has it."""
    return lambda root, path, text: value if value in text.replace("[", "").replace("]", "").split() else None


def _listed_in(name: str) -> Proposal:
    """Propose "performance" if the neighboring file `name` lists it."""

    def propose(root: Path, path: str, text: str) -> str | None:
        words = read_text(below(root, path).with_name(name)).split()
        return "performance" if "performance" in (*words, text) else None

    return propose


def _boost(root: Path, path: str, text: str) -> str:
    return "0" if path.endswith("no_turbo") else "1"


def _boost_words(path: str, value: str) -> str:
    on = "0" if path.endswith("no_turbo") else "1"
    return "on" if value == on else "off" if value in ("0", "1") else value


def _balancing_words(path: str, value: str) -> str:
    return {"0": "off", "1": "on", "2": "on (memory tiers)"}.get(value, value)


def _disabled_words(path: str, value: str) -> str:
    return {"0": "deep states enabled", "1": "deep states disabled"}.get(value, value)


# In the order of the script. The preference comes before the governor: under the performance governor the kernel
# refuses to change it, so the way there and, reversed, the way back both work.
KNOBS: tuple[Knob, ...] = (
    Knob(
        name="epp",
        about="energy performance preference: how fast cores raise their frequency",
        verdict=LOW_RISK,
        files=_per_cpu("energy_performance_preference"),
        propose=_listed_in("energy_performance_available_preferences"),
        hint="Only the drivers amd_pstate=active and intel_pstate provide it.",
    ),
    Knob(
        name="governor",
        about="frequency governor: performance keeps the highest frequency",
        verdict=LOW_RISK,
        files=_per_cpu("scaling_governor"),
        propose=_listed_in("scaling_available_governors"),
        hint="No frequency driver is loaded: enable CPPC or P-states in the firmware setup.",
    ),
    Knob(
        name="boost",
        about="frequencies above the base clock (turbo)",
        verdict=LOW_RISK,
        files=_fixed(f"{CPUS}/cpufreq/boost", f"{CPUS}/intel_pstate/no_turbo"),
        propose=_boost,
        words=_boost_words,
        hint="The frequency driver does not provide it: check the firmware setup.",
    ),
    Knob(
        name="thp",
        about="transparent huge pages for copied weights (repacked, or load-mode read); mapped files get none",
        verdict=LOW_RISK,
        files=_fixed(f"{THP}/enabled"),
        propose=_offered("always"),
        of_kernel=True,
    ),
    Knob(
        name="numa-balancing",
        about="automatic page migration between nodes, which interrupts the threads that read them",
        verdict=LOW_RISK,
        files=_fixed(BALANCING),
        propose=_value("0"),
        words=_balancing_words,
        of_kernel=True,
    ),
    Knob(
        name="thp-defrag",
        about="memory compaction for huge pages in the background",
        verdict=EXPERIMENTAL,
        files=_fixed(f"{THP}/defrag"),
        propose=_offered("defer+madvise"),
        of_kernel=True,
    ),
    Knob(
        name="cstates",
        about=f"no idle states with an exit latency above {DEEP_MICROSECONDS} µs; costs power permanently",
        verdict=EXPERIMENTAL,
        files=_idle_states,
        propose=_value("1"),
        words=_disabled_words,
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
        missing = next(iter(knob.files(topology, root)), "")
        why = f"{missing} does not exist" if missing else "no such files"
        return KnobRefusal(knob=knob.name, why=why, how=knob.hint)
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
