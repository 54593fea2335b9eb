"""The read bandwidth of this machine, in one place.

`measure` reads with one set of cores, `survey` with all the sets that tell how a machine is built, `peak_of` gives the
figure that utilization is divided by. What is measured is kept by machine (`cache`).
"""

from __future__ import annotations

from cpuchat.hardware.bandwidth.measuring import Measured, ProbeFailed, measure
from cpuchat.hardware.bandwidth.peaks import known_peak, peak_of, remember, should_measure
from cpuchat.hardware.bandwidth.survey import Cell, Survey, cached_survey, survey

__all__ = [
    "Cell", "Measured", "ProbeFailed", "Survey", "cached_survey", "known_peak", "measure", "peak_of", "remember",
    "should_measure", "survey",
]  # fmt: skip
