"""Tests the counters of the chat screen: opened beside the event loop, given back when the worker changes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cpuchat.telemetry.machine import MachineSample
from cpuchat.tui.services import MachineWatch


class Counters:
    """Tells the process it was opened for."""

    def __init__(self, pid: int | None) -> None:
        self.thread = threading.get_ident()
        self.pid = pid
        self.closed = threading.Event()
        self.threads: set[int] = set()

    def sample(self) -> MachineSample:
        self.threads.add(threading.get_ident())
        return MachineSample(no_bandwidth=f"process {self.pid}")

    def close(self) -> None:
        self.closed.set()


class Machine:
    """Opens `Counters`, and remembers them."""

    def __init__(self) -> None:
        self.opened: list[Counters] = []

    def open(self, pid: int | None) -> Counters:
        self.opened.append(Counters(pid))
        return self.opened[-1]


async def first(watch: MachineWatch, pid: int | None) -> MachineSample:
    """Return the first report of the watch."""
    while (sample := watch.sample(pid)) is None:
        await asyncio.sleep(0)
    return sample


async def given_back(counters: Counters) -> None:
    """Wait until the counters are closed: at once, or when a reading has returned."""
    while not counters.closed.is_set():
        await asyncio.sleep(0)


async def test_counters_are_opened_in_a_thread_and_asked_from_then_on() -> None:
    machine = Machine()
    watch = MachineWatch(machine.open)
    assert watch.sample(7) is None  # being opened
    assert (await first(watch, 7)).no_bandwidth == "process 7"
    watch.sample(7)
    [counters] = machine.opened
    assert counters.thread != threading.get_ident()
    assert threading.get_ident() not in counters.threads


@pytest.mark.timeout(180)
async def test_a_kernel_that_takes_its_time_keeps_nobody() -> None:
    asked, go = threading.Event(), threading.Event()

    class Slow(Counters):
        def sample(self) -> MachineSample:
            if self.threads:
                asked.set()
                go.wait()
            return super().sample()

    watch = MachineWatch(Slow)
    sample = await first(watch, 7)
    while not asked.is_set():
        assert watch.sample(7) == sample
        await asyncio.sleep(0)
    assert watch.sample(7) == sample  # the last one, while the next is waited for
    go.set()
    watch.close()


async def test_another_process_means_other_counters() -> None:
    machine = Machine()
    watch = MachineWatch(machine.open)
    await first(watch, 7)
    assert (await first(watch, 8)).no_bandwidth == "process 8"
    await given_back(machine.opened[0])
    assert (await first(watch, None)).no_bandwidth == "process None"
    await given_back(machine.opened[1])
    watch.close()
    await given_back(machine.opened[2])


async def test_counters_that_come_too_late_are_given_back() -> None:
    go, opened = threading.Event(), Machine()

    def slowly(pid: int | None) -> Counters:
        go.wait(180)
        return opened.open(pid)

    watch = MachineWatch(slowly)
    watch.sample(7)
    watch.close()
    go.set()
    while not (opened.opened and opened.opened[0].closed.is_set()):
        await asyncio.sleep(0)


async def test_a_machine_that_cannot_be_read_has_no_counters() -> None:
    tried = threading.Event()

    def fails(pid: int | None) -> Counters:
        tried.set()
        raise OSError("no")

    watch = MachineWatch(fails)
    for _ in range(3):
        assert watch.sample(7) is None
        await asyncio.to_thread(tried.wait, 60)
    watch.close()
