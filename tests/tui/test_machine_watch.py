"""Tests the counters of the screens: opened beside the event loop, and given back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cpuchat.telemetry.machine import MachineSample
from cpuchat.tui.services import MachineWatch


class Counters:
    """Tells the threads that it is used in."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.closed = threading.Event()
        self.threads: set[int] = set()

    def sample(self) -> MachineSample:
        self.threads.add(threading.get_ident())
        return MachineSample(no_bandwidth="nothing opens")

    def close(self) -> None:
        self.closed.set()


class Machine:
    """Opens `Counters`, and remembers them."""

    def __init__(self) -> None:
        self.opened: list[Counters] = []

    def open(self) -> Counters:
        self.opened.append(Counters())
        return self.opened[-1]


async def first(watch: MachineWatch) -> MachineSample:
    """Return the first report of the watch."""
    while (sample := watch.sample()) is None:
        await asyncio.sleep(0)
    return sample


async def given_back(counters: Counters) -> None:
    """Wait until the counters are closed: at once, or when a reading has returned."""
    while not counters.closed.is_set():
        await asyncio.sleep(0)


async def test_counters_are_opened_in_a_thread_asked_from_then_on_and_opened_again_when_closed() -> None:
    machine = Machine()
    watch = MachineWatch(machine.open)
    assert watch.sample() is None  # being opened
    for number in range(2):
        assert (await first(watch)).no_bandwidth == "nothing opens"
        counters = machine.opened[number]
        assert counters.thread != threading.get_ident()
        assert threading.get_ident() not in counters.threads
        watch.close()
        await given_back(counters)


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
    sample = await first(watch)
    while not asked.is_set():
        assert watch.sample() == sample
        await asyncio.sleep(0)
    assert watch.sample() == sample  # the last one, while the next is waited for
    go.set()
    watch.close()


async def test_counters_that_come_too_late_are_given_back() -> None:
    go, opened = threading.Event(), Machine()

    def slowly() -> Counters:
        go.wait(180)
        return opened.open()

    watch = MachineWatch(slowly)
    watch.sample()
    watch.close()
    go.set()
    while not (opened.opened and opened.opened[0].closed.is_set()):
        await asyncio.sleep(0)


async def test_a_machine_that_cannot_be_read_has_no_counters() -> None:
    tried = threading.Event()

    def fails() -> Counters:
        tried.set()
        raise OSError("no")

    watch = MachineWatch(fails)
    for _ in range(3):
        assert watch.sample() is None
        await asyncio.to_thread(tried.wait, 60)
    watch.close()
