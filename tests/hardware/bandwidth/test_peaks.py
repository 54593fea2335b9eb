"""Tests the peaks that are kept: measured once, again after other load, of this machine alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cpuchat.hardware.bandwidth import read_bandwidth
from cpuchat.hardware.bandwidth.read_bandwidth import ReadBandwidth, measure
from cpuchat.hardware.sysfs import own_cpus
from tests.hardware.trees import make_tree, write

pytestmark = pytest.mark.slow

CPUS = own_cpus()[:2]


def test_a_peak_is_measured_once(small: Path, measured: list[tuple[int, ...]]) -> None:
    first = read_bandwidth.peak_of((0, 1), root=small)
    assert first is not None
    assert (first.source, first.cpus) == ("measured, 2 cores", (0, 1))
    assert read_bandwidth.peak_of((1, 0), root=small) == first == read_bandwidth.known_peak((0, 1), root=small)
    assert measured == [(0, 1)]
    assert read_bandwidth.known_peak((0,), root=small) is None


def test_what_was_measured_beside_other_programs_is_measured_again(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = iter(
        [
            ReadBandwidth((0,), 3e10, (3e10,), shares=(0.5,)),
            ReadBandwidth((0,), 2e10, (2e10,), shares=(0.6,)),
            ReadBandwidth((0,), 4e10, (3e10, 4e10), shares=(0.7, 1.0)),
        ]
    )
    monkeypatch.setattr(read_bandwidth, "measure", lambda *_, **__: next(results))
    now = iter(range(0, 1 << 20, 3600))  # an hour passes whenever somebody looks
    monkeypatch.setattr(read_bandwidth, "time", lambda: float(next(now)))
    found = [read_bandwidth.peak_of((0,), root=small) for _ in range(4)]
    assert [peak.bytes_per_s for peak in found if peak is not None] == [3e10, 3e10, 4e10, 4e10]
    assert [peak.source for peak in found if peak is not None][-2:] == ["measured, 1 core"] * 2
    assert "other programs" in (found[0].source if found[0] is not None else "")


def test_on_a_machine_that_is_always_busy_not_every_load_measures(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = ReadBandwidth((0,), 3e10, (3e10,), shares=(0.5,))
    asked: list[object] = []
    monkeypatch.setattr(read_bandwidth, "measure", lambda cpus, **_: asked.append(cpus) or busy)
    assert read_bandwidth.should_measure((0,), root=small)
    assert (
        read_bandwidth.peak_of((0,), root=small)
        == read_bandwidth.peak_of((0,), root=small)
        == read_bandwidth.known_peak((0,), root=small)
    )
    assert len(asked) == 1 and not read_bandwidth.should_measure((0,), root=small)


def test_a_survey_beside_other_programs_does_not_spoil_a_good_peak(small: Path) -> None:
    good = read_bandwidth.remember(ReadBandwidth((0, 1), 3e10, (3e10,), shares=(1.0,)), root=small)
    assert read_bandwidth.remember(ReadBandwidth((0, 1), 2e10, (2e10,), shares=(0.6,)), root=small) == good
    assert read_bandwidth.known_peak((0, 1), root=small, disturbed=False) == good
    slower = read_bandwidth.remember(
        ReadBandwidth((0, 1), 2.5e10, (2.5e10,), shares=(1.0,)), root=small
    )  # other memory settings
    assert read_bandwidth.known_peak((0, 1), root=small) == slower


def test_a_busy_core_is_noticed(small: Path) -> None:
    spin = "import os; os.sched_setaffinity(0, {CPU}); print('ready', flush=True)\nwhile True: pass"
    cpu = CPUS[0]
    command = [sys.executable, "-c", spin.replace("CPU", str(cpu))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None and busy.stdout.readline()
            assert measure((cpu,), seconds=0.2, root=small).disturbed
        finally:
            busy.kill()


def test_another_machine_has_other_peaks(
    tmp_path: Path, tree: Callable[[str], Path], measured: list[tuple[int, ...]]
) -> None:
    one, other = make_tree(tmp_path, "epyc-9354"), tree("2x-epyc-7543")
    assert read_bandwidth.peak_of((0, 1), root=one)
    assert read_bandwidth.known_peak((0, 1), root=other) is None
    cpuinfo = one / "proc/cpuinfo"
    cpuinfo.write_text(cpuinfo.read_text().replace("0xa101148", "0xa10124f"))  # new microcode
    assert read_bandwidth.known_peak((0, 1), root=one) is None


def test_policies_count_only_where_there_are_nodes(
    tree: Callable[[str], Path], measured: list[tuple[int, ...]]
) -> None:
    one, two = tree("epyc-9354"), tree("2x-epyc-7543")
    for root in (one, two):
        assert read_bandwidth.peak_of((0, 1), "interleave:0-1", root=root)
    assert read_bandwidth.known_peak((0, 1), "local", root=one)
    assert read_bandwidth.known_peak((0, 1), "interleave:0-1", root=two)
    assert read_bandwidth.known_peak((0, 1), "local", root=two) is None


def test_no_peak_has_its_reason(tmp_path: Path, small: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": "MemTotal: 2000000 kB\nMemAvailable: 100000 kB"})
    reasons: list[str] = []
    assert read_bandwidth.peak_of(CPUS, failed=reasons.append, root=root) is None
    assert "free memory" in reasons[0]
    assert read_bandwidth.peak_of(CPUS, failed=reasons.append, cancelled=lambda: True, root=small) is None
    assert len(reasons) == 1
