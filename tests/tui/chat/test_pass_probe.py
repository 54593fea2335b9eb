"""Tests that the app measures once what passes cost while it is idle, and gives way at once."""

from __future__ import annotations

import asyncio

import pytest

from cpuchat import settings
from cpuchat.bench.cost_probe import CostProbe
from cpuchat.costmodel.observations import Observation
from cpuchat.errors import Interrupted
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.models.costs import CostLog
from cpuchat.tui.chat import pass_probe
from tests.costmodel.made_up import probe, two_cores
from tests.support.chat_app import running
from tests.support.scripted_backend import Gate, ScriptedBackend, answer

TOLD = "Measuring this machine once"


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
        return probe(two_cores())[:12]

    def stop(self) -> None:
        self.stopped.set()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_probe, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(pass_probe, "IDLE_CHECKS", 1)
    monkeypatch.setattr("cpuchat.bench.cost_probe.CostProbe", MadeUp)
    MadeUp.runs, MadeUp.long = [], False


async def test_passes_are_measured_once_and_the_user_is_told() -> None:
    placement = place(read_topology(), PlacementSpec())
    async with running() as app:
        await app.until(lambda: app.chat._stream.passes.done)
        assert CostLog(placement.cpus, placement.memory.words).read().probe
        assert [notice for notice in app.notices if TOLD in notice]
    async with running() as app:
        await app.until(lambda: app.chat._stream.passes.done)
        assert not [notice for notice in app.notices if TOLD in notice]
    assert len(MadeUp.runs) == 1


async def test_it_gives_way_to_keys_and_answers_and_begins_again() -> None:
    MadeUp.long = True
    gate = Gate()
    async with running(ScriptedBackend([answer("One two", gate=gate)])) as app:
        passes = app.chat._stream.passes
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
        assert sum(TOLD in notice for notice in app.notices) == 1


async def test_it_is_off_with_the_bandwidth_probe() -> None:
    settings.update({"hardware": {"probe": False}})
    async with running() as app:
        assert not app.chat._stream.passes._is_wanted()
    assert not MadeUp.runs
