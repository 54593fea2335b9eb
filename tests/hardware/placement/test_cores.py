"""Tests how a list of cores is resolved on each simulated machine, the errors, and how busy cores are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.placement.cores import BusyCores, allowed_part, choose_cores
from cpuchat.hardware.topology import Core, Topology
from tests.hardware.conftest import Machine
from tests.hardware.trees import write


def per_group(topology: Topology, cpus: tuple[int, ...]) -> list[int]:
    counts = Counter(group.index for cpu in cpus if (group := topology.l3_of(cpu)) is not None)
    return [counts[group.index] for group in topology.l3_groups]


@pytest.mark.parametrize("name", ["2x-epyc-7543", "hybrid-desktop", "container", "offline", "garbage"])
def test_every_count_that_is_possible_is_spread_and_allowed(machine: Machine, name: str) -> None:
    topology = machine(name)
    most = len(topology.allowed_cores)
    if topology.quota is not None:
        most = min(most, int(topology.quota))
    for n in range(1, most + 1):
        choice = choose_cores(topology, "auto", n)
        assert len(choice.cpus) == n and choice.cpus == tuple(sorted(set(choice.cpus)))
        assert set(choice.cpus) <= set(topology.allowed) and choice.reason.endswith(".")
        assert len({topology.core_of(cpu) for cpu in choice.cpus}) == n, "a core each"
    for n in (-1, most + 1, 100_000):
        with pytest.raises(UsageError, match=rf"Cannot use .*Choose 1 to {most}, or 0"):
            choose_cores(topology, "auto", n)


@pytest.mark.parametrize(
    ("name", "n", "groups"),
    [
        ("epyc-9354", 12, [2, 2, 2, 2, 1, 1, 1, 1]),
        # One of each pair behind a link first, then the other.
        ("epyc-9754", 8, [1, 0] * 8),
        # Sockets alike before anything else.
        ("2x-epyc-7543", 18, [2, 1, 1, 1, 1, 1, 1, 1] * 2),
        # Nodes alike: three of each of four.
        ("epyc-9354p-nps4", 12, [2, 1] * 4),
    ],
)
def test_fewer_threads_use_all_paths_to_memory(machine: Machine, name: str, n: int, groups: list[int]) -> None:
    topology = machine(name)
    assert per_group(topology, choose_cores(topology, "all", n).cpus) == groups


def test_threads_roam_where_every_program_would_choose_the_same_cpus(machine: Machine) -> None:
    """Two containers with a quota and without a cpuset; two programs of one thread each."""
    whole = machine("epyc-9354")
    limited = choose_cores(replace(whole, quota=4.0))
    assert len(limited.cpus) == 4 and limited.roams == tuple(range(32))
    assert limited.reason == "4 of 32 physical cores: the cgroup CPU quota is 4, and threads move to idle ones."
    one = choose_cores(machine("vm"), "auto", 1)
    assert len(one.cpus) == 1 and len(one.roams) > 1
    assert choose_cores(whole).roams == choose_cores(whole, "auto", 16).roams == ()  # spread over L3 groups
    assert choose_cores(whole, "0-7", 4).roams == choose_cores(machine("container")).roams == ()  # these are its own


@pytest.mark.parametrize(
    ("name", "spec", "cpus", "what"),
    [
        ("2x-epyc-7543", "auto", "0-63", "The 64 physical cores: SMT siblings do not speed up decoding."),
        ("offline", "auto", "0-27", "The 28 physical cores."),
        ("vm-without-caches", "auto", "0-3", "The 4 physical cores."),
        ("hybrid-desktop", "auto", "0,2,4,6,8,10,12,14",
         "The 8 performance cores: the 4 efficient ones would slow them down."),
        ("container", "auto", "8-10,12-14",
         "6 of 8 physical cores that this process may use (the machine has 32): the cgroup CPU quota is 6.5."),
        ("epyc-9354", "l3:0,2-3", "0-3,8-15", "The 12 cores of L3 groups 0,2-3."),
        ("epyc-9354p-nps4", "node:1", "8-15", "The 8 cores of NUMA node 1."),
        ("2x-epyc-7543", "socket:1", "32-63", "The 32 cores of socket 1."),
        ("2x-epyc-7543", "0-3,33", "0-3,33", "The 5 CPUs in the list 0-3,33."),
        ("epyc-9654", "4/l3", "0-3,8-11,16-19,24-27,32-35,40-43,48-51,56-59,64-67,72-75,80-83,88-91",
         "The 48 cores, 4 of each L3 group: each group has its own memory link."),
        ("hybrid-desktop", "all", "0,2,4,6,8,10,12,14,16-19",
         "The 12 physical cores: SMT siblings do not speed up decoding."),
    ],
)  # fmt: skip
def test_which_cores_are_named(machine: Machine, name: str, spec: str, cpus: str, what: str) -> None:
    choice = choose_cores(machine(name), spec)
    assert (format_cpu_list(choice.cpus), choice.reason, choice.notes) == (cpus, what, ())


@pytest.mark.parametrize(
    ("name", "spec", "n", "message"),
    [
        ("epyc-9354", "auto", 33, r"may use 64 CPUs \(32 physical cores\).*SMT siblings; --cores 0-63"),
        ("epyc-9354", "l3:0", 5, "the cores l3:0 are 4 CPUs. Choose 1 to 4"),
        ("container", "auto", 7, r"cgroup CPU quota is 6\.5\. Choose 1 to 6"),
        ("hybrid-desktop", "auto", 13, r"\(12 physical cores\)"),
        ("epyc-9354", "some", 0, "does not name any cores.*l3:0"),
        ("epyc-9354", "l3:8", 0, r"L3 group 8 does not exist\. Choose from l3:0-7"),
        ("epyc-9354", "socket:0-1", 0, r"Socket 1 does not exist\. Choose from socket:0"),
        ("epyc-9354", "7-4", 0, r"7-4 in .7-4. is reversed\. Use 4-7"),
        ("epyc-9354", "60-64", 0, r"CPU 64 does not exist or is offline\. Choose from 0-63"),
        ("container", "0-3", 0, r"CPU 0 is not allowed for this process\. Choose from 8-15,40-47"),
        ("container", "l3:0", 0, r"L3 group 0 has no core that this process may use\. Choose from l3:2-3"),
        ("epyc-9354", "5/l3", 0, r"an L3 group has 4 cores that this process may use\. Choose 1/l3 to 4/l3"),
        ("vm-without-caches", "l3:0", 0, "L3 groups of this machine are not known"),
    ],
)
def test_what_is_not_there_is_named(machine: Machine, name: str, spec: str, n: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_cores(machine(name), spec, n)


def test_second_threads_only_when_listed_and_with_a_word_of_warning(machine: Machine) -> None:
    choice = choose_cores(machine("epyc-9354"), "0-3,32,33")
    assert choice.cpus == (0, 1, 2, 3, 32, 33)
    assert "4 threads of 6 share a core" in choice.notes[0]


def test_more_threads_than_fast_cores_take_efficient_ones(machine: Machine) -> None:
    topology = machine("hybrid-desktop")
    choice = choose_cores(topology, "auto", 10)
    assert choice.cpus == (0, 2, 4, 6, 8, 10, 12, 14, 16, 17)
    assert choice.reason == "10 cores, 2 of them efficient cores, which are slower."
    # Efficient ones alone are all there is.
    assert choose_cores(replace(topology, allowed=(16, 17, 18))).cpus == (16, 17, 18)


def test_a_quota_below_one_cpu_leaves_one(machine: Machine) -> None:
    assert len(choose_cores(replace(machine("container"), quota=0.5)).cpus) == 1


def test_a_hybrid_cpu_without_smt_gets_a_thread_per_performance_core() -> None:
    cores = tuple(Core(cpu, (cpu,), 0, 0, None, "performance" if cpu < 8 else "efficient") for cpu in range(20))
    whole = Topology(cores=cores, online=tuple(range(20)), allowed=tuple(range(20)))
    assert choose_cores(whole).cpus == tuple(range(8))
    assert choose_cores(replace(whole, allowed=(6, 7, 8, 9))).cpus == (6, 7)


@pytest.mark.parametrize(
    ("name", "spec", "allowed"),
    [
        ("container", "0-15", "8-15"),
        ("container", "0-8,40,63", "8,40"),
        ("container", "0-3", ""),
        ("container", "l3:0-3", "l3:2-3"),
        ("container", "socket:1", ""),
        ("container", "8/l3", ""),
        ("offline", "26-31", "26-27"),
        ("container", "auto", "auto"),
    ],
)
def test_the_allowed_part_of_a_list_keeps_its_words(machine: Machine, name: str, spec: str, allowed: str) -> None:
    assert allowed_part(machine(name), spec) == allowed


def test_cores_that_were_busy_since_the_last_look(tmp_path: Path) -> None:
    first = "cpu 1 1 1 1 1 1 1 1 0 0\ncpu0 100 0 0 900 0 0 0 0 50 0\ncpu1 0 0 0 1000 0 0 0 0 0 0\ncpu3 5 0 0 5 0 0 0 0"
    then = "cpu 1 1 1 1 1 1 1 1 0 0\ncpu0 150 20 10 910 10 0 0 0 90 0\ncpu1 10 0 0 1060 20 0 0 10 0 0"
    busy = BusyCores(write(tmp_path, {"proc/stat": first}))
    assert busy.since_last({0, 1}) is None
    write(tmp_path, {"proc/stat": then})
    assert busy.since_last({0, 1}) == 0.8 + 0.2
    write(tmp_path, {"proc/stat": first})  # the counters went back, as after hibernation
    assert busy.since_last({0, 1, 2}) == 0
    write(tmp_path, {"proc/stat": "cpu0 150 0 0 850 0 0 0 0"})  # idle time alone did: no more than one core is busy
    assert busy.since_last({0}) == 1
