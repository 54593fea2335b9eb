"""Tests ways to divide each simulated machine, which one is recommended and why."""

from __future__ import annotations

import pytest

from cpuchat.config.settings import Settings
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.placement.placement import (
    ALL_CORES,
    ONE_NODE,
    PlacementCandidate,
    PlacementSpec,
    candidates,
    offered,
    place,
)
from cpuchat.hardware.topology import Topology
from tests.hardware.conftest import Machine
from tests.hardware.trees import NAMES


def named(topology: Topology) -> dict[str, PlacementCandidate]:
    return {candidate.name: candidate for candidate in candidates(topology)}


@pytest.mark.parametrize(
    ("name", "cores", "reason"),
    [
        ("epyc-9754", "0-127", "All 128 cores."),
        ("2x-epyc-7543", "0-63", "All 64 cores, with memory interleaved over 2 nodes."),
        ("hybrid-desktop", "0,2,4,6,8,10,12,14", "The 8 performance cores: the 4 efficient ones would slow"),
        ("container", "8-10,12-14", "6 of 8 cores: the cgroup CPU quota is 6.5."),
        ("vm-without-caches", "0-3", "All 4 cores."),
        ("garbage", "2", "Only one core."),
    ],
)
def test_recommended(machine: Machine, name: str, cores: str, reason: str) -> None:
    first = candidates(machine(name))[0]
    assert (first.name, format_cpu_list(first.placement.cpus)) == (ALL_CORES, cores)
    assert first.spec == PlacementSpec()
    assert first.reason.startswith(reason)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("epyc-9334", [ALL_CORES, "4 cores per L3 group"]),
        ("epyc-9354p-nps4", [ALL_CORES, "2 cores per L3 group", ONE_NODE]),
        ("epyc-9754", [ALL_CORES, "4 cores per L3 group"]),
        ("2x-epyc-7543", [ALL_CORES, "2 cores per L3 group", ONE_NODE]),
        ("hybrid-desktop", [ALL_CORES]),
        ("vm-without-caches", [ALL_CORES]),
    ],
)
def test_what_a_machine_allows(machine: Machine, name: str, names: list[str]) -> None:
    assert [candidate.name for candidate in candidates(machine(name))] == names


@pytest.mark.parametrize("name", NAMES)
def test_the_words_of_a_placement_give_its_cores_and_are_settings(machine: Machine, name: str) -> None:
    topology = machine(name)
    for candidate in candidates(topology):
        placement = candidate.placement
        assert place(topology, candidate.spec) == placement
        assert candidate.reason.endswith(".")
        assert PlacementSpec.of(candidate.spec.applied_to(Settings())) == candidate.spec
        if topology.quota is not None:
            assert len(placement.cpus) <= topology.quota


def test_cores_of_each_placement(machine: Machine) -> None:
    two = named(machine("2x-epyc-7543"))
    node = two[ONE_NODE]
    assert (node.spec.cores, node.spec.memory_policy, len(node.placement.cpus)) == ("node:0", "bind:0", 32)
    assert "must fit the 275 GB of its memory" in node.reason
    assert len(two["2 cores per L3 group"].placement.cpus) == 32


def test_what_is_in_use_keeps_its_words(machine: Machine) -> None:
    topology = machine("epyc-9354")
    few, every = PlacementSpec(cores="2/l3", threads=16), PlacementSpec(cores="all")
    assert [one.spec for one in offered(topology, [few, every])] == [every, few]
    assert offered(topology, [PlacementSpec(cores="l3:0-3")]) == candidates(topology)
