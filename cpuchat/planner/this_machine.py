"""The machine that cpuchat runs on, as one to plan for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.costmodel.profile import scaled
from cpuchat.costmodel.usual import USUAL_GHZ, Figure, cpu_of
from cpuchat.errors import UsageError
from cpuchat.hardware.instructions import instructions
from cpuchat.models.machine import this_machine
from cpuchat.models.tuned import tuned_settings
from cpuchat.planner.machine_specs import HERE, MachineSpec

if TYPE_CHECKING:
    from cpuchat.protocol import ModelInfo
    from cpuchat.settings import Settings


class NotMeasured(UsageError):
    """The read bandwidth of this machine was not measured yet, or while other programs ran."""


def machine_here(settings: Settings, loaded: ModelInfo | None = None, model: str = "") -> MachineSpec:
    """Return this machine, with the cores and the memory policy of the settings; `loaded` counts as unloaded.

    Args:
        model: the path of a model to plan, "" for none: then with the cores that tuning found for it, if these were
            measured, and as fast as chats with it were.

    Raises:
        NotMeasured: as its name says.
        UsageError: the cores of the settings are not possible here.
    """
    from cpuchat.hardware.placement.placement import PlacementSpec, place
    from cpuchat.hardware.topology import read_topology

    topology, factor = read_topology(), 1.0
    found = this_machine(settings, loaded=loaded)
    if model:
        tuned = tuned_settings(Path(model), settings)
        own = this_machine(tuned, loaded=loaded)
        settings, found = (tuned, own) if own.profile is not None else (settings, found)
        factor = found.factor_of(Path(model))
    placement = place(topology, PlacementSpec.of(settings))
    if found.profile is None:
        raise NotMeasured(f"No plan for this machine: {found.peak_source}.", "Or name another: --on MACHINE.")
    return MachineSpec(
        id=HERE,
        name=f"this machine ({topology.name})",
        kind="here",
        cpu=cpu_of(instructions().features),
        cores=Figure(len(placement.cpus), basis="measured", source="the cores in use"),
        clock_ghz=Figure(USUAL_GHZ, basis="estimate", source="not measured"),
        memory_gb=Figure(found.total / 1e9, basis="measured", source="of this machine"),
        free_gb=Figure(max(found.available, 1) / 1e9, basis="measured", source="available now"),
        measured=Figure(found.peak / 1e9, basis="measured", source=found.peak_source),
        l3_mb=Figure(found.cache_bytes / 1e6, basis="measured", source="of the cores in use")
        if found.cache_bytes and not topology.virtual  # as `usual_here`
        else None,
        watts=_given(settings.hardware.watts),
        price_usd=_given(settings.hardware.price_usd),
        fitted=scaled(found.profile, 1 / factor) if found.fitted else None,
    )


def _given(value: float) -> Figure | None:
    return Figure(value, basis="given", source="in the settings") if value else None


def measure_here(settings: Settings) -> None:
    """Measure the read bandwidth of this machine with the cores and the memory policy of the settings (2 seconds).

    Raises:
        ProbeFailed, Interrupted: as their names say.
    """
    from cpuchat.hardware.bandwidth.measuring import measure
    from cpuchat.hardware.bandwidth.peaks import remember
    from cpuchat.hardware.placement.placement import PlacementSpec, place
    from cpuchat.hardware.topology import read_topology

    placement = place(read_topology(), PlacementSpec.of(settings))
    words = placement.memory.words
    remember(measure(placement.cpus, memory=words), words)
