"""The machine that cpuchat runs on, as one to plan for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.costmodel.profile import scaled
from cpuchat.costmodel.usual import USUAL_GHZ, Figure, cpu_of
from cpuchat.errors import UsageError
from cpuchat.hardware.instructions import instructions
from cpuchat.models.machine import this_machine
from cpuchat.models.tuned_machine import TunedMachine
from cpuchat.planner.machine_specs import HERE, MachineSpec
from cpuchat.planner.model_specs import PlannedModel

if TYPE_CHECKING:
    from cpuchat.model_info import ModelInfo
    from cpuchat.settings import Settings


class NotMeasured(UsageError):
    """The read bandwidth of this machine was not measured yet, or while other programs ran."""


class ThisMachine:
    """This machine as one to plan for: with the cores and the memory policy of the settings, or those that tuning found
    for a model. Reads each set of cores once, when it is made; use it in threads.

    Args:
        loaded: the model that counts as unloaded.
    """

    def __init__(self, settings: Settings, loaded: ModelInfo | None = None) -> None:
        self._settings, self._machine = settings, this_machine(settings, loaded=loaded)
        self._tuned = TunedMachine(settings, self._machine, loaded)

    def of(self, model: PlannedModel | None = None, draft: PlannedModel | None = None) -> MachineSpec:
        """Return the machine for a model and its draft model.

        For files that are here: with the cores that tuning found for the model, if these were measured, and as fast as
        chats with both were.

        Raises:
            NotMeasured: as its name says.
            UsageError: the cores of the settings are not possible here.
        """
        from cpuchat.hardware.placement.placement import PlacementSpec, place
        from cpuchat.hardware.topology import read_topology

        topology, settings, found = read_topology(), self._settings, self._machine
        paths = [Path(one.path) if one is not None and one.path else None for one in (model, draft)]
        if (path := paths[0]) is not None and (own := self._tuned.of(path)) is not found:
            settings, found = self._tuned.settings(path), own
        placement = place(topology, PlacementSpec.of(settings))
        if found.profile is None:
            raise NotMeasured(f"No plan for this machine: {found.peak_source}.", "Or name another: --on MACHINE.")
        factor, draft_factor = (found.factor_of(one) if one is not None else 1.0 for one in paths)
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
            draft_factor=draft_factor / factor if found.fitted else None,
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
