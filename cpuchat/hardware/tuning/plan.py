"""Makes a tuning plan, and checks which of its changes are in effect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cpuchat.errors import UsageError
from cpuchat.hardware.cgroups import read_text
from cpuchat.hardware.topology import Topology
from cpuchat.hardware.tuning import resctrl
from cpuchat.hardware.tuning.changes import LOW_RISK, CacheGroup, Change, KnobRefusal, TuningPlan, below, value_of
from cpuchat.hardware.tuning.knobs import KNOBS, knob_refusal
from cpuchat.hardware.tuning.state import READ_ONLY

NAMES = (*(knob.name for knob in KNOBS), resctrl.NAME)


def make_plan(
    topology: Topology, root: Path, wanted: Sequence[str] = (), target_cpus: Sequence[int] = ()
) -> TuningPlan:
    """Plan the changes that set the `wanted` knobs to their recommended values. Only reads.

    Args:
        wanted: some of `NAMES`; () takes those with the verdict "low risk, small gain".
        target_cpus: CPUs of the target while the draft model has cores of its own; only "l3" asks.

    Raises:
        UsageError: a name that is no knob, or one that is only shown.
    """
    for name in wanted:
        if name in READ_ONLY:
            raise UsageError(f"{name} is read-only: {READ_ONLY[name]}.")
        if name not in NAMES:
            raise UsageError(f"Unknown knob: {name}.", f"Known knobs: {', '.join(NAMES)}.")
    names = set(wanted) or {knob.name for knob in KNOBS if knob.verdict == LOW_RISK}
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


def in_effect(plan: TuningPlan, root: Path) -> tuple[Change, ...]:
    """Return the changes of the plan whose file has the new value now."""
    return tuple(change for change in plan.changes if value_of(root, change.path) == change.new)


def group_in_effect(plan: TuningPlan, root: Path) -> bool:
    """Return whether the control group of the plan exists and partitions the cache as planned."""
    if plan.group is None:
        return False
    wanted = resctrl.l3_masks(plan.group.schemata)
    return resctrl.l3_masks(read_text(below(root, plan.group.path) / "schemata")) == wanted


def effect(plan: TuningPlan, root: Path) -> dict[str, tuple[int, int]]:
    """Return for each knob of the plan how many of its changes are in effect, and how many there are."""
    now = in_effect(plan, root)
    counts = {
        name: (sum(change.knob == name for change in now), sum(change.knob == name for change in plan.changes))
        for name in plan.knobs
    }
    if plan.group is not None:
        counts[resctrl.NAME] = (int(group_in_effect(plan, root)), 1)
    return counts
