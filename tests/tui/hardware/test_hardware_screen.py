"""The hardware screen: pictures of many machines, and trying placements on a scripted and on a real worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.widgets import Input

from cpuchat import paths, settings
from cpuchat.backend.local import LocalBackend
from cpuchat.errors import Interrupted
from cpuchat.hardware.bandwidth.measuring import ProbeFailed
from cpuchat.hardware.bandwidth.survey import Survey
from cpuchat.hardware.numa.residency import Residency
from cpuchat.hardware.topology import Topology, read_topology
from cpuchat.models.library.library import Library
from cpuchat.protocol import LoadProgress, ModelLoaded
from cpuchat.telemetry.machine import Bandwidth, MachineSample
from cpuchat.tui.hardware.picture import MachinePicture
from cpuchat.tui.hardware.placements import PlacementList
from cpuchat.tui.hardware.screen import HardwareScreen
from cpuchat.tui.machine_watch import MachineWatch
from tests.hardware.trees import make_tree
from tests.support.chat_app import SMALL, WIDE, RunningApp, running
from tests.support.machines import (
    NO_COUNTERS,
    ON_8_CORES,
    SERVER_COUNTERS,
    WITH_DRAFT,
    Counters,
    FixtureReader,
    OnMachine,
    at_speed,
    on,
    surveyed,
)
from tests.support.scripted_backend import Gate, ScriptedBackend, answer
from tests.support.snapshots import snapshot


async def opened(app: RunningApp, reader: FixtureReader | None = None) -> HardwareScreen:
    """The screen on the machine of `reader` (None: this one), with all that is read at once."""
    await app.ready()
    if reader is None:
        await app.press("f12")
    else:
        app.app.services.machine_watch = MachineWatch(lambda pid: reader.counters)
        await app.app.push_screen(HardwareScreen(app.app.services, reader))
    await app.until(lambda: isinstance(app.app.screen, HardwareScreen) and app.app.screen.facts is not None)
    screen = app.app.screen
    assert isinstance(screen, HardwareScreen)
    await app.until(lambda: screen.now.sample is not None or not screen.now.counting)
    return screen


def said(screen: HardwareScreen) -> str:
    """What the pane of placements says at its lower edge."""
    return str(screen.query_one("#about").render())


def picture(screen: HardwareScreen) -> str:
    return screen.query_one(MachinePicture).text


def field(screen: HardwareScreen, name: str) -> Input:
    return screen.query_one(f"#field-{name}", Input)


async def type_into(app: RunningApp, screen: HardwareScreen, name: str, text: str) -> None:
    field(screen, name).focus()
    await app.press("ctrl+a", "ctrl+k", *text)


def backend_on(root: Path, speeds: tuple[float, ...] = (), **more: object) -> OnMachine:
    """`speeds`: tok/s of each measurement in turn, which is four answers long."""
    model = on(read_topology(root), WITH_DRAFT)
    answers = [at_speed(speed + 0.1 * (number % 3)) for speed in speeds for number in range(4)]
    return OnMachine(model, **({"answers": answers} if answers else {}), **more)  # type: ignore[arg-type]


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


def test_traffic_by_l3_group_stands_behind_its_cores(tmp_path: Path) -> None:
    from cpuchat.tui.hardware.picture import Use, picture

    topology = read_topology(make_tree(tmp_path, "epyc-9354"))
    rows = picture(topology, Use(), 114, per_l3=[50, 0, 25, 0, 0, 0, 0, 0], top=50)
    levels = "".join(text for row in rows for text, part in row if part == "now")
    assert levels.replace(" ", "") == "█▁▅▁▁▁▁▁"


MACHINES = ["epyc-9354", "epyc-9654", "epyc-9754", "2x-epyc-7543", "hybrid-desktop", "vm"]


PICTURES = [*((name, WIDE) for name in MACHINES), ("2x-epyc-7543", SMALL), ("vm", SMALL)]


@pytest.mark.parametrize(("name", "size"), PICTURES)
async def test_snapshots(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
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
    async with running(backend, size=size) as app:
        screen = await opened(app, reader)
        await app.until(lambda: screen.now.placed)
        if on_server:
            await app.press("down")
        await app.pilot.pause()
        snapshot(app.app, f"hardware-{name}-{size[0]}x{size[1]}")


async def test_this_machine_is_shown() -> None:
    async with running() as app:
        screen = await opened(app)
        topology = read_topology()
        assert topology.cpu_name in str(screen.query_one("#machine").border_title)
        assert sum(picture(screen).count(cell) for cell in "▣▤□·") >= len(topology.cores)
        await app.press("escape")
        await app.until(lambda: app.app.screen is app.chat)


async def test_marking_a_placement_previews_it(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    async with running(backend_on(root)) as app:
        screen = await opened(app, FixtureReader(root, known=True))
        assert (picture(screen).count("▣"), picture(screen).count("▤")) == (33, 0)  # the legend has one, too
        await app.press("down")
        assert (picture(screen).count("▣"), picture(screen).count("▤")) == (29, 5)
        assert field(screen, "draft_cores").value == "l3:7"
        assert "does not fit the L3" in said(screen)
        assert "70 % acceptance assumed" in said(screen)
        await app.press("t")
        assert picture(screen).count("▤") == 0


async def test_without_a_measurement_the_prediction_says_so(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    async with running(backend_on(root)) as app:
        screen = await opened(app, FixtureReader(root))
        assert "the theoretical peak" in said(screen)
        assert "not measured" in app.screen_text


async def test_words_are_checked_where_they_are_typed(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root)
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        for name, text, problem in (
            ("cores", "l3:9", "! cores: L3 group 9 does not exist"),
            ("draft_cores", "banana", "! draft: "),
            ("memory", "bind:3", "! memory: Node 3 has no memory"),
            ("threads", "many", "! threads: needs a whole number"),
            ("threads", "33", "! threads: Cannot use 33 threads"),
        ):
            await type_into(app, screen, name, text)
            await app.until(lambda problem=problem: problem in app.screen_text)
            await app.press("enter")
            assert not screen.working
            await app.press("escape")
            assert isinstance(screen.focused, PlacementList)
            assert "!" not in str(screen.query_one("#problem").render())
        await type_into(app, screen, "cores", "l3:0-3")
        assert picture(screen).count("▣") == 17
        assert len(backend.loads) == 1


async def test_enter_does_not_overtake_the_words_typed_before_it(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root, (12.0, 15.0))
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        field(screen, "cores").focus()
        await app.press("ctrl+a", "ctrl+k")
        for key in (*"l3:0", "enter"):  # as they come from a fast typist while the app is busy
            app.app.simulate_key(key)
        await app.until(lambda: not app.chat.busy and "tok/s" in said(screen))
        assert [spec.cores for spec in backend.specs] == ["auto", "l3:0"]


async def test_rows_of_placements_end_in_one_column(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    async with running(backend_on(root)) as app:
        await opened(app, FixtureReader(root, known=True))
        rows = [line for line in app.screen_text.splitlines() if "tok/s" in line and line.startswith(("│ ●", "│ ○"))]
        assert len(rows) > 3
        assert len({line.index("tok/s") for line in rows}) == 1


async def test_a_placement_is_tried_kept_and_taken_back(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root, (12.0, 15.0))
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        await app.press("down", "enter")
        await app.until(lambda: not app.chat.busy and "tok/s" in said(screen))
        assert "12.1 → 15.1 tok/s  1.25×  (spread 0.2 tok/s)" in said(screen)
        assert "Significantly faster, applied" in said(screen)
        assert [spec.draft_cores for spec in backend.specs] == ["auto", "l3:7"]
        assert all(request.chat_id == "" for request in backend.requests)
        assert {request.speculation.drafters for request in backend.requests} == {("draft",)}
        await app.until(lambda: settings.load().speculation.draft_cores == "l3:7")
        assert "draft on its own L3 group  in use" in app.screen_text
        await app.press("u")
        await app.until(lambda: len(backend.loads) == 3 and not app.chat.busy)
        await app.until(lambda: settings.load().speculation.draft_cores == "auto")
        assert backend.specs[2].draft_cores == "auto"
        assert "all cores, shared  in use" in app.screen_text
        assert app.conversation.messages == []


@pytest.mark.parametrize(("rate", "words"), [(12.1, "No significant gain"), (9.0, "Slower")])
async def test_what_is_no_faster_is_not_kept_unless_asked_for(tmp_path: Path, rate: float, words: str) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root, (12.0, rate))
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        await app.press("down", "enter")
        await app.until(lambda: not app.chat.busy and "tok/s" in said(screen))
        assert words in said(screen) and "previous placement restored" in said(screen)
        assert [spec.draft_cores for spec in backend.specs] == ["auto", "l3:7", "auto"]
        assert app.conversation.settings.speculation.draft_cores == settings.load().speculation.draft_cores == "auto"
        assert "all cores, shared  in use" in app.screen_text
        await app.press("u")
        await app.until(lambda: settings.load().speculation.draft_cores == "l3:7" and not app.chat.busy)
        assert backend.specs[-1].draft_cores == "l3:7"


async def test_escape_while_the_new_placement_is_measured_goes_back(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root, (12.0,))
    gate = Gate()
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        backend.answers = [*backend.answers[:4], [gate, *at_speed(15.0)]]
        await app.press("down", "enter")
        await app.until(gate.reached.is_set)
        await app.press("escape")
        await app.until(lambda: not app.chat.busy and "Cancelled" in said(screen))
        assert [spec.draft_cores for spec in backend.specs] == ["auto", "l3:7", "auto"]
        assert settings.load().speculation.draft_cores == "auto"


async def test_a_load_that_fails_goes_back_with_the_reason(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root, (12.0,))
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        await type_into(app, screen, "cores", backend.bad_cores)
        await app.press("enter")
        await app.until(lambda: not app.chat.busy and "othing was changed" in said(screen))
        assert "These cores cannot be used." in said(screen)
        assert backend.specs[-1].cores == "auto"
        assert app.conversation.settings.engine.cores == settings.load().engine.cores == "auto"
        assert app.conversation.model is not None
        assert field(screen, "cores").value == "auto"


async def test_escape_stops_the_measuring_and_nothing_is_loaded(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    gate = Gate()
    backend = OnMachine(on(read_topology(root)), answers=[[gate, *at_speed(12.0)]])
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        await app.press("down", "down", "enter")
        await app.until(gate.reached.is_set)
        assert "measuring the current placement · run 1 of 3" in said(screen)
        await app.press("enter", "m", "u")  # refused meanwhile
        await app.press("escape")
        await app.until(lambda: not app.chat.busy and "Cancelled" in said(screen))
        assert len(backend.loads) == 1
        assert settings.load().engine.cores == "auto"
        assert app.app.screen is screen


async def test_escape_during_the_load_goes_back(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root, (12.0,))
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        gate = Gate()
        loaded, backend.load_steps = backend.load_steps, [LoadProgress(phase="reading", done=1, total=2), gate]
        await app.press("down", "down", "enter")
        await app.until(gate.reached.is_set)
        assert "reloading the model  50 %" in said(screen)
        backend.load_steps = loaded
        await app.press("escape")
        await app.until(lambda: not app.chat.busy and "Cancelled" in said(screen))
        assert [spec.cores for spec in backend.specs] == ["auto", "2/l3", "auto"]
        assert app.conversation.model is not None


async def test_a_lost_draft_model_goes_back(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root, (12.0,))
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        with_draft = backend.load_steps
        gate = Gate()
        backend.load_steps = [gate, ModelLoaded(model=on(read_topology(root)))]
        await app.press("down", "enter")
        await app.until(gate.reached.is_set)
        backend.load_steps = with_draft
        gate.open()
        await app.until(lambda: not app.chat.busy and "othing was changed" in said(screen))
        assert "The draft model was not loaded." in said(screen)
        assert app.conversation.model is not None and app.conversation.model.draft


async def test_nothing_runs_beside_an_answer(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    gate = Gate()
    backend = OnMachine(on(read_topology(root)), answers=[answer("One two", gate=gate)])
    async with running(backend) as app:
        await app.ready()
        await app.send("Count", wait=False)
        await app.until(gate.reached.is_set)
        app.app.push_screen(HardwareScreen(app.app.services, FixtureReader(root)))
        await app.until(lambda: isinstance(app.app.screen, HardwareScreen) and app.app.screen.facts is not None)
        await app.press("m")
        assert any("measure the read bandwidth when the answer is done" in notice for notice in app.notices)
        await app.press("down", "down", "enter")
        assert any("change the placement when the answer is done" in notice for notice in app.notices)
        assert len(backend.loads) == 1
        gate.open()
        await app.until(lambda: not app.chat.busy)


async def test_without_a_model_the_words_are_saved(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    backend = ScriptedBackend()
    async with running(backend, model=None) as app:
        app.app.push_screen(HardwareScreen(app.app.services, FixtureReader(root)))
        await app.until(lambda: isinstance(app.app.screen, HardwareScreen) and app.app.screen.facts is not None)
        screen = app.app.screen
        assert isinstance(screen, HardwareScreen)
        assert "no worker running" in app.screen_text
        await type_into(app, screen, "memory", "bind:1")
        await app.press("enter")
        await app.until(lambda: settings.load().engine.memory == "bind:1")
        assert "Takes effect on the next load" in said(screen)
        assert backend.loads == []


async def test_the_bandwidth_is_measured_and_shown(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    async with running(backend_on(root)) as app:
        screen = await opened(app, FixtureReader(root))
        await app.press("m")
        await app.until(lambda: not app.chat.busy)
        assert "1 L3 group    49.9 GB/s" in app.screen_text
        assert "all 32 cores   367 GB/s" in app.screen_text
        assert "80 % of 461" in app.screen_text
        assert "From the measured bandwidth" in said(screen)


class Waiting(FixtureReader):
    """Measures until it is told to stop."""

    def survey(
        self, topology: Topology, memory: str, progress: Callable[[int, int, str], None], cancelled: Callable[[], bool]
    ) -> Survey:
        progress(1, 7, "one L3 group")
        while not cancelled():
            os.sched_yield()
        raise Interrupted("The measurement was stopped.")


async def test_measuring_the_bandwidth_can_be_stopped(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    async with running(backend_on(root)) as app:
        screen = await opened(app, Waiting(root))
        await app.press("m")
        await app.until(lambda: "Measuring one L3 group · 2 of 7 · Esc stops" in app.screen_text)
        await app.press("escape")
        await app.until(lambda: not app.chat.busy)
        assert app.app.screen is screen
        assert "not measured" in app.screen_text


async def test_quitting_ends_what_is_measured(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root)
    async with running(backend) as app:
        await opened(app, Waiting(root))
        await app.press("m")
        await app.until(lambda: app.chat.busy)
        app.press_last("ctrl+q")
        await app.until(lambda: backend.closed)


async def test_quitting_during_a_load_loads_nothing_more(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root, (12.0,))
    async with running(backend) as app:
        await opened(app, FixtureReader(root))
        gate = Gate()
        backend.load_steps = [gate]
        await app.press("down", "down", "enter")
        await app.until(gate.reached.is_set)
        app.press_last("ctrl+q")
        await app.until(lambda: backend.closed)
        assert len(backend.loads) == 2
    assert settings.load().engine.cores == "auto"


async def test_a_measurement_that_fails_is_told(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")

    def fails(topology: Topology) -> Survey:
        raise ProbeFailed("There is too little free memory.", "Close other programs.")

    async with running(backend_on(root)) as app:
        await opened(app, FixtureReader(root, fails))
        await app.press("m")
        await app.until(lambda: not app.chat.busy and app.notices)
        assert app.notices == ["There is too little free memory. Close other programs."]


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


async def test_traffic_of_the_l3_groups_is_drawn(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    sample = MachineSample(Bandwidth(200e9, "mbm", "machine", per_l3=(50e9, *(25e9,) * 7)), no_power="n/a")
    async with running(backend_on(root)) as app:
        screen = await opened(app, FixtureReader(root, sample=sample))
        await app.until(lambda: "memory traffic" in picture(screen))
        assert "▣ █" in picture(screen)
        assert "200 GB/s now · mbm, whole machine" in app.screen_text


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

    def open_monitor(pid: int | None) -> Counters:
        opened_counters.append(Counters(SERVER_COUNTERS))
        return opened_counters[-1]

    gate = Gate()
    async with running(backend_on(root, answers=[answer("One two", gate=gate)])) as app:
        app.app.services.machine_watch = MachineWatch(open_monitor)
        await app.ready()
        await app.send("Count", wait=False)
        await app.until(gate.reached.is_set)
        await app.until(lambda: opened_counters)
        screen = HardwareScreen(app.app.services, FixtureReader(root))
        await app.app.push_screen(screen)
        await app.until(lambda: screen.now.sample == SERVER_COUNTERS)
        gate.open()
        await app.until(lambda: not app.chat.busy)
        assert len(opened_counters) == 1
    assert opened_counters[0].closed


@pytest.fixture
def quick_loads() -> None:
    settings.update({"hardware": {"probe": False, "counters": False}, "speculation": {"drafters": "off"},
                     "chat": {"max_tokens": 24}, "sampling": {"temperature": 0.0}})  # fmt: skip


async def test_a_real_chat_goes_on_with_what_it_remembers(quick_loads: None) -> None:
    backend = LocalBackend(state_dir=paths.kv_dir())
    async with running(backend, model=Library([]).resolve("demo")) as app:
        await app.ready()
        await app.send("Why does a CPU write slower than it reads the prompt?")
        screen = await opened(app)
        model = app.conversation.model
        assert model is not None
        one = str(model.cpus[0])
        await type_into(app, screen, "cores", one)
        await app.press("enter")
        await app.until(lambda: " tok/s  " in said(screen) and not app.chat.busy)
        if "previous placement restored" in said(screen):  # whether one core is faster depends on the machine
            await app.press("u")
            await app.until(lambda: said(screen).startswith("Applied") and not app.chat.busy)
        model = app.conversation.model
        assert model is not None and model.cpus == (int(one),)
        await app.until(lambda: settings.load().engine.cores == one)
        await app.press("escape")
        await app.until(lambda: app.app.screen is app.chat)
        assert "1 core" in app.status
        await app.send("And how do I stop an answer?")
        timings = app.conversation.messages[-1].timings
        assert timings is not None and timings.cache_n > 0
        assert [role for role, _ in app.stored()] == ["user", "assistant"] * 2
