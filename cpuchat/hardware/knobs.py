"""The settings that only root can change: how they stand, the shell lines that change them and take them back, and what
they are worth, with the source.

Reads, and changes nothing; no setting survives a reboot. Files: Documentation/admin-guide/pm/{cpufreq,intel_pstate,
amd-pstate}.rst, admin-guide/mm/transhuge.rst, admin-guide/sysctl/kernel.rst, filesystems/resctrl.rst. Prefetchers:
Intel's "Disclosure of Hardware Prefetcher Control"; AMD's PPR of Zen 4 and Zen 5, PREFETCH_CONTROL.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.sysfs import entries, read_text
from cpuchat.hardware.topology import Topology

CPUS = "/sys/devices/system/cpu"
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"
BALANCING = "/proc/sys/kernel/numa_balancing"
_SMT = f"{CPUS}/smt/control"
_RESCTRL = "/sys/fs/resctrl"
_GROUP = f"{_RESCTRL}/cpuchat"
_NOT_GROUPS = ("info", "mon_groups", "mon_data", "cpuchat")
_L3_SHARE = 4  # the target keeps one way out of so many
_INTEL_PREFETCH, _AMD_PREFETCH = 0x1A4, 0xC0000108
_DYNAMIC = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose "powersave" governor scales with the load instead of holding the lowest frequency
(pm/intel_pstate.rst).
"""


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting. `state` is "" where it does not exist; `change` the shell line that sets what is good for inference,
    `back` the one that restores the present state, both "" where there is nothing to do. `worth`: what it brings, as
    `source` says. `level`: how much its state matters ("": it does not, or is not known). `why_not`: why it cannot be
    changed from here.
    """

    name: str
    state: str
    worth: str
    source: str
    change: str = ""
    back: str = ""
    level: Literal["", "ok", "advice", "warning"] = ""
    why_not: str = ""


def read_knobs(topology: Topology, root: Path, target_cpus: Sequence[int] = ()) -> tuple[Knob, ...]:
    """Return all knobs. `target_cpus`: CPUs of the target while the draft model has cores of its own, else ()."""
    hardware, kernel = fixed(topology, root), fixed(topology, root, of_kernel=True)
    of_hardware = (_governor(topology, root), _boost(root), _smt(root), _prefetchers(topology))
    of_kernel = (_huge_pages(root), _balancing(topology, root))
    found = [(knob, hardware) for knob in of_hardware] + [(knob, kernel) for knob in of_kernel]
    found.append((_l3(topology, root, target_cpus), hardware))
    return tuple(_refused(knob, why) if why else knob for knob, why in found)


def value_of(root: Path, path: str) -> str:
    """Return the value of the file at the absolute `path`; of a choice such as `always [madvise] never`, the selected
    word; "" when unreadable.
    """
    text = read_text(_below(root, path))
    _, opening, rest = text.partition("[")
    word, closing, _ = rest.partition("]")
    return word if opening and closing else text


def huge_pages(root: Path) -> str:
    """Return the kernel's setting for transparent huge pages; "" where unknown."""
    return value_of(root, _THP)


def fixed(topology: Topology, root: Path, *, of_kernel: bool = False) -> str:
    """Return why no setting can be changed from here; "" when it can. `of_kernel`: a setting of the kernel alone, which
    a virtual machine has for itself.
    """
    if place := container(root):
        return f"this is a container ({place}) that shares the host's kernel"
    if limit := _limited(topology):
        return limit
    return f"virtual machine ({topology.virtual})" if topology.virtual and not of_kernel else ""


def container(root: Path) -> str:
    """Return the evidence that this is a container; "" without any."""
    for name in (".dockerenv", "run/.containerenv", "run/systemd/container", "var/run/secrets/kubernetes.io"):
        if (root / name).exists():
            return f"/{name}"
    match = re.search(r"docker|kubepods|containerd|libpod|lxc", read_text(root / "proc/self/cgroup"))
    return f"{match[0]} in /proc/self/cgroup" if match else ""


