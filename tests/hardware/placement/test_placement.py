"""Tests what the words of a placement mean on simulated machines, and what is said where they mean nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.config import settings
from cpuchat.config.settings import Settings
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.placement.placement import PlacementError, PlacementSpec, check_given, place
from cpuchat.hardware.sysfs import Node
from cpuchat.hardware.topology import Core, Topology
from tests.hardware.conftest import Machine


def test_words_become_cores_and_nodes(machine: Machine) -> None:
    topology = machine("2x-epyc-7543")
    found = place(topology, PlacementSpec())
    assert (found.cpus, found.memory_policy.words) == (tuple(range(64)), "interleave:0-1")
    assert place(topology, PlacementSpec(cores="socket:1")).cpus == tuple(range(32, 64))


@pytest.mark.parametrize(
    ("spec", "part", "says"),
    [
        (PlacementSpec(cores="l3:9"), "cores", "L3 group 9 does not exist"),
        (PlacementSpec(cores="99999"), "cores", "does not name any cores"),
        (PlacementSpec(cores="node:4"), "cores", "NUMA node 4"),
        (PlacementSpec(memory_policy="bind:3"), "memory_policy", "Node 3 has no memory"),
        (PlacementSpec(threads=33), "threads", "Cannot use 33 threads"),
    ],
)
def test_what_is_wrong_is_told_by_its_part(machine: Machine, spec: PlacementSpec, part: str, says: str) -> None:
    with pytest.raises(PlacementError) as caught:
        place(machine("epyc-9354"), spec)
    ((name, problem),) = caught.value.problems.items()
    assert name == part and says in problem and str(caught.value) == problem


def many_cores(allowed: range) -> Topology:
    """A machine of 768 cores of which this process may use some."""
    everything = tuple(range(768))
    return Topology(
        cores=tuple(Core(cpu, (cpu,), 0, 0, None) for cpu in everything),
        nodes=(Node(0, everything, 0),),
        online=everything,
        allowed=tuple(allowed),
    )


def test_threads_stay_below_the_end_of_the_cpu_masks() -> None:
    topology = many_cores(range(768))
    assert len(place(topology, PlacementSpec(threads=64)).cpus) == 64
    placed = place(topology, PlacementSpec())
    assert placed.cpus == tuple(range(512))
    assert placed.notes == ("llama.cpp pins threads to CPUs below 512 only: 256 cores are not used.",)
    with pytest.raises(UsageError, match="Cannot use 768 threads"):
        place(topology, PlacementSpec(threads=768))
    with pytest.raises(UsageError, match="CPU 600 is not allowed"):
        place(topology, PlacementSpec(cores="600-603"))
    for spec in (PlacementSpec(), PlacementSpec(cores="600")):
        with pytest.raises(UsageError, match=r"CPUs 600-639.*below 512") as caught:
            place(many_cores(range(600, 640)), spec)
        assert "taskset" in caught.value.hint


def test_it_is_what_the_settings_say() -> None:
    spec = PlacementSpec("4/l3", "interleave", 8)
    assert PlacementSpec.of(spec.applied_to(Settings())) == spec
    settings.update(spec.changes())
    assert PlacementSpec.of(settings.load()) == spec


SAVED = [
    (PlacementSpec("0-9"), "8-9", ["Cores 0-9 → 8-9 (allowed CPUs: 8-15,40-47, quota: 6.5)."]),
    (PlacementSpec(threads=16), "8-10,12-14", ["Threads 16 → 6 (allowed CPUs: 8-15,40-47, quota: 6.5)."]),
    (PlacementSpec("l3:0,3"), "12-15", ["Cores l3:0,3 → l3:3 (allowed CPUs: 8-15,40-47, quota: 6.5)."]),
    (
        PlacementSpec(memory_policy="bind:3"), "8-10,12-14",
        ["Memory policy bind:3 → auto: node 3 has no memory available to this process."],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "used", "notes"), SAVED)
def test_settings_of_another_machine_use_what_is_allowed_here(
    machine: Machine, spec: PlacementSpec, used: str, notes: list[str]
) -> None:
    container = machine("container")
    found = place(container, replace(spec, is_saved=True))
    told = [note for note in found.notes if "→" in note]
    assert told == notes
    assert format_cpu_list(found.cpus) == used
    with pytest.raises(PlacementError):
        place(container, spec)


@pytest.mark.parametrize(
    ("spec", "names", "message"),
    [
        (PlacementSpec("0-9"), ["cores"], ""),  # a part of it is allowed
        (PlacementSpec("0-3"), ["cores"], "CPU 0 is not allowed for this process. Choose from 8-15,40-47."),
        (PlacementSpec("0-3", threads=2), ["threads"], ""),  # these cores are a setting
        (PlacementSpec("9", threads=2), ["cores", "threads"], "Cannot use 2 threads: the cores 9 are 1 CPUs."),
        (PlacementSpec(memory_policy="bind:3"), ["memory_policy"], "Node 3 has no memory available to this process."),
        (PlacementSpec("l3:0"), ["cores"], "L3 group 0 has no core"),
    ],
)
def test_what_is_given_for_this_run_is_used_or_refused(
    machine: Machine, spec: PlacementSpec, names: list[str], message: str
) -> None:
    container = machine("container")
    spec = replace(spec, is_saved=True)
    if not message:
        check_given(container, spec, names)
        return
    with pytest.raises(UsageError) as raised:
        check_given(container, spec, names)
    assert str(raised.value).startswith(message[:20])
