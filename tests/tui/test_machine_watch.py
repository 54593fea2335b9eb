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
        self.threads = {threading.get_ident()}
        self.closed = threading.Event()

    def sample(self) -> MachineSample:
        self.threads.add(threading.get_ident())
        return MachineSample(no_bandwidth="nothing opens")

    def close(self) -> None:
        self.closed.set()


async def first(watch: MachineWatch) -> MachineSample:
    """Return the first report of the watch."""
    while (sample := watch.sample()) is None:
        await asyncio.sleep(0)
    return sample


async def test_counters_are_opened_and_read_in_threads_and_opened_again_when_closed() -> None:
    opened: list[Counters] = []

    def open_counters() -> Counters:
        opened.append(Counters())
        return opened[-1]

    watch = MachineWatch(open_counters)
    assert watch.sample() is None  # being opened
    for number in range(2):
        assert (await first(watch)).no_bandwidth == "nothing opens"
        assert threading.get_ident() not in opened[number].threads
        watch.close()
        while not opened[number].closed.is_set():  # at once, or when a reading has returned
            await asyncio.sleep(0)


@pytest.mark.timeout(180)
async def test_a_kernel_that_takes_its_time_keeps_nobody() -> None:
    asked, go, samples = threading.Event(), threading.Event(), list[int]()

    class Slow(Counters):
        def sample(self) -> MachineSample:
            samples.append(1)
            if len(samples) > 1:
                asked.set()
                go.wait()
            return super().sample()

    counters = Slow()
    watch = MachineWatch(lambda: counters)
    sample = await first(watch)
    while not asked.is_set():
        assert watch.sample() == sample
        await asyncio.sleep(0)
    assert watch.sample() == sample  # the last one, while the next is waited for
    watch.close()
    go.set()
    while not counters.closed.is_set():  # what comes too late is given back
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