def _limited(topology: Topology) -> str:
    """Return what limits this process to a part of the machine; "" when nothing does."""
    if topology.quota is not None:
        return f"cgroup CPU quota: {topology.quota:g}"
    if len(topology.allowed) < len(topology.online):
        allowed, online = format_cpu_list(topology.allowed), format_cpu_list(topology.online)
        return f"this process is limited to CPUs {allowed} of {online}"
    if topology.memory_limit is not None:
        return f"cgroup memory limit: {topology.memory_limit / 1e9:.1f} GB"
    return ""


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


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
    back writes it after the governor, under which the kernel would refuse it.
    """
    values = _per_cpu(topology, root, "scaling_governor")
    counts_of = Counter(values.values())
    counts = counts_of.most_common()
    state = counts[0][0] if len(counts) == 1 else ", ".join(f"{name} ({n} of {len(values)})" for name, n in counts)
    worth = "Small: a loaded core reaches its highest frequency; large where acpi-cpufreq holds powersave"
    knob = Knob("governor", state, worth, "the kernel's pm/cpufreq.rst; not measured with models")
    if not values:
        return _refused(knob, "no frequency driver: enable CPPC or P-states in the firmware setup")
    offered = [
        read_text(_below(root, f"{CPUS}/cpu{cpu}/cpufreq/scaling_available_governors")).split() for cpu in values
    ]
    if any(names and "performance" not in names for names in offered):
        return _refused(knob, "the driver does not offer performance")
    if state == "performance":
        return replace(knob, level="ok")
    driver = value_of(root, f"{CPUS}/cpu{next(iter(values))}/cpufreq/scaling_driver")
    knob = replace(knob, level="warning" if "powersave" in counts_of and driver not in _DYNAMIC else "advice")
    preferences = _per_cpu(topology, root, "energy_performance_preference")
    back = _write_per_cpu(values, "scaling_governor")
    if preferences:
        back += f" && {_write_per_cpu(preferences, 'energy_performance_preference')}"
    return _changed(knob, _write_per_cpu(dict.fromkeys(values, "performance"), "scaling_governor"), back)


def _boost(root: Path) -> Knob:
    worth = "Prefill, which arithmetic limits, grows with the frequency; decoding waits for memory"
    for path, on in ((f"{CPUS}/cpufreq/boost", "1"), (f"{CPUS}/intel_pstate/no_turbo", "0")):
        if (value := value_of(root, path)) in ("0", "1"):
            if value == on:
                return Knob("boost", "on", worth, "not measured", level="ok")
            knob = Knob("boost", "off", worth, "not measured", level="advice")
            return _changed(knob, _write(on, path), _write(value, path))
    why = "the frequency driver does not provide it: check the firmware setup"
    return Knob("boost", "", worth, "not measured", why_not=why)


def _smt(root: Path) -> Knob:
    worth = "None: one thread per core computes. With two, an EPYC 9655 decoded half as fast"
    knob = Knob("SMT", value_of(root, _SMT), worth, "docs/claims.md")
    if knob.state not in ("on", "off"):
        return _refused(knob, "this CPU, the firmware or the kernel does not let it be changed")
    other = "off" if knob.state == "on" else "on"
    return _changed(knob, _write(other, _SMT), _write(knob.state, _SMT))


def _prefetchers(topology: Topology) -> Knob:
    """A set bit of the register turns one prefetcher off. Its value is known to root only."""
    worth = "Leave them on: weights are read in order, which is what they are made for"
    register = _prefetch_register(topology)
    read = f"sudo rdmsr -a {register:#x}"
    state = f"n/a: `{read}` (msr-tools) prints it, 0 = all on" if register else ""
    knob = Knob("prefetchers", state, worth, "Intel: neutral or positive for most programs; no gain from off published")
    if not register:
        return _refused(knob, "the firmware setup has them on this CPU")
    back = f"sudo wrmsr -a {register:#x} VALUE  # what rdmsr printed before"
    return _changed(knob, f"sudo modprobe msr && {read} && sudo wrmsr -a {register:#x} 0", back)


def _prefetch_register(topology: Topology) -> int:
    """Return the documented register of this CPU's prefetchers; 0 if there is none."""
    if topology.vendor == "GenuineIntel":
        return _INTEL_PREFETCH
    family = topology.family or 0
    zen_4 = family >= 0x1A or (family == 0x19 and "avx512f" in topology.flags)
    return _AMD_PREFETCH if topology.vendor == "AuthenticAMD" and zen_4 else 0


