"""Tests the hardware screen: pictures of many machines, and trying placements on a scripted and on a real worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cpuchat.base.errors import Interrupted
from cpuchat.config import settings
from cpuchat.hardware.bandwidth.read_bandwidth import ProbeFailed, Survey
from cpuchat.hardware.numa.residency import Residency
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.hardware.topology import Topology, read_topology
from cpuchat.models.machine import Tuned
from cpuchat.tui.hardware.screen import HardwareScreen
from cpuchat.tui.services import MachineWatch
from tests.hardware.trees import make_tree
from tests.support.chat_app import SMALL, running
from tests.support.hardware_screen import backend_on, opened, picture
from tests.support.machines import (
    NO_COUNTERS,
    ON_8_CORES,
    SERVER_COUNTERS,
    WITH_DRAFT,
    Counters,
    FixtureReader,
    OnMachine,
    on,
    surveyed,
)
from tests.support.scripted_backend import Gate, answer
from tests.support.snapshots import snapshot


def test_the_picture_of_a_server_names_every_l3_group(tmp_path: Path) -> None:
    from cpuchat.tui.hardware.picture import Use, picture

    topology = read_topology(make_tree(tmp_path, "epyc-9754"))
    use = Use.of(topology.l3_groups[0].cpus, topology.l3_groups[15].cpus)
    for width in (40, 74, 114):
        rows = ["".join(text for text, _ in row) for row in picture(topology, use, width)]
        assert max(map(len, rows)) <= width
        joined = "\n".join(rows)
        assert all(f"L3 {n:>2}" in joined for n in range(16))
        assert [joined.count(cell) for cell in "▣▤□"] == [8, 8, 112]
        assert joined.count("──") + joined.count(" ─ ") == 8


MACHINES = ["epyc-9354", "epyc-9654", "epyc-9754", "2x-epyc-7543", "hybrid-desktop", "vm"]


@pytest.mark.parametrize("name", MACHINES)
async def test_snapshots(tmp_path: Path, name: str) -> None:
    root = make_tree(tmp_path, name)
    topology = read_topology(root)
    on_server = "epyc" in name
    nodes = {node.number: 8 << 30 for node in topology.cpu_nodes}
    two = len(nodes) > 1

    def measured(topology: Topology) -> Survey:
        return surveyed(topology, 22.0, 41.0, 165.0) if two else surveyed(topology)

    reader = FixtureReader(
        root, measured, on_server, Residency(nodes), SERVER_COUNTERS if on_server and not two else NO_COUNTERS
    )
    backend = OnMachine(on(topology, WITH_DRAFT if on_server else ON_8_CORES), "interleave:0-1" if two else "local")
    async with running(backend) as app:
        screen = await opened(app, reader)
        await app.until(lambda: screen.now.placed)
        if on_server:
            await app.press("down")
        await app.pilot.pause()
        await snapshot(app.app, f"hardware-{name}-120x40")
        if name in ("2x-epyc-7543", "vm"):
            await app.pilot.resize_terminal(*SMALL)
            await snapshot(app.app, f"hardware-{name}-80x24")


async def test_this_machine_is_shown() -> None:
    async with running() as app:
        screen = await opened(app)
        topology = read_topology()
        assert topology.cpu_name in str(screen.query_one("#machine").border_title)
        assert sum(picture(screen).count(cell) for cell in "▣▤□·") >= len(topology.cores)
        await app.press("escape")
        await app.until(lambda: app.app.screen is app.chat)


async def test_the_bandwidth_is_measured_and_shown(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    async with running(backend_on(root)) as app:
        await opened(app, FixtureReader(root))
        await app.press("m")
        await app.until(lambda: not app.chat.busy)
        assert "1 L3 group    49.9 GB/s" in app.screen_text
        assert "all 32 cores   367 GB/s" in app.screen_text
        assert "80 % of 461" in app.screen_text


async def test_what_is_measured_are_the_cores_that_lists_predict_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a model runs on the cores that tuning found for it."""
    specs: list[PlacementSpec] = []

    async def measured(reader: object, facts: object, spec: PlacementSpec, *others: object) -> None:
        specs.append(spec)
        raise Interrupted("The measurement was stopped.")

    monkeypatch.setattr("cpuchat.tui.hardware.panels.measure_machine", measured)
    root = make_tree(tmp_path, "epyc-9354")
    async with running(backend_on(root)) as app:
        screen = await opened(app, FixtureReader(root))
        screen._conversation.tuned = Tuned(model="m", changes={"engine": {"threads": 1}})
        await app.press("m")
        await app.until(lambda: not app.chat.busy)
    assert specs == [PlacementSpec()]


