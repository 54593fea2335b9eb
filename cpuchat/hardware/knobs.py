"""The settings that only root can change: how they stand, the shell lines that change them and take them back, and what
they are worth, with the source.

Reads, and changes nothing; no setting survives a reboot. Files: Documentation/admin-guide/pm/{cpufreq,intel_pstate,
amd-pstate}.rst, admin-guide/mm/transhuge.rst, admin-guide/sysctl/kernel.rst.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.sysfs import read_text
from cpuchat.hardware.topology import Topology

CPUS = "/sys/devices/system/cpu"
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"
BALANCING = "/proc/sys/kernel/numa_balancing"
_DYNAMIC = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose "powersave" governor scales with the load in place of the lowest frequency (pm/intel_pstate.rst)."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting. `state` is "" where it does not exist; `change` the shell line that sets what is good for inference,
    `back` the one that restores the present state, both "" where there is nothing to do. `worth`: what it brings, as
    `source` says. `level`: how much its state matters ("": it does not, or is not known). `why_not`: why it cannot be
    changed from here."""

    name: str
    state: str
    worth: str
    source: str
    change: str = ""
    back: str = ""
    level: Literal["", "ok", "advice", "warning"] = ""
    why_not: str = ""


def read_knobs(topology: Topology, root: Path) -> tuple[Knob, ...]:
    hardware, kernel = fixed(topology, root), fixed(topology, root, of_kernel=True)
    found = [(knob, hardware) for knob in (_governor(topology, root), _boost(root))]
    found += [(knob, kernel) for knob in (_huge_pages(root), _balancing(topology, root))]
    return tuple(_refused(knob, why) if why else knob for knob, why in found)


def value_of(root: Path, path: str) -> str:
    """Return what the file at the absolute `path` has; of a choice, `always [madvise] never`, the selected word."""
    text = read_text(root / path.lstrip("/"))
    chosen = re.search(r"\[([^\]]*)\]", text)
    return chosen[1] if chosen is not None else text


def huge_pages(root: Path) -> str:
    """Return the kernel's setting for transparent huge pages; "" where unknown."""
    return value_of(root, _THP)


def fixed(topology: Topology, root: Path, *, of_kernel: bool = False) -> str:
    """Return why no setting can be changed from here; "" when it can. `of_kernel`: a setting of the kernel alone, which
    a virtual machine has for itself."""
    if place := container(root):
        return f"this is a container ({place}) that shares the host's kernel"
    if topology.quota is not None:
        return f"cgroup CPU quota: {topology.quota:g}"
    if len(topology.allowed) < len(topology.online):
        allowed, online = format_cpu_list(topology.allowed), format_cpu_list(topology.online)
        return f"this process is limited to CPUs {allowed} of {online}"
    if topology.memory_limit is not None:
        return f"cgroup memory limit: {topology.memory_limit / 1e9:.1f} GB"
    return f"virtual machine ({topology.virtual})" if topology.virtual and not of_kernel else ""


def container(root: Path) -> str:
    """Return the evidence that this is a container; "" without any."""
    for name in (".dockerenv", "run/.containerenv", "run/systemd/container", "var/run/secrets/kubernetes.io"):
        if (root / name).exists():
            return f"/{name}"
    match = re.search(r"docker|kubepods|containerd|libpod|lxc", read_text(root / "proc/self/cgroup"))
    return f"{match[0]} in /proc/self/cgroup" if match else ""


def _per_cpu(topology: Topology, root: Path, file: str) -> dict[int, str]:
    """Return the values of `cpufreq/file` by CPU, of those that have one in a single line."""
    values = {cpu: value_of(root, f"{CPUS}/cpu{cpu}/cpufreq/{file}") for cpu in topology.online}
    return {cpu: value for cpu, value in values.items() if value and "\n" not in value}


def _write(value: str, path: str) -> str:
    return f"echo {shlex.quote(value)} | sudo tee {path}"