def _huge_pages(root: Path) -> Knob:
    """Mapped weights get none; copied ones (repacked, or load-mode read) do."""
    worth = "0 to 12 % of decoding, for copied weights (repacked, or load-mode read) only"
    knob = Knob("huge pages", huge_pages(root), worth, "ik_llama.cpp #278: +12 %; llama.cpp #22022: neutral")
    if knob.state not in ("always", "madvise", "never"):
        return _refused(knob, "the kernel has no transparent huge pages")
    knob = replace(knob, level="advice" if knob.state == "never" else "ok")
    return knob if knob.state == "always" else _changed(knob, _write("always", _THP), _write(knob.state, _THP))


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
    return _changed(replace(knob, level="warning"), f"{line}0", f"{line}{value}")


def _l3(topology: Topology, root: Path, target_cpus: Sequence[int]) -> Knob:
    """Confine the target to a quarter of the ways of each L3, so that what it streams cannot push out what a draft
    model on other cores keeps in the rest. Only `L3:` is written: `MB:` limits bandwidth.
    """
    folder = _below(root, _RESCTRL)
    masks = _l3_masks(read_text(folder / "schemata"))
    others = [one.name for one in entries(folder) if one.is_dir() and one.name not in _NOT_GROUPS]
    is_full = all(mask & (mask + 1) == 0 for mask in masks.values())
    state = "not partitioned" if masks and is_full else ""
    worth = "About none: weights stream through the cache. It can help a draft model on cores of its own"
    knob = Knob("L3 plan", f"partitioned by {', '.join(others)}" if others else state, worth, "not measured")
    if "cat_l3" not in topology.flags or not folder.is_dir():
        return _refused(knob, "this CPU or its kernel cannot partition the L3 cache (cat_l3, resctrl)")
    if _below(root, _GROUP).is_dir():
        return _changed(replace(knob, state="target confined"), "", f"sudo rmdir {_GROUP}")
    if not masks:
        mount = f"sudo mount -t resctrl resctrl {_RESCTRL}"
        return _changed(knob, f"{mount} && cpuchat doctor", f"sudo umount {_RESCTRL}")
    if others or not is_full:
        return _refused(knob, "the cache is partitioned already")
    if not target_cpus:
        return _refused(knob, "the draft model has no cores of its own (speculation.draft_cores)")
    kept = max(min(mask.bit_count() for mask in masks.values()) // _L3_SHARE, 1)
    line = "L3:" + ";".join(f"{number}={(1 << kept) - 1:x}" for number in sorted(masks))
    cpus = format_cpu_list(target_cpus)
    lines = (f"sudo mkdir {_GROUP}", _write(line, f"{_GROUP}/schemata"), _write(cpus, f"{_GROUP}/cpus_list"))
    return _changed(knob, " && ".join(lines), f"sudo rmdir {_GROUP}")


def _l3_masks(schemata: str) -> dict[int, int]:
    """Parse `L3:0=ffff;1=ffff` of a schemata file: cache id to bit mask of ways; {} without such a line."""
    match = re.search(r"^\s*L3:(.*)$", schemata, re.MULTILINE)
    pairs = re.findall(r"(?:^|;)\s*([0-9]{1,9})=([0-9a-fA-F]{1,16})\s*(?=;|$)", match[1] if match else "")
    return {int(number): int(mask, 16) for number, mask in pairs}


def _refused(knob: Knob, why: str) -> Knob:
    return replace(knob, change="", back="", why_not=why)


def _changed(knob: Knob, change: str, back: str) -> Knob:
    return replace(knob, change=change, back=back)
