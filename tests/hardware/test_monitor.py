"""Tests the monitor: how often sources are asked, what happens when one fails, and that it never raises."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpuchat.hardware import monitor as monitor_module
from cpuchat.hardware.counters.perf_events import Kernel
from cpuchat.hardware.monitor import Monitor
from cpuchat.hardware.topology import Topology, read_topology
from cpuchat.telemetry.machine import Bandwidth, Power
from tests.hardware.counters.simulated import Simulated, refused, umc
from tests.hardware.trees import NAMES, make_tree, write

GB = 1e9
GENOA = 460.8 * GB


def word(largest: int, used: int) -> int:
    return largest << 20 | used << 8


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An EPYC 9354 with HSMP."""
    return write(make_tree(tmp_path, "epyc-9354"), {"dev/hsmp": ""})


@pytest.fixture
def machine() -> Simulated:
    return Simulated(answers={(0x14, 0): word(460, 288), (4, 0): 250_000})


def monitor(root: Path, machine: Simulated, theoretical: float | None = GENOA) -> Monitor:
    return Monitor(read_topology(root), None, root, kernel=machine.calls, theoretical=theoretical)


def test_bandwidth_and_power(root: Path, machine: Simulated) -> None:
    watching = monitor(root, machine)
    assert watching.sources == ()
    sample = watching.sample(100.0)
    assert sample.bandwidth is not None and sample.power is not None
    assert sample.bandwidth.total == 288 * GB
    assert sample.power.watts == 250
    assert (sample.no_bandwidth, sample.no_power) == ("", "")
    assert watching.sources == ("hsmp", "hsmp")
    assert [one.name for one in watching.refusals] == [
        "collector", "HSMP files", "collector", "RAPL", "package energy", "HSMP sensor",
    ]  # fmt: skip


def test_a_source_is_asked_no_more_often_than_it_allows(root: Path, machine: Simulated) -> None:
    watching = monitor(root, machine)
    watching.sample(100.0)
    sent = len(machine.sent)
    machine.answers[0x14, 0] = word(460, 10)
    sample = watching.sample(100.25)
    assert len(machine.sent) == sent
    assert sample.bandwidth is not None and sample.bandwidth.total == 288 * GB
    sample = watching.sample(100.5)
    assert len(machine.sent) == sent + 2
    assert sample.bandwidth is not None and sample.bandwidth.total == 10 * GB


def test_a_clock_that_goes_back_does_not_stop_it(root: Path, machine: Simulated) -> None:
    watching = monitor(root, machine)
    watching.sample(1000.0)
    machine.answers[0x14, 0] = word(460, 10)
    sample = watching.sample(5.0)
    assert sample.bandwidth is not None and sample.bandwidth.total == 10 * GB


