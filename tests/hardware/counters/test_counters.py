"""Tests counters of memory traffic and power: perf_event_open to the byte, what is read back and what a refusal says
(one event is really opened); on simulated machines, which events are opened, and what they mean."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from cpuchat.hardware.counters import (
    CannotCount,
    Kernel,
    PerfEvent,
    attributes,
    open_failure,
    open_power,
    open_traffic,
    read_pmu,
)
from cpuchat.hardware.topology import Topology, read_topology
from tests.hardware.counters.simulated import Opened, Simulated, energy, new_fabric, old_fabric, pmu, refused, umc
from tests.hardware.trees import make_tree, write

TYPE_SOFTWARE, TASK_CLOCK = 1, 1


def really_open() -> PerfEvent:
    """Open an event that counts the nanoseconds of this thread."""
    attr = bytearray(attributes(TYPE_SOFTWARE, (TASK_CLOCK, 0, 0)))
    attr[40] = 0x60  # without the kernel's own work, which needs fewer rights
    return PerfEvent(Kernel().perf_event_open(bytes(attr), 0, -1, 8), Kernel())


def opened(machine: Simulated) -> PerfEvent:
    return PerfEvent(machine.calls.perf_event_open(attributes(10, (1, 0, 0)), -1, 0, 8), machine.calls)


def test_the_kernel_counts_the_time_of_this_thread() -> None:
    event = really_open()
    first = event.growth()
    sum(range(200_000))
    second = event.growth()
    before = len(list(Path("/proc/self/fd").iterdir()))
    event.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 1
    assert first is not None and second > 1000  # nanoseconds: 200 000 additions take more


def test_what_an_event_counted() -> None:
    machine = Simulated()
    event = opened(machine)
    assert event.growth() == 0
    machine.run(1, lambda _: 1000, share=0.25)  # of the time: extrapolated
    assert event.growth() == pytest.approx(1000)
    machine.run(1, lambda _: 1000, share=0.0)
    assert event.growth() is None
    [counting] = machine.open_events
    counting.count = 10  # it went back
    machine.run(1, lambda _: 0)
    assert event.growth() is None
    machine.run(1, lambda _: 500)
    assert event.growth() == 500


@pytest.mark.parametrize(
    ("code", "paranoid", "why", "how"),
    [
        (errno.EACCES, "4", "perf_event_paranoid is 4", "sysctl kernel.perf_event_paranoid=0`, which `=4` takes back"),
        (errno.EPERM, "-1", "blocked for this process, as containers often do", ""),
        (errno.ENOENT, "2", "no such counter", ""),
        (errno.ENOSYS, "", "this kernel has no performance counters", ""),
        (errno.EBUSY, "2", "another program", "perf"),
        (errno.EMFILE, "2", "too many open files", "ulimit"),
        (errno.ENOMEM, "2", "cannot allocate memory", ""),
    ],
)
def test_a_refusal_says_why_and_what_to_do(tmp_path: Path, code: int, paranoid: str, why: str, how: str) -> None:
    root = write(tmp_path, {"proc/sys/kernel/perf_event_paranoid": paranoid})
    refusal = open_failure(refused(code), root)
    assert isinstance(refusal, CannotCount)
    assert why in str(refusal)
    assert how in refusal.how
    assert bool(refusal.how) == bool(how)


def test_fields_are_put_where_the_kernel_says(tmp_path: Path) -> None:
    new_fabric(tmp_path)
    fabric = read_pmu("amd_df", tmp_path)
    # event bits 0-7 and 8-13 at 32, umask bits 0-7 at 8 and 8-11 at 24
    assert fabric.configs(event=0x41E, umask=0xFFE) == (0x04_0F00_FE1E, 0, 0)
    assert fabric.has("umask", 12) and not fabric.has("umask", 13)


def test_fields_of_other_words_and_single_bits(tmp_path: Path) -> None:
    pmu(tmp_path, "odd", 9, "0", {"event": "config1:4-7", "flag": "config2:63", "broken": "config:x"})
    odd = read_pmu("odd", tmp_path)
    assert odd.configs(event=0xF, flag=1) == (0, 0xF0, 1 << 63)
    for wrong in ({"event": 16}, {"broken": 1}, {"absent": 0}):
        with pytest.raises(CannotCount, match="has no field"):
            odd.configs(**wrong)


def test_named_events_with_scale_and_unit(tmp_path: Path) -> None:
    pmu(
        tmp_path, "uncore_imc_0", 30, "0,32", {"event": "config:0-7", "umask": "config:8-15"},
        {"cas": "event=0x04,umask=0x03", "cas.scale": "6.103515625e-5", "cas.unit": "MiB", "bad": "event=x"},
    )  # fmt: skip
    controller = read_pmu("uncore_imc_0", tmp_path)
    assert controller.cpus == (0, 32)
    assert controller.event_names() == ["bad", "cas"]
    configs, scale, unit = controller.named("cas")
    assert configs == (0x0304, 0, 0)
    assert scale * (1 << 20) == 64
    assert unit == "MiB"
    with pytest.raises(CannotCount, match="unknown format"):
        controller.named("bad")


GB = 1e9
READ, WRITE = 0x10A, 0x20A
XEON = Topology(vendor="GenuineIntel")
SERVER = {"event": "config:0-7", "umask": "config:8-15"}
SCALE = {"scale": "6.103515625e-5", "unit": "MiB"}


def aliases(**events: str) -> dict[str, str]:
    found = dict(events)
    for name in events:
        found |= {f"{name}.{key}": text for key, text in SCALE.items()}
    return found


def genoa(tmp_path: Path) -> tuple[Path, Topology]:
    root = make_tree(tmp_path, "epyc-9354")
    for channel in range(12):
        umc(root, channel, "0")
    return root, read_topology(root)


def amounts(topology: Topology, root: Path, machine: Simulated, count: Callable[[Opened], float]) -> list[float | None]:
    """Return the gigabytes of a second, and close the counter."""
    counter = open_traffic(topology, root, machine.calls)
    assert all(amount == 0 for amount in counter.growth())
    machine.run(1, count)
    found = [None if amount is None else amount / GB for amount in counter.growth()]
    counter.close()
    assert machine.events and machine.open_events == []
    return found


def test_every_channel_is_counted_in_both_directions(tmp_path: Path) -> None:
    root, topology = genoa(tmp_path)
    machine = Simulated()
    found = amounts(topology, root, machine, lambda event: {READ: 20 * GB / 64, WRITE: 5 * GB / 64}[event.config])
    assert found == [pytest.approx(240), pytest.approx(60)]
    assert {event.type for event in machine.events.values()} == set(range(20, 32))
    assert open_traffic(topology, root, machine.calls).name == "umc"


def test_the_fabric_of_milan_counts_eight_channels_per_socket(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    old_fabric(root, "0,32")
    machine = Simulated()
    counter = open_traffic(read_topology(root), root, machine.calls)
    configs = [(event.config, event.cpu) for event in machine.events.values()]
    # event 0x07, 0x47, ... 0x1c7 and umask 0x38; the event's high bits are at 32
    wanted = [0x3807, 0x3847, 0x3887, 0x38C7, 0x1_0000_3807, 0x1_0000_3847, 0x1_0000_3887, 0x1_0000_38C7]
    assert configs == [(config, cpu) for config in wanted for cpu in (0, 32)]
    machine.run(1, lambda _: 15 * GB / 64, share=0.5)  # eight events take turns on four counters
    assert counter.name == "amd_df"
    assert counter.growth() == (pytest.approx(16 * 15 * GB, rel=1e-6),)


@pytest.mark.parametrize(
    ("name", "fabric", "why", "how"),
    [
        ("epyc-9354p-nps4", old_fabric, "several NUMA nodes", "NPS1"),
        ("epyc-9354", new_fabric, "memory controllers", "6.8"),
    ],
)
def test_where_the_fabric_is_not_trusted(
    tmp_path: Path, name: str, fabric: Callable[[Path], None], why: str, how: str
) -> None:
    root = make_tree(tmp_path, name)
    fabric(root)
    with pytest.raises(CannotCount, match=why) as caught:
        open_traffic(read_topology(root), root, Simulated().calls)
    assert how in caught.value.how


@pytest.mark.parametrize(("name", "how"), [("2x-epyc-7543", "amd_uncore"), ("xeon-6430", "intel_uncore"), ("vm", "")])
def test_without_the_module(tmp_path: Path, name: str, how: str) -> None:
    root = make_tree(tmp_path, name)
    topology = read_topology(root)
    for opener in (open_traffic, open_power):
        with pytest.raises(CannotCount) as caught:
            opener(topology, root, Simulated().calls)
        assert ("modprobe" in caught.value.how) == bool(how)
        assert how in caught.value.how or opener is open_power
        assert ("virtual" in str(caught.value)) == (not how)


def test_events_that_the_kernel_describes_otherwise_leave_nothing_open(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    pmu(root, "amd_df", 10, "0,32", {"event": "config:0-7", "umask": "config:8-15"})
    machine = Simulated()
    with pytest.raises(CannotCount, match="event=0x107"):
        open_traffic(read_topology(root), root, machine.calls)
    assert machine.events and machine.open_events == []


def intel(event: Opened) -> float:
    """Simulate 10 GB/s read and 2 GB/s written on each channel, by the events of three kinds of controllers."""
    read, written = 10 * GB / 64, 2 * GB / 64
    return {0x0304: read, 0x20FF: read, 1: read, 0x0C04: written, 0x30FF: written, 2: written}.get(event.config, 0)


CAS = aliases(cas_count_read="event=0x04,umask=0x03", cas_count_write="event=0x04,umask=0x0c")
DATA = aliases(
    data_read="event=0xff,umask=0x20", data_write="event=0xff,umask=0x30", data_total="event=0xff,umask=0x10"
)


@pytest.mark.parametrize(
    ("pmus", "amount", "types"),
    [
        ({f"uncore_imc_{n}": (30 + n, "0,28", CAS) for n in range(6)}, [120, 24], set(range(30, 36))),
        ({f"uncore_imc_free_running_{n}": (40 + n, "0", DATA) for n in range(2)}, [20, 4], {40, 41}),
        # Both see the same traffic, which is not counted twice.
        ({"uncore_imc_0": (30, "0", CAS), "uncore_imc_free_running_0": (40, "0", DATA)}, [10, 2], {30}),
    ],
    ids=["servers", "clients", "both"],
)
def test_controllers_of_intel(
    tmp_path: Path, pmus: dict[str, tuple[int, str, dict[str, str]]], amount: list[float], types: set[int]
) -> None:
    for name, (type_, cpus, events) in pmus.items():
        pmu(tmp_path, name, type_, cpus, SERVER, events)
    machine = Simulated()
    assert amounts(XEON, tmp_path, machine, intel) == [pytest.approx(gigabytes) for gigabytes in amount]
    assert {event.type for event in machine.events.values()} == types


def test_energy_of_all_packages(tmp_path: Path) -> None:
    energy(tmp_path)
    machine = Simulated()
    counter = open_power(XEON, tmp_path, machine.calls)
    assert [(e.type, e.config, e.cpu) for e in machine.events.values()] == [(8, 2, 0), (8, 2, 32)]
    machine.run(1, lambda _: 100 * 2**32)
    assert (counter.name, counter.growth()) == ("rapl", (200.0,))