class Waiting(FixtureReader):
    """Measures until it is told to stop."""

    def survey(
        self, topology: Topology, memory: str, progress: Callable[[int, int, str], None], cancelled: Callable[[], bool]
    ) -> Survey:
        progress(1, 7, "one L3 group")
        while not cancelled():
            os.sched_yield()
        raise Interrupted("The measurement was stopped.")


async def test_measuring_the_bandwidth_can_be_stopped_and_ends_with_the_app(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root)
    async with running(backend) as app:
        screen = await opened(app, Waiting(root))
        await app.press("m")
        await app.until(lambda: "Measuring one L3 group · 2 of 7 · Esc stops" in app.screen_text)
        await app.press("escape")
        await app.until(lambda: not app.chat.busy)
        assert app.app.screen is screen
        assert "not measured" in app.screen_text
        await app.press("m")
        await app.until(lambda: app.chat.busy)
        app.press_last("ctrl+q")
        await app.until(lambda: backend.closed)


async def test_a_measurement_that_fails_is_told(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")

    def fails(topology: Topology) -> Survey:
        raise ProbeFailed("There is too little free memory.", "Close other programs.")

    async with running(backend_on(root)) as app:
        await opened(app, FixtureReader(root, fails))
        await app.press("m")
        await app.until(lambda: not app.chat.busy and app.notices)
        assert app.notices == ["Not measured: There is too little free memory. Close other programs."]


async def test_what_the_kernel_refused_and_where_the_weights_lie(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    backend = OnMachine(on(read_topology(root)), "local", "This system does not let programs choose.")
    reader = FixtureReader(root, placed=Residency({0: 51, 1: 49}))
    async with running(backend) as app:
        screen = await opened(app, reader)
        await app.until(lambda: screen.now.placed)
        assert "N0 51 % · N1 49 %" in app.screen_text
        assert "local · requested policy rejected: This system does not let programs choose." in app.screen_text
        assert "no counter opens here; cpuchat counters says why" in app.screen_text


async def test_the_counter_is_named_with_its_figure(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    async with running(backend_on(root)) as app:
        await opened(app, FixtureReader(root, sample=SERVER_COUNTERS))
        assert "288 GB/s now · umc, whole machine" in app.screen_text


async def test_counters_can_be_off(tmp_path: Path) -> None:
    settings.update({"hardware": {"counters": False}})
    root = make_tree(tmp_path, "epyc-9354")
    async with running(backend_on(root)) as app:
        await opened(app, FixtureReader(root))
        assert app.screen_text.count("counters are off in the settings (F2)") == 2


async def test_two_screens_share_the_counters(tmp_path: Path) -> None:
    """Two that count the same events take them from each other."""
    root = make_tree(tmp_path, "epyc-9354")
    opened_counters: list[Counters] = []

    def open_monitor() -> Counters:
        opened_counters.append(Counters(SERVER_COUNTERS))
        return opened_counters[-1]

    gate = Gate()
    async with running(backend_on(root, answers=[answer("One two", gate=gate)])) as app:
        app.app.services.machine_watch = MachineWatch(open_monitor)
        await app.count_up_to(gate)
        await app.until(lambda: opened_counters)
        screen = HardwareScreen(app.app.services, FixtureReader(root))
        await app.app.push_screen(screen)
        await app.until(lambda: screen.now.sample == SERVER_COUNTERS)
        gate.open()
        await app.until(lambda: not app.chat.busy)
        assert len(opened_counters) == 1
    assert opened_counters[0].closed
