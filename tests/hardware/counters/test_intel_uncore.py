"""Tests Intel's memory controllers, by the names and scales that the kernel gives."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cpuchat.hardware.counters.base import CannotCount
from cpuchat.hardware.counters.uncore import IntelMemoryControllers
from cpuchat.hardware.topology import Topology
from tests.hardware.counters.simulated import Opened, Simulated, pmu, refused

GB = 1e9
XEON = Topology(vendor="GenuineIntel")
SERVER = {"event": "config:0-7", "umask": "config:8-15"}
SCALE = {"scale": "6.103515625e-5", "unit": "MiB"}


def aliases(**events: str) -> dict[str, str]:
    found = dict(events)
    for name in events:
        found |= {f"{name}.{key}": text for key, text in SCALE.items()}
    return found


def reads_and_writes(root: Path, read_config: int, write_config: int) -> tuple[float, float, Simulated]:
    machine = Simulated()
    counter = IntelMemoryControllers(XEON, root, machine.calls)

    def lines(event: Opened) -> float:
        return {read_config: 10 * GB / 64, write_config: 2 * GB / 64}.get(event.config, 0)

    assert counter.sample(1.0) is None
    machine.run(1, lines)
    found = counter.sample(2.0)
    assert found is not None and found.read is not None and found.write is not None
    assert found.total == found.read + found.write
    assert (found.source, found.scope) == ("imc", "machine")
    counter.close()
    assert machine.open_events == []
    return found.read, found.write, machine


def test_column_accesses_of_every_channel_and_socket(tmp_path: Path) -> None:
    for number in range(6):
        pmu(tmp_path, f"uncore_imc_{number}", 30 + number, "0,28", SERVER,
            aliases(cas_count_read="event=0x04,umask=0x03", cas_count_write="event=0x04,umask=0x0c"))  # fmt: skip
    read, write, machine = reads_and_writes(tmp_path, 0x0304, 0x0C04)
    assert read == pytest.approx(12 * 10 * GB)
    assert write == pytest.approx(12 * 2 * GB)
    assert {event.cpu for event in machine.events.values()} == {0, 28}


def test_two_schedulers_per_channel(tmp_path: Path) -> None:
    pmu(tmp_path, "uncore_imc_0", 30, "0", SERVER, aliases(
        cas_count_read_sch0="event=0x05,umask=0xcf", cas_count_read_sch1="event=0x06,umask=0xcf",
        cas_count_write_sch0="event=0x05,umask=0xf0", cas_count_write_sch1="event=0x06,umask=0xf0",
    ))  # fmt: skip
    machine = Simulated()
    IntelMemoryControllers(XEON, tmp_path, machine.calls)
    assert [event.config for event in machine.events.values()] == [0xCF05, 0xCF06, 0xF005, 0xF006]


def test_clients_count_all_the_time(tmp_path: Path) -> None:
    for number in range(2):
        pmu(tmp_path, f"uncore_imc_free_running_{number}", 40 + number, "0", SERVER, aliases(
            data_read="event=0xff,umask=0x20", data_write="event=0xff,umask=0x30", data_total="event=0xff,umask=0x10"
        ))  # fmt: skip
    read, write, _ = reads_and_writes(tmp_path, 0x20FF, 0x30FF)
    assert (read, write) == (pytest.approx(20 * GB), pytest.approx(4 * GB))


def test_old_clients_have_one_controller(tmp_path: Path) -> None:
    pmu(tmp_path, "uncore_imc", 12, "0", {"event": "config:0-7"},
        aliases(data_reads="event=0x01", data_writes="event=0x02"))  # fmt: skip
    read, write, _ = reads_and_writes(tmp_path, 1, 2)
    assert (read, write) == (pytest.approx(10 * GB), pytest.approx(2 * GB))


def test_free_running_counters_are_not_counted_twice(tmp_path: Path) -> None:
    pmu(tmp_path, "uncore_imc_0", 30, "0", SERVER,
        aliases(cas_count_read="event=0x04,umask=0x0f", cas_count_write="event=0x04,umask=0x30"))  # fmt: skip
    pmu(tmp_path, "uncore_imc_free_running_0", 40, "0", SERVER,
        aliases(read="event=0xff,umask=0x20", write="event=0xff,umask=0x30"))  # fmt: skip
    machine = Simulated()
    IntelMemoryControllers(XEON, tmp_path, machine.calls)
    assert {event.type for event in machine.events.values()} == {30}


def test_nothing_there_no_names_no_rights(tmp_path: Path) -> None:
    with pytest.raises(CannotCount, match="no counters") as caught:
        IntelMemoryControllers(XEON, tmp_path, Simulated().calls)
    assert "modprobe intel_uncore" in caught.value.how
    with pytest.raises(CannotCount, match="Intel CPUs only"):
        IntelMemoryControllers(Topology(vendor="AuthenticAMD"), tmp_path, Simulated().calls)
    pmu(tmp_path, "uncore_imc_free_running_0", 30, "0", SERVER, aliases(data_read="event=0xff,umask=0x20"))
    machine = Simulated()
    with pytest.raises(CannotCount, match="no events for reads and writes"):
        IntelMemoryControllers(XEON, tmp_path, machine.calls)
    assert machine.open_events == []
    machine = Simulated(refuse=lambda _: refused(errno.EPERM))
    with pytest.raises(CannotCount, match="blocked"):
        IntelMemoryControllers(XEON, tmp_path, machine.calls)


def test_the_second_socket_that_refuses_leaves_nothing_open(tmp_path: Path) -> None:
    pmu(tmp_path, "uncore_imc_0", 30, "0,28", SERVER,
        aliases(cas_count_read="event=0x04,umask=0x0f", cas_count_write="event=0x04,umask=0x30"))  # fmt: skip
    machine = Simulated(refuse=lambda event: refused(errno.EBUSY) if event.cpu == 28 else None)
    with pytest.raises(CannotCount, match="another program"):
        IntelMemoryControllers(XEON, tmp_path, machine.calls)
    assert machine.events and machine.open_events == []
