"""Partitions the L3 caches between target and draft model (Documentation/filesystems/resctrl.rst).

The target's cores get a control group with a few ways of each L3, low ones; all others keep all ways. What the target
streams then cannot push out what a draft model on other cores of the same L3 keeps in the remaining ways. Weights are
read once per pass, so little is expected of it.

Only `L3:` is ever written. `MB:` limits bandwidth, in percent on Intel and in eighths of GB/s on AMD.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.sysfs import entries, read_number, read_text
from cpuchat.hardware.topology import Topology
from cpuchat.hardware.tuning.knobs import KnobRefusal, refusal_of

NAME = "l3"
ABOUT = "confine the target to a part of each L3, leaving the rest to a draft model on its own cores"
MOUNT = "/sys/fs/resctrl"
GROUP = f"{MOUNT}/cpuchat"
OWN_FOLDERS = ("info", "mon_groups", "mon_data", "cpuchat")
"""Folders of resctrl that are not control groups of other programs."""

DRAFTING_ONLY = "l3: helps drafting only; measured without drafts, it shows just the target's loss"
"""Note of every plan with a control group."""

_SHARE = 4  # the target keeps one way out of so many


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A resctrl control group to create: `schemata` is its L3 line, `cpus` the list of CPUs assigned to it."""

    path: str
    schemata: str
    cpus: str


def l3_masks(schemata: str) -> dict[int, int]:
    """Parse `L3:0=ffff;1=ffff` of a schemata file: cache id to bit mask of ways; {} without such a line."""
    match = re.search(r"^\s*L3:(.*)$", schemata, re.MULTILINE)
    masks: dict[int, int] = {}
    for part in match[1].split(";") if match else ():
        if pair := re.fullmatch(r"\s*([0-9]{1,9})=([0-9a-fA-F]{1,16})\s*", part):
            masks[int(pair[1])] = int(pair[2], 16)
    return masks


def state(root: Path) -> str:
    """Return how the L3 caches are partitioned now; "" where that is unknown."""
    folder = root / MOUNT.lstrip("/")
    masks = l3_masks(read_text(folder / "schemata"))
    if not masks:
        return "not mounted" if folder.is_dir() else ""
    own = l3_masks(read_text(root / GROUP.lstrip("/") / "schemata"))
    if own:
        ways = sorted({mask.bit_count() for mask in own.values()})
        return f"target confined to {'-'.join(map(str, ways))} ways of {max(masks.values()).bit_count()}"
    others = other_groups(folder)
    return f"partitioned by other control groups ({', '.join(others)})" if others else "not partitioned"


def other_groups(folder: Path) -> list[str]:
    """Return the control groups that are not ours."""
    return [one.name for one in entries(folder) if one.is_dir() and one.name not in OWN_FOLDERS]


def plan_group(topology: Topology, root: Path, target_cpus: Sequence[int]) -> CacheGroup | KnobRefusal:
    """Plan the control group for the target's cores, or return why there is none. `target_cpus`: logical CPUs of the
    target while the draft model has cores of its own; () when it has not.
    """
    if refused := refusal_of(NAME, topology, root):
        return refused

    def refuse(why: str, how: str = "") -> KnobRefusal:
        return KnobRefusal(knob=NAME, why=why, how=how)

    if "cat_l3" not in topology.flags:
        return refuse("this CPU cannot partition its L3 cache (no cat_l3)")
    folder = root / MOUNT.lstrip("/")
    if not folder.is_dir():
        return refuse("the kernel has no resctrl support")
    schemata = read_text(folder / "schemata")
    if not schemata:
        return refuse("resctrl is not mounted", f"Mount it and plan again: sudo mount -t resctrl resctrl {MOUNT}")
    masks = l3_masks(schemata)
    if not masks:
        return refuse("resctrl has no L3 masks here (perhaps mounted with cdp)")
    if others := other_groups(folder):
        why = f"other control groups partition the cache already ({', '.join(others)})"
        return refuse(why, "Find out who created them.")
    match = re.fullmatch(r"[0-9a-fA-F]{1,16}", read_text(folder / "info/L3/cbm_mask"))
    full = int(match[0], 16) if match else 0
    least, groups = read_number(folder / "info/L3/min_cbm_bits"), read_number(folder / "info/L3/num_closids")
    if not full or least is None or groups is None:
        return refuse("resctrl does not report which masks are allowed (info/L3)")
    if groups < 2:
        return refuse("the CPU has no second class of service (num_closids)")
    if any(mask != full for mask in masks.values()):
        return refuse("the default group does not have all ways: the cache is partitioned already")
    if not target_cpus:
        return refuse(
            "the draft model has no cores of its own, and the cache can only be partitioned by cores",
            "Set speculation.draft_cores to cores in the L3 groups of the target.",
        )
    used = {core.index for cpu in target_cpus if (core := topology.core_of(cpu)) is not None}
    if all(used.issuperset(group.cores) or used.isdisjoint(group.cores) for group in topology.l3_groups):
        return refuse("no L3 group is shared by both models, so they do not evict each other")
    ways = max(full.bit_count() // _SHARE, least, 1)
    if ways >= full.bit_count():
        return refuse(f"the L3 has only {full.bit_count()} ways, too few to partition")
    mask = f"{(1 << ways) - 1:x}"
    line = "L3:" + ";".join(f"{number}={mask}" for number in sorted(masks))
    return CacheGroup(path=GROUP, schemata=line, cpus=format_cpu_list(target_cpus))
