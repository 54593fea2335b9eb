"""The settings that a plan can change: where each is, what is good for decoding, what speaks against it here.

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
"""Idle states that take longer to leave are the deep ones: C1 takes 1 or 2, C1E 10, C2 of an EPYC 18 to 800, C6 more
than 100."""

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
        """Its files that are really there."""
        return [path for path in self.files(topology, root) if below(root, path).is_file()]

    def changes(self, topology: Topology, root: Path) -> tuple[list[Change], list[str]]:
        """What to write, and notes about files that are left alone."""
        changes: list[Change] = []
        odd: dict[str, list[str]] = {}
        for path in self.present(topology, root):
            text = read_text(below(root, path))
            old, new = chosen(text), self.propose(root, path, text)
            if not old or "\n" in text:
                odd.setdefault("cannot be read", []).append(path)
            elif new is None:
                odd.setdefault("does not offer what would be good", []).append(path)
            elif new != old:
                changes.append(Change(knob=self.name, path=path, old=old, new=new))
        notes = [
            f"{self.name}: left alone, {paths[0]} {why}" + (f" (and {len(paths) - 1} more)" if len(paths) > 1 else "")
            for why, paths in odd.items()
        ]
        return changes, notes or ([] if changes else [f"{self.name}: already as it should be"])

    def state(self, topology: Topology, root: Path) -> str:
        """What it is set to now, in words; "" where it does not exist."""
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
    """The `disable` files of the deep idle states."""
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
    """`value`, where the file's own list has it."""
    return lambda root, path, text: value if value in text.replace("[", "").replace("]", "").split() else None


def _listed_in(name: str) -> Proposal:
    """ "performance", where the file `name` beside lists it."""

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
    return {"0": "deep states in use", "1": "deep states off"}.get(value, value)


# In the order of the script. The preference comes before the governor: under the performance governor the kernel
# refuses to change it, so the way there and, reversed, the way back both work.
KNOBS: tuple[Knob, ...] = (
    Knob(
        name="epp",
        about="energy preference: how eagerly cores raise their frequency",
        verdict=LOW_RISK,
        files=_per_cpu("energy_performance_preference"),
        propose=_listed_in("energy_performance_available_preferences"),
        hint="Only the drivers amd_pstate=active and intel_pstate have one.",
    ),
    Knob(
        name="governor",
        about="frequency governor: performance keeps cores at the top",
        verdict=LOW_RISK,
        files=_per_cpu("scaling_governor"),
        propose=_listed_in("scaling_available_governors"),
        hint="No frequency driver is loaded: look for CPPC or P-states in the firmware's setup.",
    ),
    Knob(
        name="boost",
        about="frequencies above the base clock",
        verdict=LOW_RISK,
        files=_fixed(f"{CPUS}/cpufreq/boost", f"{CPUS}/intel_pstate/no_turbo"),
        propose=_boost,
        words=_boost_words,
        hint="The frequency driver does not offer it: look in the firmware's setup.",
    ),
    Knob(
        name="thp",
        about="huge pages for weights that are copied (repacked, or load-mode read); mapped files get none",
        verdict=LOW_RISK,
        files=_fixed(f"{THP}/enabled"),
        propose=_offered("always"),
        of_kernel=True,
    ),
    Knob(
        name="numa-balancing",
        about="the kernel moves pages between nodes and interrupts the threads that read them",
        verdict=LOW_RISK,
        files=_fixed(BALANCING),
        propose=_value("0"),
        words=_balancing_words,
        of_kernel=True,
    ),
    Knob(
        name="thp-defrag",
        about="make room for huge pages in the background",
        verdict=EXPERIMENTAL,
        files=_fixed(f"{THP}/defrag"),
        propose=_offered("defer+madvise"),
        of_kernel=True,
    ),
    Knob(
        name="cstates",
        about=f"no idle states that take over {DEEP_MICROSECONDS} µs to leave; costs power all the time",
        verdict=EXPERIMENTAL,
        files=_idle_states,
        propose=_value("1"),
        words=_disabled_words,
    ),
)


def refusal_of(name: str, topology: Topology, root: Path, *, of_kernel: bool = False) -> KnobRefusal | None:
    """What speaks against changing the machine from here, whatever the setting; None when nothing does."""
    if place := container(root):
        why = f"this is a container ({place}), and its kernel serves others too"
        return KnobRefusal(knob=name, why=why, how="Run cpuchat on the host.")
    if limit := limited(topology):
        return KnobRefusal(knob=name, why=limit, how="Run cpuchat without that limit, or ask who runs the machine.")
    if topology.virtual and not of_kernel:
        why = f"this is a virtual machine ({topology.virtual})"
        return KnobRefusal(knob=name, why=why, how="It is for the host to decide.")
    return None


def knob_refusal(knob: Knob, topology: Topology, root: Path) -> KnobRefusal | None:
    """Why `knob` is not offered on this machine; None when it is."""
    if refused := refusal_of(knob.name, topology, root, of_kernel=knob.of_kernel):
        return refused
    if not knob.present(topology, root):
        missing = next(iter(knob.files(topology, root)), "")
        why = f"{missing} does not exist" if missing else "there are no such files"
        return KnobRefusal(knob=knob.name, why=why, how=knob.hint)
    if knob.name == "numa-balancing" and len(topology.nodes) < 2:
        return KnobRefusal(knob=knob.name, why="there is one NUMA node, so nothing is moved")
    return None


def limited(topology: Topology) -> str:
    """How this process is kept from the whole machine; "" when it is not."""
    if topology.quota is not None:
        return f"the control group grants the time of {topology.quota:g} CPUs"
    if len(topology.allowed) < len(topology.online):
        allowed, online = format_cpu_list(topology.allowed), format_cpu_list(topology.online)
        return f"this process may use the CPUs {allowed} of {online} only"
    if topology.memory_limit is not None:
        return f"the control group limits memory to {topology.memory_limit / 1e9:.1f} GB"
    return ""


def container(root: Path) -> str:
    """What tells that this is a container; "" when nothing does."""
    for name in (".dockerenv", "run/.containerenv", "run/systemd/container", "var/run/secrets/kubernetes.io"):
        if (root / name).exists():
            return f"/{name}"
    match = re.search(r"docker|kubepods|containerd|libpod|lxc", read_text(root / "proc/self/cgroup"))
    return f"/proc/self/cgroup says {match[0]}" if match else ""
