"""Tests what a machine is made of, read from simulated trees of real machines, and from this one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cpuchat.hardware.diagnostics import examine, gather_facts
from cpuchat.hardware.lists import format_cpu_list, parse_cpu_list
from cpuchat.hardware.placement.placement import PlacementSpec, candidates, place
from cpuchat.hardware.sysfs import Node, efficient_cpus
from cpuchat.hardware.topology import Core, Instructions, L3Group, Topology, instructions, read_topology
from cpuchat.present import machine as words
from cpuchat.present.machine import caches_words, nodes_words
from cpuchat.telemetry.units import gigabytes
from tests.hardware.conftest import Machine
from tests.hardware.knob_files import TOPOLOGY
from tests.hardware.trees import CPUS, GIB, NAMES, NODES, make_tree, server, status, write
from tests.hardware.trees import Machine as Server

MIB = 1 << 20


def check_consistent(topology: Topology) -> None:
    """Assert what must hold on every machine, sane or not."""
    everywhere = [cpu for core in topology.cores for cpu in core.cpus]
    assert sorted(everywhere) == list(topology.online), "each online CPU is in one core"
    assert [core.index for core in topology.cores] == list(range(len(topology.cores)))
    assert set(topology.allowed) <= set(topology.online) and topology.allowed == tuple(sorted(set(topology.allowed)))
    assert topology.allowed_cores
    for group in topology.l3_groups:
        assert all(topology.cores[index].l3 == group.index for index in group.cores)
        assert group.index in topology.fabric_links[group.fabric_link]
        assert set(group.cpus) == {cpu for index in group.cores for cpu in topology.cores[index].cpus}
    assert sorted(index for link in topology.fabric_links for index in link) == [g.index for g in topology.l3_groups]
    assert sum(core.l3 is not None for core in topology.cores) == sum(len(g.cores) for g in topology.l3_groups)
    numbers = {node.number for node in topology.nodes}
    assert {core.node for core in topology.cores} <= numbers and set(topology.allowed_nodes) <= numbers
    assert {core.package for core in topology.cores} == set(topology.packages)
    assert topology.name


@pytest.mark.parametrize("name", NAMES)
def test_every_tree_is_read_without_contradictions(machine: Machine, name: str) -> None:
    check_consistent(machine(name))


@pytest.mark.parametrize(
    ("name", "groups", "per_group", "mib", "words"),
    [
        ("epyc-9354p-nps4", 8, 4, 32, "EPYC 9354P · 1 socket · NPS4 · 8 L3 groups × 4 cores, 64 threads"),
        ("epyc-9754", 16, 8, 16, "EPYC 9754 · 1 socket · NPS1 · 16 L3 groups × 8 cores, 256 threads"),
        ("2x-epyc-7543", 16, 4, 32, "EPYC 7543 · 2 sockets · NPS1 · 16 L3 groups × 4 cores, 128 threads"),
    ],
)
def test_servers(machine: Machine, name: str, groups: int, per_group: int, mib: int, words: str) -> None:
    topology = machine(name)
    n = groups * per_group
    assert topology.name == words
    assert (topology.vendor, topology.architecture, topology.virtual) == ("AuthenticAMD", "x86_64", "")
    assert len(topology.cores) == n and topology.smt and {core.kind for core in topology.cores} == {""}
    assert all(core.cpus == (core.index, core.index + n) for core in topology.cores), "EPYC numbering"
    assert len(topology.l3_groups) == groups
    for group in topology.l3_groups:
        assert (len(group.cores), group.size, group.id) == (per_group, mib * MIB, group.index)
    assert topology.allowed == topology.online == tuple(range(2 * n))
    assert topology.quota is None and topology.memory_limit is None and topology.notes == ()


def test_two_l3_groups_share_a_link_on_compact_cores_only(machine: Machine) -> None:
    compact = machine("epyc-9754")
    assert compact.fabric_links == tuple((n, n + 1) for n in range(0, 16, 2))
    assert compact.l3_groups[5].fabric_link == 2
    assert machine("epyc-9654").fabric_links == tuple((n,) for n in range(12))


def test_hybrid(machine: Machine) -> None:
    topology = machine("hybrid-desktop")
    assert {core.kind for core in topology.cores} == {"performance", "efficient"}
    assert topology.smt and topology.cpu_name == "Core i7-12700K"
    assert [core.kind for core in topology.cores] == ["performance"] * 8 + ["efficient"] * 4
    assert topology.cores[0].cpus == (0, 1) and topology.cores[8].cpus == (16,)
    assert len(topology.l3_groups) == 1 and topology.nps_words == "1 NUMA node"


@pytest.mark.parametrize(
    ("name", "speeds", "vendor"),
    [
        ("cpu_capacity", (1024, 1024, 446, 446), "0x41"),
        ("cpufreq/cpuinfo_max_freq", (5_100_000, 5_100_000, 3_300_000, 3_300_000), "AuthenticAMD"),
    ],
)
def test_slower_cores_of_arm_and_amd(tmp_path: Path, name: str, speeds: tuple[int, ...], vendor: str) -> None:
    root = make_tree(tmp_path, "vm-without-caches")
    write(root, {"proc/cpuinfo": f"vendor_id: {vendor}\nFeatures: fp asimd"})
    write(root, {f"{CPUS}/cpu{cpu}/{name}": str(speed) for cpu, speed in enumerate(speeds)})
    topology = read_topology(root)
    assert [core.kind for core in topology.cores] == ["performance"] * 2 + ["efficient"] * 2
    assert topology.architecture == topology.cpu_name == "aarch64"


@pytest.mark.parametrize(
    ("cpuinfo", "title"),
    [
        ("CPU implementer: 0x41\nCPU part: 0xd05\n\nCPU implementer: 0x41\nCPU part: 0xd0b", "Cortex-A76 · 4 cores"),
        ("vendor_id: AuthenticAMD\ncpu family: 26\nmodel: 2\nmodel name: AMD EPYC", "EPYC · Zen 5 · 4 cores · NPS1"),
        ("vendor_id: GenuineIntel\ncpu family: 6\nmodel: 143\nmodel name: Intel(R) Xeon(R) Processor @ 2.70GHz",
         "Xeon · Sapphire Rapids · 4 cores"),
        ("vendor_id: GenuineIntel\ncpu family: 6\nmodel: 167\nmodel name: Intel(R) Xeon(R) Processor\nflags: amx_int8",
         "Xeon · Sapphire Rapids or later · 4 cores"),
        ("vendor_id: GenuineIntel\ncpu family: 15\nmodel: 6\nmodel name: Common KVM processor",
         "Common KVM processor · 4 cores"),
    ],
    ids=["big and little", "epyc", "xeon", "masked", "kvm"],
)  # fmt: skip
def test_a_cpu_without_a_telling_name_is_named_by_its_numbers(tmp_path: Path, cpuinfo: str, title: str) -> None:
    root = write(make_tree(tmp_path, "vm-without-caches"), {"proc/cpuinfo": cpuinfo})
    assert words.title(gather_facts(refused=lambda _: "", counts=False, root=root)) == title


@pytest.mark.parametrize(
    ("capacities", "n_used"),
    [
        ((290,) * 4 + (720,) * 2 + (1024,) * 2, 4),  # the middle cores add: 4 × 720 is more than 2 × 1024
        ((200,) * 4 + (500,) * 2 + (1024,) * 2, 2),
    ],
)
def test_tiers_of_arm_are_split_by_what_they_add(tmp_path: Path, capacities: tuple[int, ...], n_used: int) -> None:
    root = make_tree(tmp_path, "vm-without-caches")
    write(root, {f"{CPUS}/cpu{cpu}/cpu_capacity": str(capacity) for cpu, capacity in enumerate(capacities)})
    assert len(efficient_cpus(root, range(len(capacities)), "0x41")) == len(capacities) - n_used


def test_container(machine: Machine) -> None:
    topology = machine("container")
    assert topology.allowed == (*range(8, 16), *range(40, 48))
    assert [core.index for core in topology.allowed_cores] == list(range(8, 16))
    assert topology.quota == 6.5 and topology.memory_limit == 64 * GIB and topology.memory_total == 384 * GIB
    assert len(topology.online) == 64 and not topology.virtual


def test_without_caches_there_are_no_groups(machine: Machine) -> None:
    topology = machine("vm-without-caches")
    assert topology.l3_groups == () and topology.fabric_links == () and len(topology.cores) == 4
    assert all(core.l3 is None for core in topology.cores) and topology.l3_of(0) is None
    assert any("L3" in note for note in topology.notes)
    assert [(node.number, node.cpus) for node in topology.nodes] == [(0, (0, 1, 2, 3))]


def test_offline_cpus_are_left_out(machine: Machine) -> None:
    topology = machine("offline")
    assert topology.online == topology.allowed == tuple(range(28)), "the status file names CPUs that do not run"
    assert len(topology.l3_groups) == 7 and not topology.smt
    assert topology.nodes[0].cpus == tuple(range(28))


def test_a_container_whose_file_of_online_cpus_counts_from_0_has_all_its_cores(tmp_path: Path) -> None:
    """lxcfs shows as many CPUs as the quota or the cpuset has, numbered anew; CPU 2 is in both by chance."""
    root = write(
        make_tree(tmp_path, "epyc-9354"), {f"{CPUS}/online": "0-3", "proc/self/status": status((2, 9, 10, 43))}
    )
    topology = read_topology(root)
    check_consistent(topology)
    assert topology.allowed == place(topology, PlacementSpec()).cpus == (2, 9, 10, 43)
    assert len(topology.cores) == 32 and len(topology.allowed_cores) == 4


def test_nodes_of_cores_without_memory(tmp_path: Path) -> None:
    """A Threadripper whose two channels are on two of four nodes: the cores of the others read theirs."""
    machine = Server("AMD Ryzen Threadripper 3960X", 23, 49, 8, 3, l3_kib=16384, nodes=4, memory=128 * GIB)
    root = write(server(tmp_path, machine), {
        f"{NODES}/node{n}/meminfo": f"Node {n} MemTotal:       0 kB\nNode {n} MemFree:        0 kB" for n in (0, 3)
    })  # fmt: skip
    facts = gather_facts(refused=lambda _: "", counts=False, root=root)
    assert facts.placement is not None and len(facts.placement.cpus) == 24
    assert facts.placement.memory_policy.words == "interleave:1-2"
    assert candidates(facts.topology)[0].reason == "All 24 cores, with memory interleaved over 2 nodes."
    found = next(one for one in examine(facts) if one.title == "NUMA nodes without memory")
    assert "2 nodes (0,3)" in found.evidence and "node:1-2" in found.fix
    words = nodes_words(facts.topology, facts.free_on)
    assert words.startswith("0: no memory, 1: 25.8 of 34.4 GB available") and words.endswith("distance 12 (10: itself)")


def test_a_node_that_alone_has_memory_has_what_is_available(tmp_path: Path) -> None:
    root = write(make_tree(tmp_path, "2x-epyc-7543"), {
        f"{NODES}/node1/meminfo": "Node 1 MemTotal: 0 kB\nNode 1 MemFree:        0 kB", f"{NODES}/has_memory": "0",
    })  # fmt: skip
    facts = gather_facts(refused=lambda _: "", counts=False, root=root)
    assert nodes_words(facts.topology, facts.free_on).startswith(
        f"0: {gigabytes(facts.available)} of 275 GB available, 1: no memory"
    )


def test_garbage_is_no_reason_to_fail(machine: Machine) -> None:
    topology = machine("garbage")
    assert topology.quota is None and topology.family is None and topology.packages == (0,)
    assert topology.memory_total == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (replace(TOPOLOGY, packages=(0, 1), nodes=TOPOLOGY.nodes[:1]), "NPS0"),
        (TOPOLOGY, "NPS2"),
        (
            replace(
                TOPOLOGY,
                nodes=tuple(Node(n, (n,), 16 << 30) for n in range(8)),
                l3_groups=tuple(L3Group(n, n, (n,), (n,), 32 << 20, 0, n, n) for n in range(8)),
            ),
            "8 NUMA nodes (L3 as NUMA)",
        ),
        (replace(TOPOLOGY, virtual="hypervisor"), "2 NUMA nodes"),
        (replace(TOPOLOGY, model="Intel Xeon"), "2 NUMA nodes"),
    ],
)
def test_how_memory_is_divided(topology: Topology, words: str) -> None:
    assert topology.nps_words == words


@pytest.mark.parametrize(
    ("groups", "cores", "reported", "counted"),
    [(1, 2, 32, 32), (1, 2, 16, 16), (1, 2, 260, 32), (1, 64, 504, 256), (8, 1, 16, 32), (2, 4, 260, 32)],
    ids=["a part", "less", "the host's", "the host's, most cores", "one for each CPU", "one for each socket"],
)
def test_a_virtual_machine_counts_on_its_share_of_the_l3_that_it_reports(
    groups: int, cores: int, reported: int, counted: int
) -> None:
    cpus = tuple(range(groups * cores))
    l3 = tuple(L3Group(n, n, cpus[n::groups], cpus[n::groups], reported << 20, 0, 0, n) for n in range(groups))
    real = Topology(cores=tuple(Core(n, (n,), 0, 0, n % groups) for n in cpus), l3_groups=l3, online=cpus)
    guest = replace(real, virtual="KVM")
    assert (real.l3_bytes(real.online) >> 20, guest.l3_bytes(real.online) >> 20) == (groups * reported, counted)
    assert ("may" in caches_words(guest), "may" in caches_words(real)) == (True, False)
    assert (f"other guests may use it, so {counted} MB count" in caches_words(guest)) == (counted < groups * reported)


def test_without_sysfs_psutil_counts(tmp_path: Path) -> None:
    topology = read_topology(tmp_path, allowed=range(8))
    assert len(topology.cores) == min(psutil.cpu_count(logical=False) or 8, 8)
    assert topology.allowed == tuple(range(8)) and topology.l3_groups == ()
    assert topology.memory_total == psutil.virtual_memory().total
    assert "only the number of cores is known" in topology.notes[0]


def test_affinity_counts(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert read_topology().allowed == (min(before),)
    finally:
        os.sched_setaffinity(0, before)


def test_lists_of_cpus() -> None:
    assert parse_cpu_list(" 0-2, 8 ,10-11") == (0, 1, 2, 8, 10, 11)
    assert parse_cpu_list("0-99999999999,4-2,x,-1,²") == ()
    for cpus in ((), (3,), (0, 1, 2, 3, 8, 10, 11), tuple(range(0, 20, 2))):
        assert parse_cpu_list(format_cpu_list(cpus)) == cpus
    assert format_cpu_list([9, 8, 0, 1]) == "0-1,8-9"


def test_a_server_with_avx512(tmp_path: Path) -> None:
    features = {"AVX", "AVX2", "FMA", "F16C", "AVX512", "AVX512_VNNI", "AVX512_BF16"}
    assert instructions(make_tree(tmp_path, "epyc-9354")) == Instructions(frozenset(features))


def test_an_arm_server_with_sve(tmp_path: Path) -> None:
    cpuinfo = "processor: 0\nFeatures: fp asimd asimddp asimdhp i8mm sve svei8mm"
    write(tmp_path, {"proc/cpuinfo": cpuinfo, "proc/sys/abi/sve_default_vector_length": "32\n"})
    found = instructions(tmp_path)
    assert found.features == {"NEON", "DOTPROD", "FP16_VA", "MATMUL_INT8", "SVE"}
    assert found.sve_bytes == 32


def test_this_cpu_agrees_with_the_engine_that_was_built_for_it() -> None:
    from cpuchat.engine.llama.bindings import engine_info

    assert instructions().features <= set(engine_info().features)
