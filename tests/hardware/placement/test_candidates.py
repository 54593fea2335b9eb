"""Tests ways to divide each simulated machine, which one is recommended and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cpuchat.config.settings import Settings
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.placement.placement import (
    ONE_NODE,
    OWN_L3,
    OWN_LINK,
    OWN_SOCKET,
    SHARED,
    PlacementCandidate,
    PlacementSpec,
    candidates,
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
        (
            "epyc-9334", "0-31",
            "All 32 cores, shared: an L3 group of its own would give the draft model one of 4 links "
            "to memory, and take it from the target.",
        ),
        (
            "epyc-9354", "0-31",
            "All 32 cores, shared: an L3 group of its own would give the draft model one of 8 links "
            "to memory, and take it from the target.",
        ),
        (
            "epyc-9354p-nps4", "0-31",
            "All 32 cores, shared, with memory interleaved over 4 nodes: equivalent to "
            "NPS1.",
        ),
        (
            "epyc-9654", "0-95",
            "All 96 cores, shared: an L3 group of its own would give the draft model one of 12 "
            "links to memory, and take it from the target.",
        ),
        (
            "epyc-9754", "0-127",
            "All 128 cores, shared: pairs of L3 groups share a fabric link, so a group for the draft "
            "model would use part of one of 8 links and slow its neighbor down.",
        ),
        (
            "2x-epyc-7543", "0-63",
            "All 64 cores, shared, with memory interleaved: weights are read from both sockets.",
        ),
        (
            "xeon-6430", "0-31",
            "All 32 cores, shared: they share one L3 cache and one memory link.",
        ),
        (
            "hybrid-desktop", "0,2,4,6,8,10,12,14",
            "The 8 performance cores, shared: the 4 efficient ones would slow them down.",
        ),
        (
            "container", "8-10,12-14",
            "6 of 8 cores, shared: the cgroup CPU quota is 6.5.",
        ),
        (
            "vm", "0-7",
            "All 8 cores, shared: a virtual machine's L3 groups and nodes may not be real.",
        ),
        (
            "vm-without-caches", "0-3",
            "All 4 cores, shared: a virtual machine's L3 groups and nodes may not be real.",
        ),
        (
            "offline", "0-27",
            "All 28 cores, shared: an L3 group of its own would give the draft model one of 7 links "
            "to memory, and take it from the target.",
        ),
        ("garbage", "2", "Only one core."),
    ],
)  # fmt: skip
def test_recommended(machine: Machine, name: str, cores: str, reason: str) -> None:
    first = candidates(machine(name))[0]
    assert (first.name, format_cpu_list(first.placement.cpus), first.placement.draft_cpus) == (SHARED, cores, ())
    assert first.spec == PlacementSpec(draft_cores="shared")
    assert first.reason == reason


def test_every_tree_has_a_recommendation_that_is_asserted() -> None:
    asserted = {case[0] for case in test_recommended.pytestmark[0].args[1]}  # type: ignore[attr-defined]
    assert asserted == set(NAMES)


def test_a_machine_that_tells_no_caches(machine: Machine) -> None:
    topology = replace(machine("vm-without-caches"), virtual="")
    assert candidates(topology)[0].reason == ("All 4 cores, shared: the L3 groups are not known.")


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("epyc-9334", [SHARED, OWN_L3, "4 cores per L3 group"]),
        ("epyc-9354", [SHARED, OWN_L3, "2 cores per L3 group"]),
        ("epyc-9354p-nps4", [SHARED, OWN_L3, "2 cores per L3 group", ONE_NODE]),
        ("epyc-9754", [SHARED, OWN_L3, OWN_LINK, "4 cores per L3 group"]),
        ("2x-epyc-7543", [SHARED, OWN_L3, "2 cores per L3 group", OWN_SOCKET, ONE_NODE]),
        ("hybrid-desktop", [SHARED]),
        ("xeon-6430", [SHARED]),
        ("vm-without-caches", [SHARED]),
        ("garbage", [SHARED]),
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
    assert (node.spec.cores, node.spec.memory, len(node.placement.cpus)) == ("node:0", "bind:0", 32)
    assert "must fit the 275 GB of its memory" in node.reason
    pairs = named(machine("epyc-9754"))
    assert (pairs[OWN_L3].spec.draft_cores, len(pairs[OWN_L3].placement.cpus)) == ("l3:15", 120)
    assert (pairs[OWN_LINK].spec.draft_cores, len(pairs[OWN_LINK].placement.cpus)) == ("l3:14-15", 112)


@pytest.mark.parametrize("quota", [0.5, 1.0, 2.5, 6.5])
def test_no_placement_takes_more_threads_than_the_control_group_has_time_for(machine: Machine, quota: float) -> None:
    found = named(replace(machine("container"), quota=quota))
    assert SHARED in found
    for candidate in found.values():
        placement = candidate.placement
        assert len(placement.cpus) + len(placement.draft_cpus) <= max(int(quota), 1), candidate.name
    assert OWN_L3 not in found or quota == 6.5
    assert "2 cores per L3 group" not in found or quota == 6.5
