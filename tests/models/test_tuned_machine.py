"""Tests what is predicted for models that are tuned: the same as when they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.config.settings import Settings, parse
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.measure.peak import ReadBandwidth, keep
from cpuchat.models.machine import Tuned, TunedMachine, keep_tuned, machine_for, this_machine, with_tuned
from tests.support.topology import simulate_topology


def test_a_tuned_model_has_its_own_cores_once_these_were_measured(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = simulate_topology(monkeypatch, tmp_path / "desktop")
    every, one = (choose_cores(topology, "auto", n).cpus for n in (0, 1))
    keep(ReadBandwidth(cpus=every, bytes_per_s=40e9, rounds=(40e9,)))
    keep_tuned(tiny_model, Tuned(model="tiny", changes={"engine": {"threads": 1, "flash_attn": "off"}}))
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    machine = this_machine(Settings())
    assert machine.peak == 40e9
    assert TunedMachine(Settings(), machine).of(tiny_model) is machine
    keep(ReadBandwidth(cpus=one, bytes_per_s=25e9, rounds=(25e9,)))
    tuned = TunedMachine(Settings(), machine)
    assert tuned.of(other) is tuned.of(tmp_path / "gone.gguf") is machine
    assert tuned.of(tiny_model).peak == machine_for(tiny_model, Settings()).peak == 25e9
    assert with_tuned(tiny_model, Settings()).load_options().flash_attn == "off"
    assert with_tuned(other, Settings()) == Settings()
    chosen = parse("[engine]\nthreads = 8\n")  # what the user set wins
    assert machine_for(tiny_model, chosen).peak == this_machine(chosen).peak
