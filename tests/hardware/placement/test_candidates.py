"""Tests ways to divide each simulated machine, which one is recommended and why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cpuchat.config.settings import Settings
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.placement.placement import (
    ONE_NODE,
    OWN_L3,
    OWN_SOCKET,
    SHARED,
    PlacementCandidate,
    PlacementSpec,
    candidates,
    offered,
    place,
)
from cpuchat.hardware.topology import Topology
from tests.hardware.trees import NAMES

Machine = Callable[[str], Topology]


def named(topology: Topology) -> dict[str, PlacementCandidate]:
    return {candidate.name: candidate for candidate in candidates(topology)}


@pytest.mark.parametrize(
    ("name", "cores", "reason"),
    [
        ("epyc-9754", "0-127", "All 128 cores, shared: an L3 group of its own would give the draft model"),
        ("2x-epyc-7543", "0-63", "All 64 cores, shared, with memory interleaved over 2 nodes."),
        ("hybrid-desktop", "0,2,4,6,8,10,12,14", "The 8 performance cores, shared: the 4 efficient ones would slow"),
        ("container", "8-10,12-14", "6 of 8 cores, shared: the cgroup CPU quota is 6.5."),
        ("vm-without-caches", "0-3", "All 4 cores, shared."),
        ("garbage", "2", "Only one core."),
    ],
)
def test_recommended(machine: Machine, name: str, cores: str, reason: str) -> None:
    first = candidates(machine(name))[0]
    assert (first.name, format_cpu_list(first.placement.cpus), first.placement.draft_cpus) == (SHARED, cores, ())
    assert first.spec == PlacementSpec(draft_cores="shared")
    assert first.reason.startswith(reason)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("epyc-9334", [SHARED, OWN_L3, "4 cores per L3 group"]),
        ("epyc-9354p-nps4", [SHARED, OWN_L3, "2 cores per L3 group", ONE_NODE]),
        ("epyc-9754", [SHARED, OWN_L3, "4 cores per L3 group"]),
        ("2x-epyc-7543", [SHARED, OWN_L3, "2 cores per L3 group", OWN_SOCKET, ONE_NODE]),
        ("hybrid-desktop", [SHARED]),
        ("vm-without-caches", [SHARED]),
    ],
)
def test_what_a_machine_allows(machine: Machine, name: str, names: list[str]) -> None:
    assert [candidate.name for candidate in candidates(machine(name))] == names


@pytest.mark.parametrize("name", NAMES)
def test_the_words_of_a_placement_give_its_cores_and_are_settings(machine: Machine, name: str) -> None:
    topology = machine(name)
    for candidate in candidates(topology):
        placement = candidate.placement
        assert place(topology, candidate.spec, with_draft=True) == placement
        assert set(placement.cpus).isdisjoint(placement.draft_cpus) and candidate.reason.endswith(".")
        assert PlacementSpec.of(candidate.spec.applied_to(Settings())) == candidate.spec
        if topology.quota is not None:
            assert len(placement.cpus) + len(placement.draft_cpus) <= topology.quota


def test_cores_of_each_placement(machine: Machine) -> None:
    two = named(machine("2x-epyc-7543"))
    apart, node = two[OWN_SOCKET].placement, two[ONE_NODE]
    assert (format_cpu_list(apart.cpus), format_cpu_list(apart.draft_cpus)) == ("0-31", "32-63")
    assert (node.spec.cores, node.spec.memory_policy, len(node.placement.cpus)) == ("node:0", "bind:0", 32)
    assert "must fit the 275 GB of its memory" in node.reason
    pairs = named(machine("epyc-9754"))
    assert (pairs[OWN_L3].spec.draft_cores, len(pairs[OWN_L3].placement.cpus)) == ("l3:15", 120)


def test_what_is_in_use_keeps_its_words(machine: Machine) -> None:
    topology = machine("epyc-9354")
    apart, every = PlacementSpec(draft_cores="l3:7"), PlacementSpec(cores="all")
    assert [one.spec for one in offered(topology, [apart, every])][:2] == [every, apart]
    assert offered(topology, [PlacementSpec(cores="l3:0-3")]) == candidates(topology)
