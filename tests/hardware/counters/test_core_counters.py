"""Tests counters of one process: its threads come and go. The threads are real ones, what they count is simulated."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cpuchat.hardware.counters.base import CannotCount
from cpuchat.hardware.counters.perf_events import CoreCounters
from cpuchat.hardware.topology import Topology, read_topology
from tests.hardware.counters.simulated import Simulated, refused
from tests.hardware.trees import make_tree

LINE = 64
OWN_TASKS = Path("/proc/self/task")


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    return read_topology(make_tree(tmp_path, "epyc-9354"))


@contextmanager
def thread() -> Iterator[int]:
    """Start a thread that waits; yields its id, and has ended afterwards."""
    started, stop = threading.Event(), threading.Event()
    ids: list[int] = []

    def wait() -> None:
        ids.append(threading.get_native_id())
        started.set()
        stop.wait()

    waiting = threading.Thread(target=wait)
    waiting.start()
    started.wait()
    try:
        yield ids[0]
    finally:
        stop.set()
        waiting.join()
        while (OWN_TASKS / str(ids[0])).exists():  # join returns shortly before the kernel is done
            pass


def test_every_thread_is_counted_in_user_mode(topology: Topology) -> None:
    machine = Simulated()
    with thread() as tid:
        counter = CoreCounters(topology, os.getpid(), kernel=machine.calls)
        opened = [event for event in machine.events.values() if event.pid == tid]
        assert [(event.type, event.config, event.cpu) for event in opened] == [(4, 0x4844, -1), (4, 0x1F72, -1)]
        assert all(event.attr[40:48] == bytes.fromhex("6000000000000000") for event in opened)
        assert {event.pid for event in machine.events.values()} == {int(task.name) for task in OWN_TASKS.iterdir()}
        counter.close()
    assert machine.open_events == []


def test_lines_by_time(topology: Topology) -> None:
    machine = Simulated()
    counter = CoreCounters(topology, os.getpid(), kernel=machine.calls)
    assert counter.sample(1.0) is None
    machine.run(1, lambda _: 1e6)
    found = counter.sample(1.5)
    assert found is not None
    assert found.read == found.total == len(machine.open_events) * 1e6 * LINE / 0.5
    assert found.write is None
    assert found.scope == "process"
    assert "estimated" in found.source


def test_threads_that_start_and_end(topology: Topology) -> None:
    machine = Simulated()
    counter = CoreCounters(topology, os.getpid(), kernel=machine.calls)
    before = len(machine.open_events)
    counter.sample(1.0)
    with thread() as tid:
        counter.sample(2.0)
        assert len(machine.open_events) == before + 2
        for event in machine.open_events:
            if event.pid == tid:
                event.count, event.enabled, event.running = 1000, 10, 10
    # What it counted after the last sample is not lost.
    found = counter.sample(3.0)
    assert found is not None
    assert found.total == 2 * 1000 * LINE
    assert len(machine.open_events) == before
    assert counter.sample(4.0) is not None


def test_a_thread_that_ends_while_it_is_opened(topology: Topology) -> None:
    with thread() as tid:
        machine = Simulated(refuse=lambda event: refused(errno.ESRCH) if event.pid == tid else None)
        counter = CoreCounters(topology, os.getpid(), kernel=machine.calls)
        assert tid not in {event.pid for event in machine.open_events}
        counter.close()


def test_a_process_that_is_gone(topology: Topology, tmp_path: Path) -> None:
    with pytest.raises(CannotCount, match="exited"):
        CoreCounters(topology, 5, tmp_path / "empty", Simulated().calls)
    task = tmp_path / "proc/77/task/77"
    task.mkdir(parents=True)
    machine = Simulated()
    counter = CoreCounters(topology, 77, tmp_path, machine.calls)
    assert counter.sample(1.0) is None
    task.rmdir()
    with pytest.raises(CannotCount, match="exited"):
        counter.sample(2.0)
    assert machine.open_events == []


def test_what_refuses(topology: Topology, tmp_path: Path) -> None:
    with pytest.raises(CannotCount, match="no model is loaded"):
        CoreCounters(topology, None, kernel=Simulated().calls)
    with pytest.raises(CannotCount, match="Zen 3"):
        CoreCounters(replace(topology, vendor="GenuineIntel", family=6), os.getpid(), kernel=Simulated().calls)
    with pytest.raises(CannotCount, match="Zen 3"):
        CoreCounters(replace(topology, family=0x17), os.getpid(), kernel=Simulated().calls)
    # The second event of the first thread is refused: the first one is closed again.
    machine = Simulated(refuse=lambda event: refused(errno.ENOENT) if event.config == 0x1F72 else None)
    with pytest.raises(CannotCount, match="no such counter"):
        CoreCounters(topology, os.getpid(), kernel=machine.calls)
    assert machine.open_events == []
    machine = Simulated(refuse=lambda _: refused(errno.EACCES))
    root = tmp_path / "epyc-9354"  # perf_event_paranoid is 2 there, which allows it: so it is something else
    (root / "proc/9/task/9").mkdir(parents=True)
    with pytest.raises(CannotCount, match="blocked"):
        CoreCounters(topology, 9, root, machine.calls)
    (root / "proc/sys/kernel/perf_event_paranoid").write_text("3\n")
    with pytest.raises(CannotCount) as caught:
        CoreCounters(topology, 9, root, machine.calls)
    assert "perf_event_paranoid=2" in caught.value.how


def test_a_right_that_is_lost(topology: Topology) -> None:
    allowed = True
    machine = Simulated(refuse=lambda _: None if allowed else refused(errno.EMFILE))
    counter = CoreCounters(topology, os.getpid(), kernel=machine.calls)
    allowed = False
    with thread(), pytest.raises(CannotCount, match="too many open files"):
        counter.sample(1.0)
    counter.close()
    assert machine.open_events == []


def test_an_event_that_ended_with_its_thread_is_closed_all_the_same(topology: Topology) -> None:
    machine = Simulated()
    gone = 0

    def read(fd: int, size: int) -> bytes:
        return b"" if machine.events[fd].pid == gone else machine.calls.read(fd, size)

    with thread() as tid:
        counter = CoreCounters(topology, os.getpid(), kernel=replace(machine.calls, read=read))
        counter.sample(1.0)
    gone = tid
    assert counter.sample(2.0) is not None
    assert tid not in {event.pid for event in machine.open_events}
    counter.close()
    assert machine.open_events == []


def test_threads_without_hardware_counters_are_not_known_instead_of_idle(topology: Topology) -> None:
    machine = Simulated()
    counter = CoreCounters(topology, os.getpid(), kernel=machine.calls)
    counter.sample(1.0)
    machine.run(1, lambda _: 1e6, share=0)
    assert counter.sample(2.0) is None
    machine.run(1, lambda _: 0)
    found = counter.sample(3.0)
    assert found is not None and found.total == 0