def test_the_first_sample_of_a_counter_says_what_it_waits_for(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    umc(root, 0, "0")
    machine = Simulated()
    watching = monitor(root, machine)
    sample = watching.sample(1.0)
    assert sample.bandwidth is None
    assert sample.no_bandwidth == "umc needs a second sample"
    machine.run(0.25, lambda _: GB / 64)
    sample = watching.sample(1.25)
    assert sample.bandwidth is not None and sample.bandwidth.total == pytest.approx(8 * GB)


def test_a_source_that_fails_gives_way_to_the_next(root: Path, machine: Simulated) -> None:
    umc(root, 0, "0")
    watching = monitor(root, machine)
    assert watching.sample(100.0).bandwidth is not None
    machine.answers[0x14, 0] = refused(errno.ETIMEDOUT)
    for step in range(1, 5):
        watching.sample(100.0 + step)
    machine.run(1, lambda _: GB / 64)
    sample = watching.sample(105.0)
    assert sample.bandwidth is not None and sample.bandwidth.source == "umc"
    why = {one.name: one.why for one in watching.refusals}
    assert "timed out" in why["hsmp"]
    assert machine.closed_files == [7]


def test_when_nothing_is_left_it_says_why_and_tries_again_later(root: Path, machine: Simulated) -> None:
    answers, machine.answers = machine.answers, {}
    watching = monitor(root, machine)
    sample = watching.sample(100.0)
    assert sample.bandwidth is None and sample.power is None
    assert sample.no_bandwidth == "HSMP mailbox: this firmware does not support the message; update the firmware"
    assert "modprobe intel_rapl_msr" in sample.no_power
    machine.answers = answers
    asked = len(machine.sent)
    assert watching.sample(130.0).bandwidth is None
    assert len(machine.sent) == asked  # looking for counters costs time
    assert watching.sample(160.0).bandwidth is not None


def test_impossible_figures_are_not_shown_and_end_the_source(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    umc(root, 0, "0")
    machine = Simulated()
    watching = monitor(root, machine)
    watching.sample(0.0)
    machine.run(1, lambda _: 100 * GB / 64)
    sample = watching.sample(1.0)
    assert sample.bandwidth is not None and sample.bandwidth.total == pytest.approx(200 * GB)
    for second in (2.0, 3.0):
        machine.run(1, lambda _: 400 * GB / 64)
        sample = watching.sample(second)
        assert sample.bandwidth is not None and sample.bandwidth.total == pytest.approx(200 * GB)
    machine.run(1, lambda _: 400 * GB / 64)
    sample = watching.sample(4.0)
    assert sample.bandwidth is None
    why = {one.name: one.why for one in watching.refusals}
    assert why["umc"] == "reads 800 GB/s, above the theoretical peak of 461"


def test_one_impossible_figure_is_forgiven(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    umc(root, 0, "0")
    machine = Simulated()
    watching = monitor(root, machine)
    for second, gigabytes in enumerate([1, 900, 1, 900, 900, 2, 900, 900, 3]):
        machine.run(1, lambda _, amount=gigabytes: amount * GB / 64)
        sample = watching.sample(float(second))
    assert sample.bandwidth is not None and sample.bandwidth.total == pytest.approx(6 * GB)


def test_a_figure_that_is_not_followed_by_another_is_dropped(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    umc(root, 0, "0")
    machine = Simulated()
    watching = monitor(root, machine)
    watching.sample(0.0)
    machine.run(1, lambda _: GB / 64)
    assert watching.sample(1.0).bandwidth is not None
    machine.run(1, lambda _: 0, share=0)  # another program has the hardware's counters now
    assert watching.sample(2.0).bandwidth is not None
    machine.run(3, lambda _: 0, share=0)
    assert watching.sample(5.0).bandwidth is None


def test_gigabits_are_told_by_the_machines_own_memory(root: Path, machine: Simulated) -> None:
    machine.answers[0x14, 0] = word(3686, 2304)
    sample = monitor(root, machine, theoretical=None).sample(1.0)
    assert sample.bandwidth is not None and sample.bandwidth.total == 288 * GB


def test_counters_of_the_worker_alone(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    (root / "proc/42/task/42").mkdir(parents=True)
    machine = Simulated()
    watching = Monitor(read_topology(root), 42, root, kernel=machine.calls, theoretical=GENOA)
    watching.sample(1.0)
    machine.run(1, lambda _: GB / 64)
    sample = watching.sample(2.0)
    assert sample.bandwidth is not None
    assert (sample.bandwidth.scope, sample.bandwidth.total) == ("process", pytest.approx(2 * GB))
    (root / "proc/42/task/42").rmdir()
    sample = watching.sample(3.0)
    assert sample.bandwidth is None


def test_closing_gives_everything_back_and_sampling_opens_it_again(root: Path, machine: Simulated) -> None:
    umc(root, 0, "0")
    machine.answers[0x14, 0] = refused(errno.ENOMSG)
    watching = monitor(root, machine)
    watching.sample(1.0)
    assert machine.open_events
    watching.close()
    assert machine.open_events == []
    assert watching.sources == ()
    watching.sample(2.0)
    assert watching.sources == ("umc", "hsmp")
    watching.close()
    watching.close()


def test_broken_calls_never_raise(root: Path) -> None:
    def broken(*_: object) -> int:
        raise MemoryError("no")

    umc(root, 0, "0")
    watching = Monitor(read_topology(root), 1, root, kernel=Kernel(broken, broken), theoretical=None)
    sample = watching.sample(1.0)
    assert sample.bandwidth is None and sample.power is None
    assert any("MemoryError" in one.why for one in watching.refusals)
    watching.close()


def test_a_source_that_cannot_even_be_closed(root: Path, machine: Simulated) -> None:
    def broken(_: int) -> None:
        raise refused(errno.EBADF)

    calls = machine.calls
    kernel = Kernel(calls.perf_event_open, calls.open, calls.ioctl, calls.read, broken, calls.wall)
    watching = Monitor(read_topology(root), None, root, kernel=kernel, theoretical=GENOA)
    assert watching.sample(1.0).bandwidth is not None
    watching.close()
    assert watching.sources == ()


@pytest.mark.parametrize("name", NAMES)
def test_every_machine_without_counters_gets_words(tmp_path: Path, name: str) -> None:
    root = make_tree(tmp_path, name)
    sample = Monitor(read_topology(root), None, root, kernel=Simulated().calls).sample(1.0)
    assert sample.bandwidth is None and sample.power is None
    assert sample.no_bandwidth and sample.no_power


def test_a_topology_that_knows_nothing(tmp_path: Path) -> None:
    sample = Monitor(Topology(), None, tmp_path, kernel=Simulated().calls).sample(1.0)
    assert sample.no_bandwidth and sample.no_power


def test_this_machine() -> None:
    watching = Monitor(read_topology())
    sample = watching.sample()
    assert (sample.bandwidth is None) == bool(sample.no_bandwidth)
    assert (sample.power is None) == bool(sample.no_power)
    watching.close()


def test_the_collectors_file_is_preferred(root: Path, machine: Simulated) -> None:
    write(root, {"run/cpuchat/bandwidth.json": json.dumps({"bw": 300, "ts": machine.wall, "source": "umc"})})
    sample = monitor(root, machine).sample(1.0)
    assert sample.bandwidth is not None
    assert sample.bandwidth.source == "umc via collector"
    assert machine.sent and all(sent[0] == 4 for sent in machine.sent)  # only power is asked of the mailbox


class Fake:
    """A source of bandwidth or power that says what it is told to."""

    name, scope, least_seconds = "fake", "machine", 0.25

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)
        self.closed = 0

    def sample(self, now: float) -> Any:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed += 1


def fakes(monkeypatch: pytest.MonkeyPatch, kind: str, openers: Callable[[], list[Fake]]) -> Monitor:
    """Return a monitor with these sources of `kind`, opened anew each time."""
    monkeypatch.setattr(monitor_module, "counter_openers", lambda *_, **__: [])
    monkeypatch.setattr(monitor_module, "power_openers", lambda *_, **__: [])
    monkeypatch.setattr(monitor_module, kind, lambda *_, **__: [(one.name, lambda one=one: one) for one in openers()])
    return Monitor(Topology(), theoretical=GENOA)


@pytest.mark.parametrize("now", [0.1, 1.1, 100.3, 16339.115352644983, 5.0])
def test_sources_are_looked_for_once_at_a_time(monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    # 0.1 + 60 - 60 is more than 0.1: a time in the future and back is no way to tell that the clock went back.
    made: list[Fake] = []

    def opened() -> list[Fake]:
        made.append(Fake(OSError(errno.EIO, "gone")))
        return made[-1:]

    watching = fakes(monkeypatch, "counter_openers", opened)
    for _ in range(3):
        assert watching.sample(now).bandwidth is None
    assert [one.closed for one in made] == [1]
    watching.sample(now + 61)
    assert [one.closed for one in made] == [1, 1]


def test_a_source_that_fell_silent_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = Bandwidth(7 * GB, "second", "machine")
    silent, second = Fake(None), Fake(figure)
    watching = fakes(monkeypatch, "counter_openers", lambda: [silent, second])
    said = [watching.sample(float(n)) for n in range(30)]
    assert said[0].no_bandwidth == "fake needs a second sample"
    assert said[10].no_bandwidth == "fake has no reading at the moment"
    assert said[-1].bandwidth == figure
    assert silent.closed == 1
    assert [one.why for one in watching.refusals] == ["no readings; another program may be using the counters"]


@pytest.mark.parametrize("total", [float("nan"), float("inf"), -1.0])
def test_a_figure_that_is_none_is_never_shown(monkeypatch: pytest.MonkeyPatch, total: float) -> None:
    source = Fake(Bandwidth(total, "fake", "machine"))
    watching = fakes(monkeypatch, "counter_openers", lambda: [source])
    assert all(watching.sample(float(n)).bandwidth is None for n in range(5))
    assert source.closed == 1
    assert [one.why for one in watching.refusals] == ["its readings are not valid numbers"]


@pytest.mark.parametrize(
    "power", [Power(float("nan"), 1, "fake"), Power(-5, 1, "fake"), Power(5, float("inf"), "fake")]
)
def test_nonsense_watts_are_never_shown(monkeypatch: pytest.MonkeyPatch, power: Power) -> None:
    watching = fakes(monkeypatch, "power_openers", lambda: [Fake(power)])
    assert all(watching.sample(float(n)).power is None for n in range(5))


def test_joules_go_on_where_the_next_source_counts_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Fake(Power(100, 0, "a"), Power(100, 100, "a"), Power(100, 200, "a"), OSError(errno.EIO, "gone"))
    second = Fake(Power(90, 0, "b"), Power(90, 90, "b"), Power(90, 180, "b"))
    watching = fakes(monkeypatch, "power_openers", lambda: [first, second])
    joules = [power.joules for n in range(6) if (power := watching.sample(float(n)).power) is not None]
    assert joules == [0, 100, 200, 200, 290, 380]
