"""The current values of the knobs, and of read-only settings beside them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cpuchat.hardware.cgroups import read_text
from cpuchat.hardware.topology import Topology
from cpuchat.hardware.tuning import resctrl
from cpuchat.hardware.tuning.changes import EXPERIMENTAL, KnobRefusal
from cpuchat.hardware.tuning.knobs import KNOBS, knob_refusal

READ_ONLY: dict[str, str] = {
    "smt": "only one thread per core computes anyway, and disabling SMT takes half of the CPUs from all programs",
    "prefetch": "decoding reads sequentially, which prefetchers speed up, and writing the register taints the kernel",
    "nps": "set in the firmware; NPS1 is best for one model",
}
"""Settings that no plan changes, and why."""

_AMD_PREFETCH = 0xC0000108
_AMD_BITS = {0: "L1 stream", 1: "L1 stride", 2: "L1 region", 3: "L2 stream", 5: "up/down"}
_INTEL_PREFETCH = 0x1A4
_INTEL_BITS = {0: "L2 stream", 1: "L2 adjacent line", 2: "L1 next line", 3: "L1 stride"}
# PrefetchControl is there from Zen 4 on: family 19h models 10h-1Fh and 60h-AFh, family 1Ah.
_ZEN4_MODELS = (range(0x10, 0x20), range(0x60, 0xB0))


@dataclass(frozen=True, slots=True)
class KnobState:
    """One setting now. `value` "" means that it does not exist or cannot be read; `refusal` None that a plan can
    change it; `verdict` is "read-only" for what no plan changes."""

    name: str
    value: str
    verdict: str
    about: str
    refusal: KnobRefusal | None = None


def knob_states(topology: Topology, root: Path) -> tuple[KnobState, ...]:
    """Return all knobs, and below them what is only shown. Reads, and changes nothing."""
    states = [
        KnobState(knob.name, knob.state(topology, root), knob.verdict, knob.about, knob_refusal(knob, topology, root))
        for knob in KNOBS
    ]
    about = "confine the target to a part of each L3, leaving the rest to a draft model on its own cores"
    planned = resctrl.plan_group(topology, root, tuple(_some_of_each(topology)))
    refusal = planned if isinstance(planned, KnobRefusal) else None
    states.append(KnobState(resctrl.NAME, resctrl.state(root), EXPERIMENTAL, about, refusal))
    values = {"smt": smt(root), "prefetch": prefetchers(topology, root), "nps": nps(topology)}
    states += [KnobState(name, values[name], "read-only", why) for name, why in READ_ONLY.items()]
    return tuple(states)


def _some_of_each(topology: Topology) -> list[int]:
    """Return CPUs of a target beside a draft model in each L3 group: whether a cache can be partitioned does not depend
    on the cores.
    """
    return [group.cpus[0] for group in topology.l3_groups if len(group.cpus) > 1]


def smt(root: Path) -> str:
    """Return `on`, `off`, `forceoff`, `notsupported`; "" when not told (admin-guide/cputopology.rst: smt/control)."""
    return read_text(root / "sys/devices/system/cpu/smt/control")


def nps(topology: Topology) -> str:
    """Return how the firmware divides the memory of a socket, in words."""
    if topology.virtual:
        return f"{topology.nps_words} (virtual machine: unverified)"
    nodes, sockets = len(topology.cpu_nodes), len(topology.packages)
    if sockets > 1 and nodes == 1:
        return f"{sockets} sockets in one NUMA node (NPS0)"
    if nodes > 4 * sockets and nodes == len(topology.l3_groups):  # NPS4 is the most there is
        return f"{nodes} NUMA nodes, one for each L3 group (L3 as NUMA)"
    return topology.nps_words


def prefetchers(topology: Topology, root: Path) -> str:
    """State of the prefetchers of CPU 0, where its registers can be read (root, module msr); "" elsewhere.

    AMD: PrefetchControl, MSR C0000108h; Intel: MSR 1A4h. A set bit switches one off.
    """
    if topology.virtual:
        return ""
    if topology.vendor == "AuthenticAMD":
        family, model = topology.family or 0, topology.model_number or 0
        if family < 0x19 or (family == 0x19 and not any(model in models for models in _ZEN4_MODELS)):
            return ""
        number, bits = _AMD_PREFETCH, _AMD_BITS
    elif topology.vendor == "GenuineIntel":
        number, bits = _INTEL_PREFETCH, _INTEL_BITS
    else:
        return ""
    value = _read_msr(root / "dev/cpu/0/msr", number)
    if value is None:
        return ""
    off = [name for bit, name in bits.items() if value >> bit & 1]
    return f"off: {', '.join(off)}" if off else "all on"


def _read_msr(path: Path, number: int) -> int | None:
    """Return one register (msr(4): 8 bytes at the offset of its number); None where that is not allowed."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        data = os.pread(fd, 8, number)
    except OSError:
        return None
    finally:
        os.close(fd)
    return int.from_bytes(data, "little") if len(data) == 8 else None
