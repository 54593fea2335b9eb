"""Tests which source wins, and what is said about the others."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from cpuchat.hardware.counters.base import CannotCount, Counter, CounterRefusal
from cpuchat.hardware.counters.collector_file import CollectorFile
from cpuchat.hardware.monitor import (
    Ladder,
    advice,
    counter_openers,
    open_best,
    power_openers,
    theoretical_bandwidth,
)
from cpuchat.hardware.topology import Topology, read_topology
from cpuchat.telemetry.machine import Bandwidth
from tests.hardware.counters.simulated import Simulated, old_fabric, refused, umc
from tests.hardware.trees import NAMES, make_tree, write

pytestmark = pytest.mark.slow

GENOA = 460.8e9


def hsmp(root: Path) -> None:
    base = "sys/devices/platform/AMDI0097:00"
    write(root, {f"{base}/ddr_max_bw": "460", f"{base}/ddr_utilised_bw_input": "100", "dev/hsmp": ""})


def collector(root: Path, ts: float) -> None:
    write(root, {"run/cpuchat/bandwidth.json": json.dumps({"bw": 1, "ts": ts, "watts": 2, "joules": 3})})


def mbm(root: Path) -> None:
    write(root, {f"sys/fs/resctrl/mon_data/mon_L3_{n:02}/mbm_total_bytes": "1" for n in range(8)})
    write(root, {"sys/fs/resctrl/info/L3_MON/num_rmids": "256"})


def test_the_best_that_opens_wins(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    topology = read_topology(root)
    (root / "proc/9/task/9").mkdir(parents=True)
    machine = Simulated(answers={(0x14, 0): 460 << 20 | 100 << 8 | 22})

    def best() -> tuple[str | None, int]:
        counter, refusals = open_best(counter_openers(topology, 9, root, kernel=machine.calls, theoretical=GENOA))
        return (counter.name if counter is not None else None), len(refusals)

    assert best() == ("core counters, estimated", 7)
    mbm(root)
    assert best() == ("mbm", 6)
    umc(root, 0, "0")
    assert best() == ("umc", 3)
    write(root, {"dev/hsmp": ""})
    assert best() == ("hsmp", 2)
    hsmp(root)
    assert best() == ("hsmp", 1)
    collector(root, machine.wall)
    assert best() == ("collector", 0)


def test_the_old_fabric_has_its_place(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    old_fabric(root, "0,32")
    mbm(root)
    counter, refusals = open_best(
        counter_openers(read_topology(root), None, root, kernel=Simulated().calls, theoretical=GENOA)
    )
    assert counter is not None
    assert counter.name == "amd_df"
    assert [one.name for one in refusals] == ["collector", "HSMP files", "HSMP mailbox", "AMD memory controllers"]


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_without_counters_says_why_for_each(tmp_path: Path, name: str) -> None:
    root = make_tree(tmp_path, name)
    topology = read_topology(root)
    counter, refusals = open_best(counter_openers(topology, None, root, kernel=Simulated().calls, theoretical=None))
    meter, no_power = open_best(power_openers(topology, root, kernel=Simulated().calls))
    assert counter is None and meter is None
    assert len(refusals) == 8 and len(no_power) == 5
    assert all(one.why for one in (*refusals, *no_power))
    assert advice(refusals, topology) and advice(no_power, topology)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("epyc-9354", "modprobe amd_hsmp"),
        ("xeon-6430", "modprobe intel_uncore"),
        ("vm", "virtual machines expose no such counters"),
        ("garbage", "no counter can be opened"),
    ],
)
def test_only_what_can_help_is_advised(tmp_path: Path, name: str, words: str) -> None:
    root = make_tree(tmp_path, name)
    topology = read_topology(root)
    refusals = open_best(counter_openers(topology, None, root, kernel=Simulated().calls, theoretical=None))[1]
    assert words in advice(refusals, topology)
    assert ("modprobe" in words) == ("modprobe" in advice(refusals, topology))


def test_a_virtual_machine_may_have_core_counters(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    virtual = read_topology(write(root, {"sys/hypervisor/type": "xen"}))
    closed = CounterRefusal("core counters", "closed", "`sudo sysctl`")
    assert advice([CounterRefusal("HSMP mailbox", "none", "`sudo modprobe amd_hsmp`"), closed], virtual) == str(closed)


def test_nothing_was_looked_for() -> None:
    assert advice((), Topology()) == "not opened yet"


def refusal(name: str, error: Exception) -> CounterRefusal:
    def opener() -> Counter[Bandwidth]:
        raise error

    [found] = open_best([(name, opener)])[1]
    return found


def test_every_failure_becomes_words() -> None:
    assert refusal("a", CannotCount("why", "how")) == CounterRefusal("a", "why", "how")
    assert refusal("a", refused(errno.EIO)) == CounterRefusal("a", "input/output error")
    assert refusal("a", OSError("odd")).why == "odd"
    assert refusal("a", OSError()).why == "OSError".lower()
    assert "KeyError" in refusal("a", KeyError("x")).why
    assert str(CounterRefusal("a", "b", "c")) == "a: b; c"


def test_a_broken_opener_does_not_break_the_ladder(tmp_path: Path) -> None:
    def broken() -> CollectorFile:
        raise ZeroDivisionError("oops")

    root = make_tree(tmp_path, "epyc-9354")
    machine = Simulated()
    collector(root, machine.wall)
    ladder = Ladder([("first", broken), ("second", lambda: CollectorFile(root, machine.calls))])
    assert ladder.next() is not None
    assert ladder.next() is None
    assert [one.name for one in ladder.refusals] == ["first"]


def test_what_the_memory_carries_is_not_asked_in_a_virtual_machine(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    assert theoretical_bandwidth(read_topology(root), root) == pytest.approx(GENOA)
    root = make_tree(tmp_path, "vm")
    assert theoretical_bandwidth(read_topology(root), root) is None
