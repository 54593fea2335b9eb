"""Tests this machine as one to plan for."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.hardware.bandwidth.measuring import ReadBandwidth
from cpuchat.hardware.bandwidth.peaks import remember
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.models.tuned import Tuned, TunedSettings
from cpuchat.planner.this_machine import machine_here
from cpuchat.settings import Settings
from tests.support.topology import simulate_topology


def test_a_tuned_model_is_planned_on_its_own_cores(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = simulate_topology(monkeypatch, tmp_path / "desktop")
    every, one = (choose_cores(topology, "auto", n).cpus for n in (0, 1))
    remember(ReadBandwidth(cpus=every, bytes_per_s=40e9, rounds=(40e9,)))
    TunedSettings().put(tiny_model, Tuned(model="tiny", changes={"engine": {"threads": 1}}))
    assert machine_here(Settings(), model=str(tiny_model)).cores.value == len(every)  # the others were not measured
    remember(ReadBandwidth(cpus=one, bytes_per_s=25e9, rounds=(25e9,)))
    found = machine_here(Settings(), model=str(tiny_model))
    assert (found.cores.value, found.read_gbs.value) == (1, 25)
    assert machine_here(Settings()).cores.value == len(every)
