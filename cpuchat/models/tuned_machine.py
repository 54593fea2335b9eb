"""This machine as each model uses it: tuning may have found other cores or options for a model."""

from __future__ import annotations

from pathlib import Path

from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.model_info import ModelInfo
from cpuchat.models.machine import Machine, this_machine
from cpuchat.models.tuned import TunedSettings
from cpuchat.settings import Settings


class TunedMachine:
    """Reads each set of cores once. A sample of the files of tuned models is read: use it in threads.

    Args:
        machine: as `this_machine` returns it for the settings.
        loaded: the model that counts as unloaded in it.
    """

    def __init__(self, settings: Settings, machine: Machine, loaded: ModelInfo | None = None) -> None:
        self._settings, self._loaded, self._machine = settings, loaded, machine
        self._tuned = TunedSettings()
        self._known = {PlacementSpec.of(settings): machine}

    def settings(self, model: Path) -> Settings:
        """Return the settings that a model is loaded with."""
        found = self._tuned.find(model)
        return found.applied_to(self._settings) if found is not None else self._settings

    def of(self, model: Path) -> Machine:
        """Return the machine with the cores of a model; with those of the settings until these were measured."""
        settings = self.settings(model)
        spec = PlacementSpec.of(settings)
        if spec not in self._known:
            found = this_machine(settings, loaded=self._loaded)
            self._known[spec] = found if found.profile is not None else self._machine
        return self._known[spec]


def machine_for(model: Path, settings: Settings, loaded: ModelInfo | None = None) -> Machine:
    """Return this machine with the cores that a model uses; the other arguments are those of `this_machine`."""
    return TunedMachine(settings, this_machine(settings, loaded=loaded), loaded).of(model)
