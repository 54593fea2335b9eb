"""Predicts how models of usual sizes run on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuchat.models.prediction import estimate

if TYPE_CHECKING:
    from cpuchat.models.machine import Machine
    from cpuchat.models.prediction import Prediction

QUANTIZATION = "Q4_K_M"
_BYTES_PER_WEIGHT = 4.85 / 8


@dataclass(frozen=True)
class TypicalModel:
    """`params` and `active` (of a mixture of experts; 0: all) in billions."""

    name: str
    params: float
    active: float = 0.0

    @property
    def size(self) -> int:
        """Return the bytes of its file in `QUANTIZATION`."""
        return round(self.params * 1e9 * _BYTES_PER_WEIGHT)

    def on(self, machine: Machine) -> Prediction:
        """Predict its fit and speed by the size of its file."""
        share = self.active / self.params if self.active else 1.0
        return estimate(self.size, machine, quantization=QUANTIZATION, params=1e9 * self.params, active=share)


FOUR_BILLION = TypicalModel("4B", 4.0)
SIZES = (
    TypicalModel("1B", 1.0),
    TypicalModel("2B", 2.0),
    FOUR_BILLION,
    TypicalModel("8B", 8.0),
    TypicalModel("14B", 14.0),
    TypicalModel("30B-A3B", 30.5, 3.3),
    TypicalModel("32B", 32.0),
    TypicalModel("70B", 70.0),
    TypicalModel("235B-A22B", 235.0, 22.0),
)
"""The usual sizes, small ones first; `30B-A3B` is a mixture of experts with 3B active."""
