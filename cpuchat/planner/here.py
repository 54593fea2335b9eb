"""The machine that cpuchat runs on, as one to plan for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuchat.errors import UsageError
from cpuchat.hardware.instructions import Instructions, instructions
from cpuchat.models.machine import this_machine
from cpuchat.planner.machine_specs import HERE, Figure, MachineSpec

if TYPE_CHECKING:
    from cpuchat.settings import Settings

_USUAL_GHZ = 3.0
_BY_FEATURE = (
    ("AMX_INT8", "granite-rapids"),
    ("AVX512_VNNI", "zen4"),
    ("AVX_VNNI", "zen4"),
    ("AVX2", "zen3"),
    ("AVX", "x86-64"),
    ("MATMUL_INT8", "ampereone"),
)


def machine_here(settings: Settings) -> MachineSpec:
    """Return this machine, with the cores and the memory policy of the settings. A few milliseconds.

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
    return MachineSpec(
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


def cpu_of(found: Instructions) -> str:
    """Return the name in cpus.toml whose rates are nearest to those of a CPU with these instructions."""
    return next((name for feature, name in _BY_FEATURE if feature in found.features), "arm64")
