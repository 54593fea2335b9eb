"""Tests what the hardware screen says of measured passes, and lists of predicted speeds."""

from __future__ import annotations

import pytest

from cpuchat.config.settings import Settings, parse
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.models.costs import CostLog
from cpuchat.models.machine import Machine
from cpuchat.present.machine import passes_measured
from cpuchat.present.models import doubt
from cpuchat.telemetry.units import plural
from tests.costs.made_up import probe, two_cores


def test_when_and_on_which_cores_passes_were_measured() -> None:
    assert "not measured" in passes_measured(Settings())
    assert "not measured" in passes_measured(parse('[engine]\ncores = "9998-9999"\n'))
    placement = place(read_topology(), PlacementSpec())
    CostLog(placement.cpus, placement.memory_policy.words).probed(probe(two_cores())[:5])
    cores = plural(len(placement.cpus), "core")
    assert passes_measured(Settings()).endswith(f"(today) · {cores} · 5 passes")
    if len(placement.cpus) > 1:
        told = passes_measured(parse("[engine]\nthreads = 1\n"))
        assert told.endswith(f"(today) · {cores} · 5 passes, scaled to 1 core")


@pytest.mark.parametrize(
    ("peak", "probed", "words"),
    [
        (25e9, True, ""),
        (25e9, False, "speeds are rough until `cpuchat probe`"),
        (0.0, False, "no speeds until `cpuchat probe`"),
    ],
)
def test_lists_doubt_speeds_until_passes_are_measured(peak: float, probed: bool, words: str) -> None:
    machine = Machine(available=1, total=1, peak=peak, probed=probed)
    assert doubt(machine) == words
    assert doubt(None) == ""
