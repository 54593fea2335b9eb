"""Tests the findings about memory, on simulated machines that are read like a real one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cpuchat.hardware.bandwidth.read_bandwidth import ReadBandwidth, Survey
from cpuchat.hardware.diagnostics import examine
from tests.hardware.diagnostics.servers import facts_of, found, read_rate
from tests.hardware.trees import make_tree, status, write

GIB = 1 << 30
THP = "sys/kernel/mm/transparent_hugepage/enabled"


def test_a_bandwidth_that_is_too_low_or_too_high(root: Path) -> None:
    read_rate(root, 230.4)
    finding = found(facts_of(root), "far below the theoretical peak")
    assert finding.level == "advice"
    assert finding.evidence.startswith("230.4 of 460.8 GB/s (50 %, measured, 32 cores)")
    assert "`sudo dmidecode -t memory`" in finding.fix
    read_rate(root, 500)
    assert "(109 %" in found(facts_of(root), "exceeds the theoretical peak").evidence


def test_few_cores_are_not_blamed_for_reading_little(root: Path) -> None:
    read_rate(root, 50.0, range(4))
    assert found(facts_of(root, cores="l3:0"), "read bandwidth").level == "ok"


def test_a_part_of_the_machine_is_not_blamed_for_reading_a_part(root: Path) -> None:
    cpus = (*range(8), *range(32, 40))
    write(root, {"proc/self/status": status(cpus)})
    read_rate(root, 99.0, range(8))
    assert found(facts_of(root), "read bandwidth").level == "ok"


@pytest.mark.parametrize(
    ("link", "level", "words"),
    [
        (50.0, "ok", "the 4 fabric links of its L3 groups carry 200 GB/s at most"),
        (95.0, "advice", "192.0 of 460.8 GB/s (42 %, measured, 32 cores)"),
    ],
)
def test_few_links_are_no_fault_of_the_memory(tmp_path: Path, link: float, level: str, words: str) -> None:
    root = make_tree(tmp_path, "epyc-9334")
    read_rate(root, 192.0)
    one = ReadBandwidth((0,), 25e9, (25e9,))
    group = ReadBandwidth(tuple(range(8)), link * 1e9, (link * 1e9,))
    facts = replace(facts_of(root), survey=Survey(one_core=one, all_cores=one, l3_group=group))
    [finding] = [one for one in examine(facts) if one.evidence.startswith("192.0")]
    assert finding.level == level
    assert words in finding.evidence


def test_a_bandwidth_that_was_not_measured(tmp_path: Path) -> None:
    finding = found(facts_of(make_tree(tmp_path, "epyc-9654")), "has not been measured")
    assert finding.level == "advice"
    assert "cpuchat probe" in finding.fix


def test_numa_balancing(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    assert found(facts_of(root), "NUMA balancing off").level == "ok"
    write(root, {"proc/sys/kernel/numa_balancing": "1"})
    finding = found(facts_of(root), "NUMA balancing is on")
    assert finding.level == "warning"
    assert finding.evidence == "/proc/sys/kernel/numa_balancing is 1, 2 NUMA nodes"
    assert "under `NUMA balancing`" in finding.fix


def test_balancing_between_one_node_is_nothing(root: Path) -> None:
    write(root, {"proc/sys/kernel/numa_balancing": "1"})
    assert not [finding for finding in examine(facts_of(root)) if "balancing" in finding.title]


def test_nodes_inside_a_socket(tmp_path: Path) -> None:
    finding = found(facts_of(make_tree(tmp_path, "epyc-9354p-nps4")), "NPS4")
    assert finding.level == "advice"
    assert finding.evidence == "1 socket as 4 NUMA nodes"
    assert "NPS1" in finding.fix


def test_two_sockets_in_one_node(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    shutil.rmtree(root / "sys/devices/system/node/node1")
    write(root, {
        "sys/devices/system/node/online": "0",
        "sys/devices/system/node/node0/cpulist": "0-127",
        "sys/devices/system/node/node0/distance": "10",
    })  # fmt: skip
    finding = found(facts_of(root), "NPS0")
    assert finding.level == "warning"
    assert finding.evidence == "2 sockets as 1 NUMA node"
    assert "NPS1" in finding.fix


def test_l3_groups_as_nodes(root: Path) -> None:
    facts = facts_of(root)
    machine = facts.topology
    nodes = tuple(machine.nodes[0]._replace(number=group.index, cpus=group.cpus) for group in machine.l3_groups)
    finding = found(replace(facts, topology=replace(machine, nodes=nodes)), "Each L3 group is a NUMA node")
    assert finding.evidence == "1 socket as 8 NUMA nodes"


def test_no_huge_pages(root: Path) -> None:
    write(root, {THP: "always madvise [never]"})
    finding = found(facts_of(root), "huge pages are off")
    assert finding.level == "advice"
    assert finding.evidence.endswith("enabled is never")
    assert "under `huge pages`" in finding.fix


def test_a_model_that_does_not_fit(root: Path) -> None:
    finding = found(facts_of(root, model="big.gguf", model_bytes=400_000_000_000), "does not fit")
    assert finding.level == "problem"
    assert finding.evidence == "big.gguf is 400 GB; 309 GB of 412 GB available"
    assert "smaller model" in finding.fix


def test_a_memory_limit_below_the_model(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "container")
    finding = found(facts_of(root, model="big.gguf", model_bytes=80 * GIB), "does not fit")
    assert "cgroup memory limit: 68.7 GB" in finding.evidence
    assert finding.fix.startswith("Raise the limit")


def test_little_memory(root: Path) -> None:
    write(root, {"proc/meminfo": "MemTotal: 402653184 kB\nMemAvailable: 4000000 kB"})
    finding = found(facts_of(root), "Little memory")
    assert finding.level == "warning"
    assert finding.evidence == "4.10 GB of 412 GB available"
    # A tenth of a large machine is still a lot.
    write(root, {"proc/meminfo": "MemTotal: 402653184 kB\nMemAvailable: 20000000 kB"})
    assert not [finding for finding in examine(facts_of(root)) if "Little memory" in finding.title]


def test_swap_in_use(root: Path) -> None:
    text = (root / "proc/meminfo").read_text()
    write(root, {"proc/meminfo": f"{text}SwapTotal: 8388608 kB\nSwapFree: 6291456 kB"})
    finding = found(facts_of(root), "Swap is in use")
    assert finding.level == "advice"
    assert finding.evidence.startswith("2.15 GB of 8.59 GB swap in use")
    assert "mlock" in finding.fix
