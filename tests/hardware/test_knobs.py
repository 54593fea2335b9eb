"""Tests the settings that only root can change: their state, and that each shell line does what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpuchat.hardware.knobs import Knob, read_knobs
from cpuchat.hardware.topology import Topology
from tests.hardware.knob_files import CPUFREQ, TOPOLOGY, VIRTUAL, run, server, snapshot
from tests.hardware.trees import write

NAMES = ["governor", "boost", "huge pages", "NUMA balancing"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return server(tmp_path / "machine")


def knob(name: str, root: Path, topology: Topology = TOPOLOGY) -> Knob:
    [found] = [one for one in read_knobs(topology, root) if one.name == name]
    return found


def test_every_knob_tells_its_state_and_its_worth(root: Path) -> None:
    before = snapshot(root)
    knobs = read_knobs(TOPOLOGY, root)
    assert [(one.name, one.state) for one in knobs] == [
        ("governor", "powersave"),
        ("boost", "off"),
        ("huge pages", "madvise"),
        ("NUMA balancing", "on"),
    ]
    assert all(one.worth and one.source and one.change and one.back and not one.why_not for one in knobs)
    assert snapshot(root) == before


@pytest.mark.parametrize("name", NAMES)
def test_the_lines_change_it_and_take_it_back(root: Path, name: str) -> None:
    write(root, {f"{CPUFREQ.format(3)}/scaling_governor": "schedutil"})
    write(root, {f"{CPUFREQ.format(3)}/scaling_available_governors": "performance powersave schedutil"})
    write(root, {f"{CPUFREQ.format(3)}/energy_performance_preference": "power"})
    before = snapshot(root)
    found = knob(name, root)
    run(found.change, root)
    changed = knob(name, root)
    assert changed.state != found.state
    assert changed.change == ""
    run(found.back, root)
    assert snapshot(root) == before


def test_what_is_set_already_has_no_line(root: Path) -> None:
    write(root, {f"{CPUFREQ.format(cpu)}/scaling_governor": "performance" for cpu in range(8)})
    write(root, {"sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never"})
    write(root, {"sys/devices/system/cpu/cpufreq/boost": "1", "proc/sys/kernel/numa_balancing": "0"})
    for name in ("governor", "boost", "huge pages", "NUMA balancing"):
        found = knob(name, root)
        assert (found.level, found.change, found.back, found.why_not) == ("ok", "", "", "")
    one = replace(TOPOLOGY, nodes=TOPOLOGY.nodes[:1])
    assert knob("NUMA balancing", root, one).why_not == "there is only one NUMA node"


def test_missing_files_are_named(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    topology = replace(TOPOLOGY, vendor="HygonGenuine")
    why = {one.name: one.why_not for one in read_knobs(topology, bare)}
    assert [*why] == NAMES
    assert all(why.values())
    assert why["governor"] == "no frequency driver: enable CPPC or P-states in the firmware setup"


def test_a_virtual_machine_has_a_kernel_of_its_own_but_not_its_hardware(root: Path) -> None:
    for found in read_knobs(VIRTUAL, root):
        if found.name in ("huge pages", "NUMA balancing"):
            assert found.change
        else:
            assert found.why_not == "virtual machine (hypervisor flag in /proc/cpuinfo)"
            assert (found.change, found.back) == ("", "")


@pytest.mark.parametrize(("name", "text"), [("run/.containerenv", ""), ("proc/self/cgroup", "0::/kubepods/pod0a/0b")])
def test_a_container_is_refused_everything(root: Path, name: str, text: str) -> None:
    write(root, {name: text})
    for found in read_knobs(TOPOLOGY, root):
        assert "this is a container" in found.why_not
        assert (found.change, found.back) == ("", "")


@pytest.mark.parametrize(
    ("topology", "why"),
    [
        (replace(TOPOLOGY, quota=2.5), "cgroup CPU quota: 2.5"),
        (replace(TOPOLOGY, allowed=(0, 1, 2)), "this process is limited to CPUs 0-2 of 0-7"),
        (replace(TOPOLOGY, memory_limit=8_000_000_000), "cgroup memory limit: 8.0 GB"),
    ],
)
def test_who_has_a_part_of_the_machine_changes_nothing_of_it(root: Path, topology: Topology, why: str) -> None:
    assert knob("huge pages", root, topology).why_not == why


def test_unreadable_files_break_nothing(root: Path) -> None:
    folder = root / CPUFREQ.format(0) / "scaling_governor"
    folder.unlink()
    folder.mkdir()
    (root / "proc/sys/kernel/numa_balancing").write_bytes(b"\xff\x00\xfe\n")
    assert knob("governor", root).state == "powersave"
    assert "no NUMA balancing" in knob("NUMA balancing", root).why_not
