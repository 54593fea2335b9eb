"""The machine that cpuchat runs on, as one to plan for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuchat.errors import UsageError
from cpuchat.hardware.instructions import Instructions, instructions
from cpuchat.models.library.library import Library
from cpuchat.models.library.usage import UsageLog
from cpuchat.models.machine import this_machine
from cpuchat.planner.machine_specs import HERE, Figure, MachineSpec
from cpuchat.planner.measured import fitted_here, observations

if TYPE_CHECKING:
    from cpuchat.settings import Settings

_USUAL_GHZ = 3.0
_TELLING = 3e8  # bytes of weights: what runs in caches, such as the demo models, tells little of larger models
_BY_FEATURE = (
    ("AMX_INT8", "granite-rapids"),
    ("AVX512_VNNI", "zen4"),
    ("AVX_VNNI", "zen4"),
    ("AVX2", "zen3"),
    ("AVX", "x86-64"),
    ("MATMUL_INT8", "ampereone"),
)


def machine_here(settings: Settings) -> MachineSpec:
    """Return this machine, with the cores and the memory policy of the settings.

    Where models of some size were calibrated or chatted with, its profile is fitted to that; this takes up to a second.

    Raises:
        UsageError: its read bandwidth was not measured yet, or while other programs ran.
    """
    from cpuchat.hardware.placement.placement import PlacementSpec, place
    from cpuchat.hardware.topology import read_topology

    topology = read_topology()
    placement = place(topology, PlacementSpec.of(settings))
    found = this_machine(settings)
    if found.peak <= 0:
        raise UsageError(f"This machine cannot be planned for: {found.peak_source}.", "Or name another: --on MACHINE.")
    library = Library(settings.model.folders)
    machine = MachineSpec(
        id=HERE,
        name=f"this machine ({topology.name})",
        kind="here",
        cpu=cpu_of(instructions()),
        cores=Figure(len(placement.cpus), basis="measured", source="the cores in use"),
        clock_ghz=Figure(_USUAL_GHZ, basis="estimate", source="not measured"),
        memory_gb=Figure(max(found.available, 1) / 1e9, basis="measured", source="available now"),
        measured=Figure(found.peak / 1e9, basis="measured", source=found.peak_source),
        l3_mb=Figure(found.cache_bytes / 1e6, basis="measured", source="of the cores in use")
        if found.cache_bytes and not topology.virtual  # the caches of a virtual machine may be those of its neighbors
        else None,
    )
    seen = observations(library.local_models(), UsageLog().read())
    if not any(one.work.weight_bytes >= _TELLING for one in seen):
        return machine
    return msgspec.structs.replace(machine, fitted=fitted_here(machine.profile(), seen).profile)


def cpu_of(found: Instructions) -> str:
    """Return the name in cpus.toml whose rates are nearest to those of a CPU with these instructions."""
    return next((name for feature, name in _BY_FEATURE if feature in found.features), "arm64")
