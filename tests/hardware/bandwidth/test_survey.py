"""Tests what a survey of a machine measures, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cpuchat.hardware.bandwidth import read_bandwidth
from cpuchat.hardware.bandwidth import read_bandwidth as bandwidth_cache
from cpuchat.hardware.bandwidth import read_bandwidth as surveying
from cpuchat.hardware.bandwidth.read_bandwidth import ProbeFailed, ReadBandwidth, Survey, cached_survey, survey
from cpuchat.hardware.machine import MachineReader
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.hardware.topology import read_topology
from tests.hardware.trees import Machine, server

pytestmark = pytest.mark.slow


def surveyed(root: Path, **more: Any) -> tuple[Survey, list[str]]:
    seen: list[str] = []
    found = survey(read_topology(root), lambda done, total, what: seen.append(what), root=root, **more)
    return found, seen


def test_a_survey_of_a_server(tree: Callable[[str], Path], measured: list[tuple[int, ...]]) -> None:
    root = tree("epyc-9354")
    found, seen = surveyed(root)
    assert found.all_cores.cpus == tuple(range(32))
    assert found.one_core.cpus == (0,)
    assert found.l3_group is not None and found.l3_group.cpus == (0, 1, 2, 3)
    assert found.fabric_link is None
    assert {n: len(one.cpus) for n, one in (found.per_core_counts or {}).items()} == {1: 8, 2: 16, 3: 24, 4: 32}
    assert (found.per_core_counts or {})[1].cpus == (0, 4, 8, 12, 16, 20, 24, 28)
    assert found.matrix == {}
    assert found.knee == 4  # 10 GB/s for every core
    assert len(measured) == len(set(measured)) == len(seen)


def test_two_l3_groups_behind_one_link(tree: Callable[[str], Path], measured: list[tuple[int, ...]]) -> None:
    found, _ = surveyed(tree("epyc-9754"))
    assert found.l3_group is not None and len(found.l3_group.cpus) == 8
    assert found.fabric_link is not None and found.fabric_link.cpus == tuple(range(16))


def test_two_nodes_have_a_matrix(tree: Callable[[str], Path], measured: list[tuple[int, ...]]) -> None:
    found, _ = surveyed(tree("2x-epyc-7543"), memory="interleave:0-1")
    assert sorted(found.matrix) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found.matrix[1, 0].cpus == tuple(range(32, 64))
    assert found.matrix[1, 0].node == 0


def test_the_knee_is_the_fewest_that_are_as_good() -> None:
    def one(rate: float) -> ReadBandwidth:
        return ReadBandwidth((0,), rate, (rate,))

    counts = {1: one(200e9), 2: one(350e9), 3: one(360e9), 4: one(359e9)}
    assert Survey(one(25e9), one(359e9), per_core_counts=counts).knee == 2
    assert Survey(one(25e9), one(359e9)).knee is None


def test_a_survey_is_kept_with_its_peak(tree: Callable[[str], Path], measured: list[tuple[int, ...]]) -> None:
    root = tree("2x-epyc-7543")
    topology = read_topology(root)
    assert cached_survey(topology, root=root) is None
    found, _ = surveyed(root, memory="interleave:0-1")
    assert cached_survey(topology, memory="interleave:0-1", root=root) == found
    assert cached_survey(topology, cpus=(0, 1), memory="interleave:0-1", root=root) is None
    peak = read_bandwidth.known_peak(found.all_cores.cpus, "interleave:0-1", root=root)
    assert peak is not None and peak.bytes_per_s == found.all_cores.bytes_per_s
    key = bandwidth_cache._key("survey", found.all_cores.cpus, "interleave:0-1", root)
    bandwidth_cache._cache().put(key, {"one_core": 1})
    assert cached_survey(topology, memory="interleave:0-1", root=root) is None


def test_a_survey_of_another_policy_is_not_shown(tree: Callable[[str], Path], measured: list[tuple[int, ...]]) -> None:
    root = tree("2x-epyc-7543")
    found, _ = surveyed(root, memory="bind:0")
    assert cached_survey(read_topology(root), memory="interleave:0-1", root=root) is None
    assert MachineReader(root).facts().survey is None  # "auto" interleaves over both nodes
    assert MachineReader(root).facts(PlacementSpec(memory="bind:0")).survey == found
    assert MachineReader(root).facts(PlacementSpec(memory="bind:7")).survey is None


def test_only_chosen_cores_are_measured(tree: Callable[[str], Path], measured: list[tuple[int, ...]]) -> None:
    found, _ = surveyed(tree("epyc-9354"), cpus=(9, 8))
    assert {cpu for cpus in measured for cpu in cpus} == {8, 9}
    assert found.all_cores.cpus == (8, 9)
    assert found.knee == 2


def test_what_fails_is_noted_but_not_all_cores(tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree("2x-epyc-7543")

    def instead(cpus: tuple[int, ...], *, node: int | None = None, **_: object) -> ReadBandwidth:
        if node == 1:
            raise ProbeFailed("Memory could not be bound to node 1: not permitted")
        return ReadBandwidth(cpus, 1e10, (1e10,), node)

    monkeypatch.setattr(surveying, "measure", instead)
    found, _ = surveyed(root)
    assert sorted(found.matrix) == [(0, 0), (1, 0)]
    assert [note.partition(":")[0] for note in found.notes] == ["node 0 reading node 1", "node 1 reading node 1"]

    def never(*_: object, **__: object) -> ReadBandwidth:
        raise ProbeFailed("no")

    monkeypatch.setattr(surveying, "measure", never)
    with pytest.raises(ProbeFailed):
        surveyed(root)


def test_time_runs_out(
    tree: Callable[[str], Path], measured: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree("2x-epyc-7543")
    topology = read_topology(root)
    ticks = iter(range(0, 10_000, 20))
    monkeypatch.setattr(surveying, "monotonic", lambda: next(ticks))
    found = survey(topology, root=root)
    assert found.all_cores and found.one_core
    assert "within the time limit" in found.notes[0] and "node 1 reading node 0" in found.notes[0]
    assert len(measured) == 2


@pytest.mark.parametrize("name", ["vm-without-caches", "garbage", "hybrid-desktop", "container", "offline", "vm"])
def test_every_machine_can_be_surveyed(tree: Callable[[str], Path], measured: list[tuple[int, ...]], name: str) -> None:
    found, _ = surveyed(tree(name))
    assert found.one_core.cpus[0] in found.all_cores.cpus
    assert msgspec.json.decode(msgspec.json.encode(found))["one_core"]["cpus"] == [found.one_core.cpus[0]]


def test_of_many_nodes_only_the_first_reads_from_all(
    tmp_path: Path, tree: Callable[[str], Path], measured: list[tuple[int, ...]]
) -> None:
    four, _ = surveyed(tree("epyc-9354p-nps4"))
    assert len(four.matrix) == 16
    machine = Machine("AMD EPYC 9354 32-Core Processor", 25, 17, 8, 4, sockets=2, nodes=4)
    eight, _ = surveyed(server(tmp_path / "eight", machine))
    assert sorted(eight.matrix) == [(0, node) for node in range(8)]
