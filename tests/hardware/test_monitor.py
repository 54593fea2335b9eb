"""Tests the monitor: how often counters are read, what happens when one fails, and that it never raises."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cpuchat.hardware.monitor import Monitor, counter_states
from cpuchat.hardware.topology import read_topology
from cpuchat.telemetry.metric import Metric
from tests.hardware.counters.simulated import Opened, Simulated, energy, refused, umc
from tests.hardware.trees import make_tree, write

GB = 1e9


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An EPYC 9354 with one memory controller and energy counters."""
    root = make_tree(tmp_path, "epyc-9354")
    umc(root, 0, "0")
    energy(root, "0")
    return root


def monitor(root: Path, machine: Simulated) -> Monitor:
    return Monitor(read_topology(root), root, kernel=machine.calls)


def traffic(gigabytes: float, watts: float = 250.0) -> Callable[[Opened], float]:
    """Count that many gigabytes, three quarters of it read, and joules."""

    def count(event: Opened) -> float:
        if event.type == 8:
            return watts * 2**32
        return gigabytes * GB / 64 * (0.75 if event.config == 0x10A else 0.25)

    return count


def test_bandwidth_and_power(root: Path) -> None:
    machine = Simulated()
    watching = monitor(root, machine)
    sample = watching.sample(100.0)
    assert (sample.no_bandwidth, sample.no_power) == ("umc needs a second sample", "rapl needs a second sample")
    machine.run(2, traffic(576, 500))
    sample = watching.sample(102.0)
    assert sample.bandwidth.total == pytest.approx(288 * GB)
    assert sample.bandwidth.read == pytest.approx(216 * GB)
    assert sample.bandwidth.write == pytest.approx(72 * GB)
    assert (sample.power.watts, sample.power.joules) == (pytest.approx(250), pytest.approx(500))
    assert (sample.no_bandwidth, sample.no_power) == ("", "")


def test_a_counter_that_fails_says_why_and_is_opened_again_later(root: Path) -> None:
    machine = Simulated()
    is_broken = False

    def read(fd: int, size: int) -> bytes:
        return b"" if is_broken else machine.calls.read(fd, size)

    watching = Monitor(read_topology(root), root, kernel=replace(machine.calls, read=read))
    watching.sample(100.0)
    is_broken = True
    sample = watching.sample(101.0)
    assert sample.bandwidth is None and sample.power is None
    assert "Input/output error" in sample.no_bandwidth
    assert machine.open_events == []
    is_broken = False
    asked = len(machine.events)
    watching.sample(130.0)
    assert len(machine.events) == asked  # looking for counters costs time
    watching.sample(161.0)
    machine.run(1, traffic(10))
    assert watching.sample(162.0).bandwidth is not None


@pytest.mark.parametrize(("count", "share"), [(traffic(3000, 9000), 1.0), (traffic(1), 0.0)])
def test_impossible_figures_and_missing_ones_are_not_shown(
    root: Path, count: Callable[[Opened], float], share: float
) -> None:
    machine = Simulated()
    watching = monitor(root, machine)
    watching.sample(0.0)
    machine.run(1, traffic(200))
    assert watching.sample(1.0).bandwidth is not None
    machine.run(1, count, share=share)
    sample = watching.sample(2.0)
    assert sample.bandwidth is None and sample.power is None
    assert sample.no_bandwidth == "umc has no reading at the moment"
    machine.run(1, traffic(100))
    sample = watching.sample(3.0)
    assert sample.bandwidth is not None and sample.bandwidth.total == pytest.approx(100 * GB)


def test_closing_gives_everything_back_and_sampling_opens_it_again(root: Path) -> None:
    machine = Simulated()
    watching = monitor(root, machine)
    watching.sample(1.0)
    assert machine.open_events
    watching.close()
    assert machine.open_events == []
    watching.sample(2.0)
    watching.close()
    watching.close()


@pytest.mark.parametrize("name", ["2x-epyc-7543", "xeon-6430", "vm", "garbage"])
def test_every_machine_without_counters_gets_words(tmp_path: Path, name: str) -> None:
    root = make_tree(tmp_path, name)
    topology = read_topology(root)
    sample = Monitor(topology, root, kernel=Simulated().calls).sample(1.0)
    assert sample.bandwidth is None and sample.power is None
    assert sample.no_bandwidth and sample.no_power
    traffic, power = counter_states(topology, root, Simulated().calls)
    assert (traffic.why, power.why) == (sample.no_bandwidth, sample.no_power)


def test_what_opens_is_named_and_closed_again(root: Path) -> None:
    machine = Simulated()
    assert counter_states(read_topology(root), root, machine.calls) == (Metric("umc"), Metric("rapl"))
    assert machine.events and machine.open_events == []
    write(root, {"proc/sys/kernel/perf_event_paranoid": "4"})
    machine = Simulated(refuse=lambda _: refused(errno.EACCES))
    traffic, _ = counter_states(read_topology(root), root, machine.calls)
    assert traffic.why.startswith("the kernel restricts it to root (perf_event_paranoid is 4); `sudo sysctl")
