"""Tests what the hardware screen says of measured passes, and lists of predicted speeds."""

from __future__ import annotations

from typing import Any

import msgspec
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
from tests.support.costs import reading


def test_when_and_on_which_cores_passes_were_measured() -> None:
    assert "not measured" in passes_measured(Settings())
    assert "not measured" in passes_measured(parse('[engine]\ncores = "9998-9999"\n'))
    placement = place(read_topology(), PlacementSpec())
    CostLog(placement.cpus, placement.memory_policy.words).probed(probe(two_cores())[:5])
    cores = plural(len(placement.cpus), "core")
    assert passes_measured(Settings()).endswith(f"(today) · {cores} · 5 passes")
    if len(placement.cpus) > 1:
        assert "not measured" in passes_measured(parse("[engine]\nthreads = 1\n"))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"probed": True}, ""),
        ({}, "speeds are rough until measured: `cpuchat probe`"),
        ({"estimated": True}, "speeds are up to 2× off until measured: `cpuchat probe`"),
        ({"at_least": True}, "speeds may be higher: `cpuchat probe` when idle"),
        ({"estimated": True, "fitted": True}, "speeds are rough until measured: `cpuchat probe`"),  # by chats
        ({"profile": None, "peak_source": "No core 99."}, "no speeds: No core 99."),
    ],
)
def test_lists_doubt_speeds_until_passes_are_measured(facts: dict[str, Any], words: str) -> None:
    machine = Machine(available=1, total=1, profile=reading(25e9))
    assert doubt(msgspec.structs.replace(machine, **facts)) == words
    assert doubt(None) == ""
