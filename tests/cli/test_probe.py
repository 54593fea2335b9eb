"""Tests `cpuchat probe`: what it prints of real and of simulated machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cpuchat.base.errors import MeasureFailed, UsageError
from cpuchat.bench import cost_probe
from cpuchat.bench.cost_probe import Case, Pass
from cpuchat.cli import machine
from cpuchat.cli.machine import probe
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.measure import peak
from cpuchat.measure.peak import ReadBandwidth
from cpuchat.models.synthetic.model import SHAPES
from tests.hardware.trees import make_tree


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(probe, arguments, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Simulate a machine of `trees`: a core reads 25 GB/s, all together at most 360 GB/s."""

    def instead(cpus: tuple[int, ...], **_: object) -> ReadBandwidth:
        rate = min(25e9 * len(cpus), 360e9)
        return ReadBandwidth(cpus, rate, (0.96 * rate, 0.98 * rate, rate))

    monkeypatch.setattr(peak, "measure", instead)
    monkeypatch.setattr(cost_probe, "cases", lambda: [])

    def pretend(tree: str) -> None:
        root = make_tree(tmp_path, tree)
        monkeypatch.setattr(machine, "ROOT", root)

    return pretend


def test_this_machine_is_really_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "buffer_bytes", lambda *_: 64 << 20)  # filling gigabytes takes seconds
    monkeypatch.setattr(cost_probe, "cases", lambda: [Case("few", SHAPES["tiny"], "Q8_0", (Pass(1), Pass(8)), 1.0)])
    monkeypatch.setattr(ReadBandwidth, "disturbed", False)  # whatever else runs
    monkeypatch.setattr(cost_probe, "is_disturbed", lambda found: False)
    cpu = own_cpus()[0]
    done = run("--cores", str(cpu), "--json")
    found = json.loads(done.stdout)
    assert done.return_value == 0 and found["caveat"] is None
    assert found["all_cores"]["cpus"] == [cpu]
    assert found["all_cores"]["bytes_per_s"] == max(found["all_cores"]["rounds"]) > 1e8
    assert found["one_core"] == found["all_cores"]
    assert peak.known([cpu]).bytes_per_s == found["all_cores"]["bytes_per_s"]
    assert found["costs"] == {"passes": 2}


def test_a_server(on: Callable[[str], None]) -> None:
    on("epyc-9354")
    out = run().stdout
    lines = [line.split() for line in out.splitlines()]
    assert "EPYC 9354 · 1 socket · NPS1 · 8 L3 groups × 4 cores, 64 threads" in out
    assert ["1", "core", "1", "25.0", "24.5", "(24.0–25.0)"] in lines
    assert ["1", "L3", "group", "4", "100", "98.0", "(96.0–100)"] in lines
    assert ["all", "32", "cores", "32", "360", "353", "(346–360)"] in lines
    assert "Theoretical peak: 461 GB/s · " in out and "assumed" in out
    assert "All cores reach 78 % of it" in out
    assert "Virtual machine" not in out


def test_json_of_a_server(on: Callable[[str], None]) -> None:
    on("2x-epyc-7543")
    with peak.one_at_a_time(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_PATIENCE", 0.0)
        with pytest.raises(MeasureFailed, match="A window of cpuchat is measuring"):
            run()
    found = json.loads(run("--json", "--memory-policy", "interleave").stdout)
    assert found["memory_policy"] == "interleave:0-1"
    assert found["share"] == pytest.approx(360 / 409.6)
    assert found["theoretical"]["channels"] == 16
    assert found["l3_group"]["bytes_per_s"] == pytest.approx(100e9)


def test_rounds_that_differ_and_wrong_words_are_pointed_out(
    on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on("epyc-9354")
    monkeypatch.setattr(peak, "measure", lambda cpus, **_: ReadBandwidth(cpus, 3e10, (1e10, 3e10), (0.5, 0.5)))
    noisy, told = run(), run("--json")
    assert noisy.stdout.startswith("Too noisy: other programs used the cores; memory reads at least this")
    assert noisy.return_value == told.return_value == 27 and told.stdout.startswith('{"caveat": "Too noisy')
    monkeypatch.setattr(peak, "measure", lambda cpus, **_: ReadBandwidth(cpus, 2e10, (1e10, 2e10), (0.5, 0.5)))
    assert "In use is the most that was read here: at least 30 GB/s" in run().stdout
    for wrong in (("--cores", "some"), ("--cores", "99"), ("--memory-policy", "bind:5")):
        with pytest.raises(UsageError):
            run(*wrong)
