"""Tests the hardware screen: pictures of many machines, and trying placements on a scripted worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.config import settings
from cpuchat.costs.model import ProductRate
from cpuchat.hardware.numa.residency import Residency
from cpuchat.hardware.topology import Topology, read_topology
from cpuchat.models.kernels import MeasuredProducts
from cpuchat.telemetry.machine import Peaks
from tests.hardware.trees import make_tree
from tests.support.chat_app import SMALL, WIDE, running
from tests.support.hardware_screen import backend_on, opened
from tests.support.machines import (
    NO_COUNTERS,
    ON_8_CORES,
    SERVER_COUNTERS,
    WITH_DRAFT,
    FixtureReader,
    OnMachine,
    on,
    surveyed,
)
from tests.support.snapshots import snapshot


def test_the_picture_of_a_server_names_every_l3_group(tmp_path: Path) -> None:
    from cpuchat.tui.hardware.picture import Use, picture

    topology = read_topology(make_tree(tmp_path, "epyc-9754"))
    use = Use(range(8))
    for width in (40, 74, 114):
        rows = ["".join(text for text, _ in row) for row in picture(topology, use, width)]
        assert max(map(len, rows)) <= width
        joined = "\n".join(rows)
        assert all(f"L3 {n:>2}" in joined for n in range(16))
        assert [joined.count(cell) for cell in "▣□"] == [8, 120]
        assert joined.count("──") + joined.count(" ─ ") == 8
    two = picture(read_topology(make_tree(tmp_path / "two", "2x-epyc-7543")), Use(), 74)
    names = [row[0][0].strip() for row in two if row]
    assert [name for name in names if name] == ["socket 0", "node 0 275 GB", "socket 1", "node 1 275 GB"]
    (hybrid,) = picture(read_topology(make_tree(tmp_path / "hybrid", "hybrid-desktop")), use, 114)
    assert "P ▣▣ ▣▣ ▣▣ ▣▣ □▫ □▫ □▫ □▫   E □ □ □ □" in "".join(text for text, _ in hybrid)


@pytest.mark.parametrize("name", ["epyc-9754", "2x-epyc-7543", "vm"])
async def test_snapshots(tmp_path: Path, name: str) -> None:
    root = make_tree(tmp_path, name)
    topology = read_topology(root)
    on_server = "epyc" in name
    nodes = {node.number: 8 << 30 for node in topology.cpu_nodes}
    two = len(nodes) > 1

    def measured(topology: Topology) -> Peaks:
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
        size = SMALL if name == "vm" else WIDE
        await app.pilot.resize_terminal(*size)
        await snapshot(app.app, f"hardware-{name}-{size[0]}x{size[1]}")


async def test_a_measured_bandwidth_and_counters_are_shown(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    async with running(backend_on(root)) as app:
        await opened(app, FixtureReader(root, known=True, sample=SERVER_COUNTERS))
        text = " ".join(app.screen_text.split())
        for name, rate in (("1 core", 25), ("1 L3 group", 50), ("all 32 cores", 367), ("now", 288)):
            assert f"{name} {rate} GB/s █" in text
        assert "80 % of the theoretical peak" in text and "461 GB/s theoretical peak (12 × 4800 MT/s, assumed)" in text
        assert "memory traffic: 288 GB/s now, umc, whole machine · power: 214.5 W, rapl" in text


async def test_what_the_kernel_refused_and_where_the_weights_lie(tmp_path: Path) -> None:
    settings.update({"hardware": {"counters": False}})
    root = make_tree(tmp_path, "2x-epyc-7543")
    backend = OnMachine(on(read_topology(root)), "local", "This system does not let programs choose.")
    reader = FixtureReader(root, placed=Residency({0: 51, 1: 49}))
    async with running(backend, size=(120, 50)) as app:
        screen = await opened(app, reader)
        await app.until(lambda: screen.now.placed)
        assert "51 % on node 0 · 49 % on node 1" in app.screen_text
        assert "local · requested policy rejected: This system does not let programs choose." in app.screen_text
        assert "counters are off in the settings (F2)" in app.screen_text


async def test_m_measures_now_and_shows_how_far_it_is(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    reader = FixtureReader(root)
    async with running(backend_on(root), size=(60, 20)) as app:
        screen = await opened(app, reader)
        await app.press("m")
        for step in ("1 core", "all cores"):
            await app.until(lambda step=step: f"measuring {step}" in app.screen_text)
            reader.gate.release()
        await app.until(lambda: "80 % of the theoretical peak" in app.screen_text)
        await app.until(lambda: not app.chat.session.busy)
        await app.until(lambda: "measured: 367 GB/s, undisturbed" in app.screen_text)
        assert "all 32 cores   367 GB/s █" in app.screen_text and "measuring" not in app.screen_text
        await app.press("pagedown")
        await app.until(lambda: "all 32 cores   367" not in app.screen_text)
        assert app.app.screen is screen


async def test_esc_stops_measuring_and_an_answer_goes_first(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    reader = FixtureReader(root)
    async with running(backend_on(root)) as app:
        screen = await opened(app, reader)
        await app.press("m")
        await app.until(lambda: "measuring" in app.screen_text)
        await app.press("down", "enter")
        assert "You can change the placement when the bandwidth is measured (Esc stops it)." in app.notices
        await app.press("escape")
        reader.gate.release()
        await app.until(lambda: not app.chat.session.busy)
        await app.until(lambda: "not measured: press m" in app.screen_text)
        assert app.app.screen is screen
        await app.press("escape")
        await app.closes()


async def test_cores_that_other_programs_keep_busy_are_marked(tmp_path: Path) -> None:
    from cpuchat.tui.hardware.picture import Use, legend, picture

    topology = read_topology(make_tree(tmp_path, "container"))
    use = Use(target=topology.allowed[:4], busy={9, 20}, working={8})
    rows = picture(topology, use, 114)
    joined = "".join(text for row in rows for text, _ in row)
    assert [joined.count(cell) for cell in "▣■▨▩□·"] == [2, 1, 1, 1, 4, 23]
    for width in (114, 56):
        lines = ["".join(text for text, _ in line) for line in legend(topology, use, rows, width)]
        assert max(map(len, lines)) <= width
        assert [entry for line in lines for entry in line.split("   ")] == [
            "▣ 4 for the model",
            "■ 1 of them computing",
            "▨ 1 of them busy with other programs",
            "□ 4 unused",
            "· 23 not allowed",
            "▩ 1 busy with other programs",
            "▫ SMT sibling, unused",
        ]


@pytest.mark.parametrize("size", [WIDE, (200, 50)])
async def test_a_small_machine_shows_its_cores_and_what_its_kernels_reach_beside_the_bandwidth(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    root = make_tree(tmp_path, "vm")
    reader = FixtureReader(root, known=True)
    for kind, ours in (("Q8_0", 20e9), ("Q4_K", 30e9)):
        rates = (ProductRate(kind, ((1, rate), (32, rate / 2))) for rate in (ours, 25e9))
        reader.products[kind] = MeasuredProducts(cpuchat=next(rates), llama_cpp=next(rates))
    async with running(OnMachine(on(read_topology(root))), size=size) as app:
        await opened(app, reader)
        await app.shows("weights by type, one token · kernels for AVX2", "core 7   0 +   0 %", "GHz")
        lines = app.screen_text.splitlines()
        q4, q8 = (next(line for line in lines if kind in line) for kind in ("Q4_K ", "Q8_0 "))
        assert "30 GB/s █" in q4 and "1.20× llama.cpp" in q4
        assert "25 GB/s █" in q8 and "1.25× cpuchat" in q8
        assert any("  core " in line and " GB/s █" in line for line in lines)


async def test_a_high_screen_shows_the_past_of_few_cores(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "vm-without-caches")
    async with running(OnMachine(on(read_topology(root))), size=(120, 44)) as app:
        await opened(app, FixtureReader(root))
        await app.until(lambda: sum("\u28c0" in line for line in app.screen_text.splitlines()) == 4)
