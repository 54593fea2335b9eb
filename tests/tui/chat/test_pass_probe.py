"""Tests that the app measures once what passes cost while it is idle, and gives way at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import msgspec
import pytest

from cpuchat.base.errors import Interrupted, MeasureFailed
from cpuchat.bench.cost_probe import CostProbe
from cpuchat.config import settings
from cpuchat.config.servers import RunningServer
from cpuchat.config.settings import with_changes
from cpuchat.costs.fit import Observation
from cpuchat.hardware.placement.cores import BusyCores
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.measure import peak, store
from cpuchat.measure.peak import ReadBandwidth
from cpuchat.measure.subject import on_cores
from cpuchat.models.costs import CostLog
from cpuchat.telemetry.machine import Peak
from cpuchat.tui.chat import probes
from tests.costs.made_up import probe, two_cores
from tests.support.chat_app import loaded, running
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, answer


class MadeUp(CostProbe):
    """Measures nothing; waits for `stop` if it is to take long."""

    runs: list[MadeUp]
    long = False

    async def run(self, budget: float = 0.0) -> list[Observation]:
        MadeUp.runs.append(self)
        self.stopped = asyncio.Event()
        if self.long:
            await self.stopped.wait()
            raise Interrupted("Stopped.")
        if self.failure:
            raise MeasureFailed(self.failure)
        return [msgspec.structs.replace(one, cpu_wait=self.cpu_wait) for one in probe(two_cores())[:12]]

    def stop(self) -> None:
        self.stopped.set()


class Others:
    """What else runs on the machine: cores that programs compute on, and servers; and the memory that is left."""

    def __init__(self) -> None:
        self.busy = 0.0
        self.available = 64 << 30
        self.servers: list[RunningServer] = []
        self.asked = 0

    def since_last(self, probe: BusyCores, cpus: tuple[int, ...]) -> float:
        self.asked += 1
        return self.busy

    def running(self) -> list[RunningServer]:
        self.asked += 1
        return self.servers


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    others = Others()
    monkeypatch.setattr(probes.PassProbe, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(probes.PassProbe, "CHECKS", 1)
    monkeypatch.setattr(probes, "running_servers", others.running)
    monkeypatch.setattr(BusyCores, "since_last", lambda self, cpus: others.since_last(self, cpus))
    monkeypatch.setattr(probes, "available_bytes", lambda: others.available)
    monkeypatch.setattr("cpuchat.bench.cost_probe.CostProbe", MadeUp)
    MadeUp.runs, MadeUp.long, MadeUp.cpu_wait, MadeUp.failure = [], False, 0.0, ""
    return others


async def test_passes_are_measured_once_per_cores_without_a_word() -> None:
    placement = place(read_topology(), PlacementSpec())
    async with running() as app:
        passes = app.chat.pass_probe
        await app.until(lambda: passes.done)
        assert CostLog(placement.cpus, placement.memory_policy.words).probe
        app.conversation.settings = with_changes(settings.load(), {"engine": {"threads": 1}})
        assert not passes.done
        await app.until(lambda: passes.done)
        one = place(read_topology(), PlacementSpec(threads=1))
        assert CostLog(one.cpus, one.memory_policy.words).probe
    n = len(MadeUp.runs)
    async with running() as app:
        await app.until(lambda: app.chat.pass_probe.done)
        assert not app.notices
    assert len(MadeUp.runs) == n


async def test_peaks_of_the_cores_in_use_are_measured_once_the_passes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[int, ...]] = []

    def measure(cpus: tuple[int, ...], **_: object) -> ReadBandwidth:
        measured.append(cpus)
        return ReadBandwidth(cpus, 30e9, (30e9,) * peak.WINDOWS, (1.0,) * peak.WINDOWS)

    monkeypatch.setattr(peak, "measure", measure)
    placed = place(read_topology(), PlacementSpec())
    cpus, policy = placed.cpus, placed.memory_policy.words
    backend = ScriptedBackend(model=msgspec.structs.replace(MODEL, cpus=cpus))
    async with running(backend) as app:
        passes = app.chat.pass_probe

        async def raised() -> None:
            """Raise the peak as an answer does."""
            peak.raise_to(Peak(80e9, cpus, at_least=True), policy)
            await app.chat.session.show_ceiling()

        await app.ready()
        await app.until(lambda: passes.done)
        assert not measured
        n = len(MadeUp.runs)
        await raised()
        assert not passes.done
        await app.until(lambda: passes.done)
        await raised()
        assert passes.done and measured == [cpus]  # hourly
        tuned = msgspec.structs.replace(MODEL, cpus=cpus[:1])
        monkeypatch.setattr(ScriptedBackend, "model", tuned)
        peak.raise_to(Peak(9e9, cpus[:1], at_least=True), policy)
        assert not passes.done
        await app.until(lambda: passes.done)
        assert cpus[:1] in measured and len(MadeUp.runs) == n


async def test_what_another_program_measured_is_shown_after_the_next_answer() -> None:
    settings.update({"hardware": {"probe": False}})
    placed = place(read_topology(), PlacementSpec())
    store.forget(on_cores(placed.cpus, placed.memory_policy.words), peak.WHAT)
    model = msgspec.structs.replace(MODEL, cpus=placed.cpus, peak_read=0.0)
    async with loaded(ScriptedBackend([answer("One.")], model=model)) as app:
        peak.keep(ReadBandwidth(placed.cpus, 30e9, (30e9,), (1.0,)), placed.memory_policy.words)
        await app.send("Hello")
        assert app.conversation.figures().roofline.peak.value == Peak(30e9, placed.cpus)


async def test_it_waits_for_programs_that_compute_for_servers_and_for_memory(
    others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "RETRY_SECONDS", 0.05)
    others.busy, others.available = 1.0, 1 << 30
    others.servers = [RunningServer("http://127.0.0.1:8080", "m", 1)]
    async with running() as app:
        for number, free in enumerate(({"busy": 0.1}, {"servers": []}, {"available": 64 << 30})):
            n = others.asked
            await app.until(lambda n=n: others.asked > n + 4)
            assert not MadeUp.runs and bool(app.chat.pass_probe._retry_at) == bool(number)  # these are asked less often
            vars(others).update(free)
        await app.until(lambda: MadeUp.runs)


async def test_a_disturbed_measurement_is_repeated_later_and_a_failed_one_is_not() -> None:
    MadeUp.cpu_wait = 0.2
    async with running() as app:
        passes = app.chat.pass_probe
        # The first runs may have given way to the load.
        await app.until(lambda: passes._retry_at and not passes.running)
        assert not passes.done and not passes._is_wanted()
        assert not app.notices
        n = len(MadeUp.runs)
        MadeUp.failure, passes._retry_at = "The disk is full.", 0.0
        await app.until(lambda: passes.done)
        assert len(MadeUp.runs) == n + 1


async def test_it_gives_way_to_keys_and_answers_and_begins_again() -> None:
    MadeUp.long = True
    gate = Gate()
    async with running(ScriptedBackend([answer("One two", gate=gate)])) as app:
        passes = app.chat.pass_probe
        await app.until(lambda: len(MadeUp.runs) == 1)
        await app.press("a")
        assert MadeUp.runs[0].stopped.is_set()
        await app.until(lambda: len(MadeUp.runs) > 1)
        await app.press("backspace")
        await app.count_up_to(gate)
        assert not passes.running and not passes.done
        n = len(MadeUp.runs)
        gate.open()
        await app.until(lambda: len(MadeUp.runs) > n)  # idle again


async def test_the_read_bandwidth_is_measured_in_slices_that_add_up_and_give_way(
    others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = place(read_topology(), PlacementSpec(threads=1)).cpus
    settings.update({"engine": {"threads": 1}})
    slices, waiting = list[int](), threading.Event()

    def measure(cpus: tuple[int, ...], *, rounds: int, cancelled: Callable[[], bool], **_: object) -> ReadBandwidth:
        """Measure faster and faster; the third one does not end before it is stopped."""
        slices.append(rounds)
        while len(slices) == 3:
            waiting.set()
            if cancelled():
                raise Interrupted("Stopped.")
        return ReadBandwidth(cpus, 1e9 * len(slices), (1e9 * len(slices),) * rounds, (1.0,) * rounds)

    monkeypatch.setattr(peak, "measure", measure)
    store.forget(on_cores(cpus), peak.WHAT)
    with peak.one_at_a_time() as is_ours:
        assert is_ours
        async with running() as app:  # another window measures
            n = others.asked
            await app.until(lambda: others.asked > n + 4)
            assert not slices
    async with running() as app:
        await app.until(waiting.is_set)
        known = peak.known(cpus)
        assert known is not None and known.at_least and known.bytes_per_s == 2e9  # used at once
        await app.press("a")
        await app.until(lambda: app.chat.pass_probe.done)
    assert peak.known(cpus) == Peak(1e9 * len(slices), cpus) and not app.notices
    assert {*slices} == {peak.SLICE} and len(slices) == peak.WINDOWS // peak.SLICE + 1  # the stopped one


async def test_an_answer_does_not_wait_for_the_fit(others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    fitting, fitted = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        fitting.set()
        fitted.wait(180)

    monkeypatch.setattr("cpuchat.bench.cost_probe.save_passes", slow)
    async with running() as app:
        await app.until(fitting.is_set)
        others.busy = 1.0  # no other one begins
        await app.chat.session.stop_background()
        assert not fitted.is_set() and not app.chat.pass_probe.running
        fitted.set()


async def test_it_is_off_with_the_bandwidth_probe_and_for_models_on_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.update({"hardware": {"probe": False}})
    async with loaded() as app:
        passes = app.chat.pass_probe
        assert not passes._is_wanted()
        app.conversation.settings = with_changes(settings.load(), {"hardware": {"probe": True}})
        assert passes._is_wanted()
        remote = msgspec.structs.replace(MODEL, server="llama-server at 127.0.0.1:8080")
        monkeypatch.setattr(ScriptedBackend, "model", remote)
        assert not passes._is_wanted()
    assert not MadeUp.runs
