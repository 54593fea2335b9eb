"""Shows the knobs, makes a tuning plan of some, and checks which of its changes are in effect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from cpuchat.base.errors import UsageError
from cpuchat.hardware.sysfs import read_text
from cpuchat.hardware.topology import Topology
from cpuchat.hardware.tuning import resctrl
from cpuchat.hardware.tuning.changes import CacheGroup, Change, KnobRefusal, TuningPlan, below, value_of
from cpuchat.hardware.tuning.knobs import KNOBS, knob_refusal

NAMES = (*(knob.name for knob in KNOBS), resctrl.NAME)
LOW_RISK, EXPERIMENTAL = "low risk, small gain", "experimental, gain about 0"
READ_ONLY: dict[str, str] = {
    "smt": "only one thread per core computes anyway, and disabling SMT takes half of the CPUs from all programs",
    "nps": "set in the firmware; NPS1 is best for one model",
}
"""Settings that no plan changes, and why."""


class KnobState(msgspec.Struct, frozen=True):
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
        KnobState(knob.name, knob.state(topology, root), LOW_RISK, knob.about, knob_refusal(knob, topology, root))
        for knob in KNOBS
    ]
    # Whether a cache can be partitioned does not depend on the cores: take some of a target beside a draft model.
    planned = resctrl.plan_group(topology, root, [one.cpus[0] for one in topology.l3_groups if len(one.cpus) > 1])
    refusal = planned if isinstance(planned, KnobRefusal) else None
    states.append(KnobState(resctrl.NAME, resctrl.state(root), EXPERIMENTAL, resctrl.ABOUT, refusal))
    # admin-guide/cputopology.rst: on, off, forceoff, notsupported
    values = {"smt": read_text(root / "sys/devices/system/cpu/smt/control"), "nps": _nps(topology)}
    states += [KnobState(name, values[name], "read-only", why) for name, why in READ_ONLY.items()]
    return tuple(states)


def _nps(topology: Topology) -> str:
    """Return how the firmware divides the memory of a socket, in words."""
    if topology.virtual:
        return f"{topology.nps_words} (virtual machine: unverified)"
    nodes, sockets = len(topology.cpu_nodes), len(topology.packages)
    if sockets > 1 and nodes == 1:
        return f"{sockets} sockets in one NUMA node (NPS0)"
    if nodes > 4 * sockets and nodes == len(topology.l3_groups):  # NPS4 is the most there is
        return f"{nodes} NUMA nodes, one for each L3 group (L3 as NUMA)"
    return topology.nps_words


def make_plan(
    topology: Topology, root: Path, wanted: Sequence[str] = (), target_cpus: Sequence[int] = ()
) -> TuningPlan:
    """Plan the changes that set the `wanted` knobs to their recommended values. Only reads.

    Args:
        wanted: some of `NAMES`; () takes those of `KNOBS`, all of low risk.
        target_cpus: CPUs of the target while the draft model has cores of its own; only "l3" asks.

    Raises:
        UsageError: a name that is no knob, or one that is only shown.
    """
    for name in wanted:
        if name in READ_ONLY:
            raise UsageError(f"{name} is read-only: {READ_ONLY[name]}.")
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
