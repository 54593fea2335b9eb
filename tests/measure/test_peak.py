"""The read bandwidth that is known of cores: measured alone it counts, beside other programs the best one does."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cpuchat.hardware.bandwidth.theoretical import usual_read
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.hardware.topology import read_topology
from cpuchat.measure import peak
from cpuchat.measure.peak import ReadBandwidth
from cpuchat.telemetry.machine import ROUGH, ROUGH_WORDS, Peak
from cpuchat.tui.hardware.screen import MachineReader
from tests.hardware.trees import make_tree
from tests.measure.conftest import Tree

pytestmark = pytest.mark.slow

CPUS = own_cpus()[:2]


def read(gigabytes: float, share: float = 1.0) -> ReadBandwidth:
    return ReadBandwidth((0, 1), gigabytes * 1e9, (gigabytes * 1e9,), shares=(share,))


def surveyed(root: Path, **more: object) -> dict[str, ReadBandwidth]:
    return peak.survey(read_topology(root), lambda *_: None, root=root, **more)  # type: ignore[arg-type]


def test_the_best_beside_other_programs_is_the_least_until_a_measurement_alone(small: Path) -> None:
    known = [peak.keep(read(*one), root=small) for one in ((30, 0.5), (20, 0.6), (40, 0.5), (35,), (30, 0.5), (25,))]
    assert [(one.bytes_per_s / 1e9, one.at_least) for one in known] == [
        (30, True), (30, True), (40, True), (35, False), (35, False), (25, False),
    ]  # fmt: skip
    assert peak.known((1, 0), root=small) == known[-1] == Peak(25e9, (0, 1))
    assert known[-1].source == "measured, 2 cores" and known[0].source == "measured, 2 cores, at least"
    assert peak.known((0,), root=small) is peak.known((), root=small) is None
    peak.raise_to(Peak(28e9, (0, 1), at_least=True), root=small)
    assert peak.known((0, 1), root=small) == Peak(28e9, (0, 1), at_least=True)
    for one in ((0,), 29e9), ((0, 2), 31e9):  # both read at least what one does
        peak.keep(ReadBandwidth(*one, rounds=(), shares=(0.5,)), root=small)
    assert peak.known((0, 1), root=small) == Peak(29e9, (0, 1), at_least=True)
    assert peak.keep(read(20), root=small) == peak.known((0, 1), root=small) == Peak(20e9, (0, 1))


def test_slices_are_together_what_one_measurement_is(small: Path, tree: Tree) -> None:
    root, rates = tree("2x-epyc-7543"), [1e9 * (7 * n % 15 + 20) for n in range(15)]
    peak.keep(ReadBandwidth((0, 1), max(rates), tuple(rates), (1.0,) * 15), root=small)
    for some, share in ((rates[:3], 1.0), ([60e9], 0.4), *((rates[n : n + 3], 1.0) for n in range(3, 15, 3))):
        known = peak.known((0, 1), root=root)
        assert known is None or known.at_least
        peak.keep_slice(ReadBandwidth((0, 1), max(some), tuple(some), (share,) * len(some)), root=root)
        best = peak.known((0, 1), root=root)
        assert best is not None and (best.bytes_per_s >= max(some) or not best.at_least)
    assert peak.known((0, 1), root=root) == peak.known((0, 1), root=small) == Peak(max(rates), (0, 1))


def test_what_such_cpus_usually_read_follows_their_generation(tree: Tree) -> None:
    guest = replace(read_topology(tree("vm-without-caches")), vendor="AuthenticAMD", family=0x1A, model_number=2)
    board = replace(read_topology(tree("epyc-9354")), model="", vendor="0x41", family=None, model_number=0xD0B)
    for topology, n_cores, measured in ((guest, 2, 32e9), (guest, 2, 70e9), (board, 4, 11.7e9)):
        usual = usual_read(topology, [core.cpus[0] for core in topology.cores[:n_cores]])
        assert measured / ROUGH <= usual <= ROUGH * measured


@pytest.mark.parametrize(("name", "measured"), [("epyc-9354", 367), ("2x-epyc-7543", 340), ("vm-without-caches", 26)])
def test_what_such_cpus_usually_read_is_an_estimate_until_something_is_measured(
    tree: Tree, name: str, measured: float
) -> None:
    root = tree(name)
    cpus = tuple(core.cpus[0] for core in read_topology(root).cores)
    estimate = peak.expected(cpus, root=root)
    assert estimate is not None and estimate.estimated
    assert measured / ROUGH <= estimate.bytes_per_s / 1e9 <= ROUGH * measured
    assert peak.expected(cpus[:1], root=root).bytes_per_s < estimate.bytes_per_s
    assert estimate.source.endswith(f"{ROUGH_WORDS} until measured")
    peak.keep(ReadBandwidth(cpus, 1e9, (1e9,), (0.5,)), root=root)  # other programs ran: the estimate is nearer
    assert peak.expected(cpus, root=root) == replace(estimate, least=1e9)
    peak.keep(ReadBandwidth(cpus[:1], 2e9, (2e9,), (0.5,)), root=root)  # all read at least what one does
    assert peak.expected(cpus, root=root) == replace(estimate, least=2e9)
    peak.keep(ReadBandwidth(cpus, 1e12, (1e12,), (0.5,)), root=root)
    assert peak.expected(cpus, root=root) == Peak(1e12, cpus, at_least=True)
    peak.keep(ReadBandwidth(cpus, 1e9, (1e9,), (1.0,)), root=root)
    assert peak.expected(cpus, root=root) == Peak(1e9, cpus)


def test_a_busy_core_is_noticed(small: Path) -> None:
    spin = "import os; os.sched_setaffinity(0, {CPU}); print('ready', flush=True)\nwhile True: pass"
    cpu = CPUS[0]
    command = [sys.executable, "-c", spin.replace("CPU", str(cpu))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None and busy.stdout.readline()
            assert peak.measure((cpu,), seconds=0.2, root=small).disturbed
        finally:
            busy.kill()


def test_another_machine_has_other_peaks(tmp_path: Path, tree: Tree) -> None:
    one, other = make_tree(tmp_path, "epyc-9354"), tree("2x-epyc-7543")
    peak.keep(read(30), root=one)
    assert peak.known((0, 1), root=one) and peak.known((0, 1), root=other) is None
    cpuinfo = one / "proc/cpuinfo"
    cpuinfo.write_text(cpuinfo.read_text().replace("0xa101148", "0xa10124f"))  # new microcode
    assert peak.known((0, 1), root=one) is None


def test_policies_count_only_where_there_are_nodes(tree: Tree) -> None:
    one, two = tree("epyc-9354"), tree("2x-epyc-7543")
    for root in (one, two):
        peak.keep(read(30), "interleave:0-1", root=root)
    assert peak.known((0, 1), "local", root=one)
    assert peak.known((0, 1), "interleave:0-1", root=two)
    assert peak.known((0, 1), "local", root=two) is None


def test_a_survey_is_of_a_core_an_l3_group_and_all_cores(tree: Tree, measured: list[tuple[int, ...]]) -> None:
    root = tree("epyc-9354")
    found = surveyed(root)
    assert [found[name].cpus for name in ("one_core", "l3_group", "all_cores")] == [
        (0,),
        (0, 1, 2, 3),
        tuple(range(32)),
    ]
    assert len(measured) == len(set(measured)) == 3
    known = peak.known_of(read_topology(root), root=root)
    assert known.l3_group == Peak(found["l3_group"].bytes_per_s, (0, 1, 2, 3))
    del measured[:]
    assert surveyed(root, cpus=(9, 8))["all_cores"].cpus == (8, 9)
    assert {cpu for cpus in measured for cpu in cpus} == {8, 9}


def test_a_survey_of_another_policy_is_not_shown(tree: Tree, measured: list[tuple[int, ...]]) -> None:
    root = tree("2x-epyc-7543")
    found = surveyed(root, policy="bind:0")
    reader = MachineReader(root)
    other = reader.facts(PlacementSpec()).peaks.all_cores
    assert other is not None and other.estimated  # "auto" interleaves over both nodes
    known = reader.facts(PlacementSpec(memory_policy="bind:0")).peaks.all_cores
    assert known is not None and known.bytes_per_s == found["all_cores"].bytes_per_s
    assert reader.facts(PlacementSpec(memory_policy="bind:7")).peaks.all_cores is None  # there is no such node


@pytest.mark.parametrize("name", ["vm-without-caches", "garbage", "hybrid-desktop"])
def test_every_machine_can_be_surveyed(tree: Tree, measured: list[tuple[int, ...]], name: str) -> None:
    found = surveyed(tree(name))
    assert found["one_core"].cpus[0] in found["all_cores"].cpus


def test_slices_measure_each_set_as_often_and_are_kept_as_they_come(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another program, the best slice is the least that these cores read."""
    root, rates = tree("epyc-9354"), iter(range(10, 90))

    def busy(cpus: Sequence[int], **_: object) -> ReadBandwidth:
        rate = next(rates) * 1e9
        return ReadBandwidth(tuple(cpus), rate, (rate,) * peak.SLICE, (0.5,) * peak.SLICE)

    monkeypatch.setattr(peak, "measure", busy)
    seen = [(some, peak.known(some, root=root)) for some in peak.slices([(0,), (0, 1)], root=root)]
    assert [some for some, _ in seen] == [(0,), (0, 1)] * (peak.WINDOWS // peak.SLICE)
    assert seen[0][1] is None and seen[2][1] == Peak(10e9, (0,), at_least=True)
    assert peak.known((0, 1), root=root) == Peak(19e9, (0, 1), at_least=True)


def test_an_incomplete_measurement_replaces_no_whole_one_and_is_not_called_disturbed(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, rates, shares = tree("epyc-9354p-nps4"), itertools.count(10), itertools.repeat(1.0)

    def read_on(cpus: Sequence[int], **_: object) -> ReadBandwidth:
        rate = next(rates) * 1e9
        return ReadBandwidth(tuple(cpus), rate, (rate,) * peak.SLICE, (next(shares),) * peak.SLICE)

    def measured(n_slices: int = 99) -> Peak | None:
        for _ in itertools.islice(peak.slices([(0, 1)], root=root), n_slices + 1):  # the last one is not measured
            pass
        return peak.known((0, 1), root=root)

    monkeypatch.setattr(peak, "measure", read_on)
    assert measured(2) == Peak(11e9, (0, 1), at_least=True, unfinished=True)
    assert measured() == Peak(16e9, (0, 1))  # whole, whatever was left of the one before
    assert measured(1) == Peak(16e9, (0, 1))
    assert measured() == Peak(22e9, (0, 1))
    shares = itertools.repeat(0.5)
    assert measured() == Peak(22e9, (0, 1))
    peak.raise_to(Peak(25e9, (0, 1), at_least=True), root=root)
    assert measured() == Peak(32e9, (0, 1), at_least=True)


def test_f12_measures_and_shows_the_cores_of_the_loaded_model(tree: Tree, measured: list[tuple[int, ...]]) -> None:
    """It may be tuned to others than those of the settings."""
    reader, on = MachineReader(tree("epyc-9354")), ((8, 9), "local")
    before = reader.facts(PlacementSpec(), on)
    list(reader.measure(before.topology, on, lambda: False))
    assert {cpu for cpus in measured for cpu in cpus} == {8, 9}
    now, seen = reader.now(before, on, None)
    assert before.peaks.all_cores is not None and before.peaks.all_cores.estimated
    assert now.peaks.all_cores is not None and now.peaks.all_cores.least
    assert now.peaks.all_cores.cpus == before.peaks.all_cores.cpus == (8, 9)
    assert reader.now(before, on, seen)[0].peaks == before.peaks  # nothing was measured since
