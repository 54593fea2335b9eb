"""Tests AMD's memory controllers and data fabric, on simulated machines."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from cpuchat.hardware.counters.base import CannotCount
from cpuchat.hardware.counters.uncore import AmdDataFabric, AmdMemoryControllers
from cpuchat.hardware.topology import Topology, read_topology
from tests.hardware.counters.simulated import DEVICES, Opened, Simulated, new_fabric, old_fabric, pmu, refused, umc
from tests.hardware.trees import make_tree

GB = 1e9
READ, WRITE = 0x10A, 0x20A


def genoa(tmp_path: Path, name: str = "epyc-9354") -> tuple[Path, Topology]:
    root = make_tree(tmp_path, name)
    for channel in range(12):
        umc(root, channel, "0")
    return root, read_topology(root)


def traffic(event: Opened) -> float:
    """Simulate 20 GB/s read and 5 GB/s written on each of twelve channels."""
    return {READ: 20 * GB / 64, WRITE: 5 * GB / 64}.get(event.config, 0)


def test_every_channel_is_counted_in_both_directions(tmp_path: Path) -> None:
    root, topology = genoa(tmp_path)
    machine = Simulated()
    AmdMemoryControllers(topology, root, machine.calls)
    opened = [(event.type, event.config, event.pid, event.cpu, event.flags) for event in machine.events.values()]
    assert opened == [(20 + channel, config, -1, 0, 8) for channel in range(12) for config in (READ, WRITE)]


def test_bytes_by_time(tmp_path: Path) -> None:
    root, topology = genoa(tmp_path)
    machine = Simulated()
    counter = AmdMemoryControllers(topology, root, machine.calls)
    assert counter.sample(100.0) is None
    machine.run(1, traffic)
    first = counter.sample(101.0)
    machine.run(0.5, lambda event: traffic(event) / 2)
    second = counter.sample(101.5)
    assert first is not None and first == second
    assert first.read == pytest.approx(240 * GB)
    assert first.write == pytest.approx(60 * GB)
    assert first.total == pytest.approx(300 * GB)
    assert (first.source, first.scope, first.per_l3) == ("umc", "machine", ())


def test_both_sockets_are_counted(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    for channel in range(4):
        umc(root, channel, "0" if channel < 2 else "32")
    machine = Simulated()
    AmdMemoryControllers(read_topology(root), root, machine.calls)
    assert [event.cpu for event in machine.events.values()] == [0, 0, 0, 0, 32, 32, 32, 32]


def test_no_time_and_time_that_goes_back_give_no_figure(tmp_path: Path) -> None:
    root, topology = genoa(tmp_path)
    machine = Simulated()
    counter = AmdMemoryControllers(topology, root, machine.calls)
    counter.sample(100.0)
    machine.run(1, traffic)
    assert counter.sample(100.0) is None
    machine.run(1, traffic)
    assert counter.sample(90.0) is None
    machine.run(1, traffic)
    assert counter.sample(91.0) is not None


def test_a_reset_counter_gives_no_figure_once(tmp_path: Path) -> None:
    root, topology = genoa(tmp_path)
    machine = Simulated()
    counter = AmdMemoryControllers(topology, root, machine.calls)
    counter.sample(1.0)
    machine.run(1, traffic)
    assert counter.sample(2.0) is not None
    machine.open_events[0].count = 0
    machine.run(1, lambda _: 0)
    assert counter.sample(3.0) is None
    machine.run(1, traffic)
    again = counter.sample(4.0)
    assert again is not None and again.total == pytest.approx(300 * GB)


def link_traffic(event: Opened) -> float:
    """Simulate i+1 GB/s through the first interface of moderator i."""
    for moderator in range(8):
        if event.type == 10 and event.config == fabric_config(0x41E + 0x40 * moderator):
            return (moderator + 1) * GB / 32
    return traffic(event)


def fabric_config(event: int, umask: int = 0xFFE) -> int:
    return (event & 0xFF) | (umask & 0xFF) << 8 | (umask >> 8) << 24 | (event >> 8) << 32


def test_links_tell_what_each_l3_group_got(tmp_path: Path) -> None:
    root, topology = genoa(tmp_path)
    new_fabric(root)
    machine = Simulated()
    counter = AmdMemoryControllers(topology, root, machine.calls)
    links = [event.config for event in machine.events.values() if event.type == 10]
    assert links == [
        fabric_config(0x41E + interface + 0x40 * moderator) for interface in range(2) for moderator in range(8)
    ]
    counter.sample(1.0)
    machine.run(1, link_traffic)
    counter.sample(2.0)
    machine.run(1, link_traffic)
    found = counter.sample(3.0)
    assert found is not None
    assert found.per_l3 == pytest.approx([GB * n for n in range(1, 9)])
    assert found.total == pytest.approx(300 * GB)


def test_wide_links_are_both_interfaces_together(tmp_path: Path) -> None:
    root, topology = genoa(tmp_path)
    new_fabric(root)
    machine = Simulated()
    counter = AmdMemoryControllers(topology, root, machine.calls)
    counter.sample(1.0)
    machine.run(1, lambda event: GB / 32 if event.type == 10 else traffic(event))
    found = counter.sample(2.0)
    assert found is not None
    assert found.per_l3 == pytest.approx([2 * GB] * 8)


def test_links_that_do_not_match_the_l3_groups_are_left_out(tmp_path: Path) -> None:
    root, topology = genoa(tmp_path)
    new_fabric(root)
    machine = Simulated()
    counter = AmdMemoryControllers(topology, root, machine.calls)
    counter.sample(1.0)
    busy = fabric_config(0x41E)
    machine.run(1, lambda event: GB if event.config == busy else traffic(event))
    found = counter.sample(2.0)
    assert found is not None
    assert found.per_l3 == ()
    assert found.total == pytest.approx(300 * GB)


@pytest.mark.slow
def test_two_l3_groups_on_one_link_have_no_figures_of_their_own(tmp_path: Path) -> None:
    root, topology = genoa(tmp_path, "epyc-9754")
    new_fabric(root)
    machine = Simulated()
    AmdMemoryControllers(topology, root, machine.calls)
    assert not [event for event in machine.events.values() if event.type == 10]


def test_the_controllers_count_where_the_fabric_refuses(tmp_path: Path) -> None:
    root, topology = genoa(tmp_path)
    new_fabric(root)
    machine = Simulated(
        refuse=lambda event: refused(errno.EBUSY) if event.type == 10 and event.config > 2**34 else None
    )
    counter = AmdMemoryControllers(topology, root, machine.calls)
    assert len(machine.open_events) == 24
    counter.close()
    assert machine.open_events == []


def test_a_refusal_leaves_nothing_open(tmp_path: Path) -> None:
    root, topology = genoa(tmp_path)
    machine = Simulated(refuse=lambda event: refused(errno.EACCES) if event.type == 25 else None)
    with pytest.raises(CannotCount, match="perf_event_paranoid is 2") as caught:
        AmdMemoryControllers(topology, root, machine.calls)
    assert "cpuchat counters unit" in caught.value.how
    assert machine.open_events == []


def test_old_kernels_and_other_cpus(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    with pytest.raises(CannotCount, match="no counters of memory controllers") as caught:
        AmdMemoryControllers(read_topology(root), root, Simulated().calls)
    assert "6.8" in caught.value.how
    xeon = make_tree(tmp_path, "xeon-6430")
    umc(xeon, 0, "0")
    with pytest.raises(CannotCount, match="AMD CPUs only"):
        AmdMemoryControllers(read_topology(xeon), xeon, Simulated().calls)


def test_the_fabric_of_milan_counts_eight_channels_per_socket(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    old_fabric(root, "0,32")
    machine = Simulated()
    counter = AmdDataFabric(read_topology(root), root, machine.calls)
    configs = [(event.config, event.cpu) for event in machine.events.values()]
    # event 0x07, 0x47, ... 0x1c7 and umask 0x38; the event's high bits are at 32
    wanted = [0x3807, 0x3847, 0x3887, 0x38C7, 0x1_0000_3807, 0x1_0000_3847, 0x1_0000_3887, 0x1_0000_38C7]
    assert configs == [(config, cpu) for config in wanted for cpu in (0, 32)]
    counter.sample(1.0)
    machine.run(1, lambda _: 15 * GB / 64, share=0.5)  # eight events take turns on four counters
    found = counter.sample(2.0)
    assert found is not None
    assert found.total == pytest.approx(16 * 15 * GB, rel=1e-6)
    assert found.read is None and found.write is None
    counter.close()
    assert machine.open_events == []


def test_the_fabric_is_not_trusted_with_several_nodes_per_socket(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354p-nps4")
    old_fabric(root)
    with pytest.raises(CannotCount, match="several NUMA nodes") as caught:
        AmdDataFabric(read_topology(root), root, Simulated().calls)
    assert "NPS1" in caught.value.how


def test_the_fabric_of_zen_4_is_no_old_one(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    new_fabric(root)
    with pytest.raises(CannotCount, match="memory controllers"):
        AmdDataFabric(read_topology(root), root, Simulated().calls)


def test_without_the_module(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    with pytest.raises(CannotCount) as caught:
        AmdDataFabric(read_topology(root), root, Simulated().calls)
    assert "modprobe amd_uncore" in caught.value.how


def test_a_kernel_whose_fabric_has_too_short_events_leaves_nothing_open(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    pmu(root, "amd_df", 10, "0,32", {"event": "config:0-7", "umask": "config:8-15"})
    machine = Simulated()
    with pytest.raises(CannotCount, match="event=0x107"):
        AmdDataFabric(read_topology(root), root, machine.calls)
    assert machine.events and machine.open_events == []


def test_a_controller_that_the_kernel_describes_otherwise_leaves_nothing_open(tmp_path: Path) -> None:
    root, topology = genoa(tmp_path)
    pmu(root, "amd_umc_12", 32, "0", {"event": "config:0-7"})
    (root / DEVICES / "amd_umc_12/format/rdwrmask").unlink(missing_ok=True)
    machine = Simulated()
    with pytest.raises(CannotCount, match="rdwrmask"):
        AmdMemoryControllers(topology, root, machine.calls)
    assert machine.events and machine.open_events == []


def test_the_second_socket_that_refuses_leaves_nothing_open(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    old_fabric(root, "0,32")
    machine = Simulated(refuse=lambda event: refused(errno.EBUSY) if event.cpu == 32 else None)
    with pytest.raises(CannotCount, match="another program"):
        AmdDataFabric(read_topology(root), root, machine.calls)
    assert machine.events and machine.open_events == []


def test_links_that_break_later_are_left_out(tmp_path: Path) -> None:
    root, topology = genoa(tmp_path)
    new_fabric(root)
    machine = Simulated()
    broken = False

    def read(fd: int, size: int) -> bytes:
        return b"" if broken and machine.events[fd].type == 10 else machine.calls.read(fd, size)

    counter = AmdMemoryControllers(topology, root, replace(machine.calls, read=read))
    counter.sample(1.0)
    machine.run(1, link_traffic)
    first = counter.sample(2.0)
    assert first is not None and len(first.per_l3) == 8
    broken = True
    machine.run(1, link_traffic)
    found = counter.sample(3.0)
    assert found is not None
    assert (found.total, found.per_l3) == (pytest.approx(300 * GB), ())
    assert {event.type for event in machine.open_events} == set(range(20, 32))
    counter.close()
    assert machine.open_events == []