def _write_per_cpu(values: Mapping[int, str], file: str) -> str:
    """Return the line that writes each CPU's value to `cpufreq/file`, by one `tee` for each distinct value."""
    parts: list[str] = []
    for value in dict.fromkeys(values.values()):
        cpus = [str(cpu) for cpu in values if values[cpu] == value]
        which = "[0-9]*" if len(cpus) == len(values) else f"{{{','.join(cpus)}}}" if len(cpus) > 1 else cpus[0]
        parts.append(f"{_write(value, f'{CPUS}/cpu{which}/cpufreq/{file}')} > /dev/null")
    return " && ".join(parts)


def _governor(topology: Topology, root: Path) -> Knob:
    """The performance governor sets the energy preference too, and not every driver puts that back by itself: the way
    back writes it after the governor, under which the kernel would refuse it."""
    values = _per_cpu(topology, root, "scaling_governor")
    counts_of = Counter(values.values())
    counts = counts_of.most_common()
    state = counts[0][0] if len(counts) == 1 else ", ".join(f"{name} ({n} of {len(values)})" for name, n in counts)
    worth = "Small: a loaded core reaches its highest frequency; large where acpi-cpufreq holds powersave"
    knob = Knob("governor", state, worth, "the kernel's pm/cpufreq.rst; not measured with models")
    if not values:
        return _refused(knob, "no frequency driver: enable CPPC or P-states in the firmware setup")
    offered = _per_cpu(topology, root, "scaling_available_governors").values()
    if any("performance" not in names.split() for names in offered):
        return _refused(knob, "the driver does not offer performance")
    if state == "performance":
        return replace(knob, level="ok")
    driver = value_of(root, f"{CPUS}/cpu{next(iter(values))}/cpufreq/scaling_driver")
    knob = replace(knob, level="warning" if "powersave" in counts_of and driver not in _DYNAMIC else "advice")
    preferences = _per_cpu(topology, root, "energy_performance_preference")
    back = _write_per_cpu(values, "scaling_governor")
    if preferences:
        back += f" && {_write_per_cpu(preferences, 'energy_performance_preference')}"
    return replace(knob, change=_write_per_cpu(dict.fromkeys(values, "performance"), "scaling_governor"), back=back)


def _boost(root: Path) -> Knob:
    worth = "Prefill, which arithmetic limits, grows with the frequency; decoding waits for memory"
    for path, on in ((f"{CPUS}/cpufreq/boost", "1"), (f"{CPUS}/intel_pstate/no_turbo", "0")):
        if (value := value_of(root, path)) in ("0", "1"):
            if value == on:
                return Knob("boost", "on", worth, "not measured", level="ok")
            return Knob("boost", "off", worth, "not measured", _write(on, path), _write(value, path), "advice")
    why = "the frequency driver does not provide it: check the firmware setup"
    return Knob("boost", "", worth, "not measured", why_not=why)


def _huge_pages(root: Path) -> Knob:
    """Mapped weights get none; copied ones (repacked, or load-mode read) do."""
    worth = "0 to 12 % of decoding, for copied weights (repacked, or load-mode read) only"
    knob = Knob("huge pages", huge_pages(root), worth, "ik_llama.cpp #278: +12 %; llama.cpp #22022: neutral")
    if knob.state not in ("always", "madvise", "never"):
        return _refused(knob, "the kernel has no transparent huge pages")
    if knob.state == "always":
        return replace(knob, level="ok")
    level = "advice" if knob.state == "never" else "ok"
    return replace(knob, change=_write("always", _THP), back=_write(knob.state, _THP), level=level)


def _balancing(topology: Topology, root: Path) -> Knob:
    value = value_of(root, BALANCING)
    state = {"0": "off", "1": "on", "2": "on (memory tiers)"}.get(value, "")
    worth = "Fewer page faults and migrations while several nodes are read"
    knob = Knob("NUMA balancing", state, worth, "llama.cpp #1556 warns of it, without a figure")
    if len(topology.nodes) < 2 or not state:
        return _refused(knob, "there is only one NUMA node" if state else "the kernel has no NUMA balancing")
    line = "sudo sysctl kernel.numa_balancing="
    if value == "0":
        return replace(knob, level="ok")
    return replace(knob, change=f"{line}0", back=f"{line}{value}", level="warning")


def _refused(knob: Knob, why: str) -> Knob:
    return replace(knob, change="", back="", why_not=why)
