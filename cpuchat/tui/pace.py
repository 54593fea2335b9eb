"""How often the app draws while a model computes."""

from __future__ import annotations

from dataclasses import dataclass

from cpuchat.hardware.sysfs import own_cpus
from cpuchat.model_info import ModelInfo
from cpuchat.servers import computes_here


@dataclass(frozen=True)
class Pace:
    """Seconds between two drawings of text that is being written, and of the figures."""

    text: float
    figures: float

    @property
    def interval(self) -> float:
        """Return the shortest time between two drawings of text: what comes a little early does not wait."""
        return 0.8 * self.text


SPARE = Pace(text=0.1, figures=0.25)
# While every core computes, what the UI takes is taken from the model, and more: all threads wait for the one that was
# interrupted. Measured, 8 % of a core cost 6 to 9 % of the tokens on two cores (benchmarks/README.md).
CROWDED = Pace(text=1 / 3, figures=1.0)


def pace_beside_model(model: ModelInfo | None) -> Pace:
    """Return the pace beside a loaded model; a server on this machine may take every core."""
    if model is None:
        return SPARE
    return CROWDED if computes_here(model.path) else pace_beside(model.n_threads)


def pace_beside(n_threads: int) -> Pace:
    """Return the pace beside so many compute threads: slower if they take every core."""
    return CROWDED if n_threads >= len(own_cpus()) else SPARE
