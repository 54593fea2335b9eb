"""Tests choosing and taking back placements, on a scripted and on a real worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.backend.local import LocalBackend
from cpuchat.base import paths
from cpuchat.config import settings
from cpuchat.hardware.topology import read_topology
from cpuchat.models.library.library import Library
from cpuchat.protocol.messages import LoadProgress, ModelLoaded
from cpuchat.tui.hardware.panels import PlacementList
from cpuchat.tui.hardware.screen import HardwareScreen
from tests.hardware.trees import make_tree
from tests.support.chat_app import running
from tests.support.hardware_screen import backend_on, field, opened, picture, said, type_into
from tests.support.machines import FixtureReader, OnMachine, on
from tests.support.scripted_backend import Gate, ScriptedBackend, answer


async def test_marking_a_placement_previews_it(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    async with running(backend_on(root)) as app:
        screen = await opened(app, FixtureReader(root, known=True))
        assert (picture(screen).count("▣"), picture(screen).count("▤")) == (33, 0)  # the legend has one, too
        await app.press("down")
        assert (picture(screen).count("▣"), picture(screen).count("▤")) == (29, 5)
        assert field(screen, "draft_cores").value == "l3:7"
        assert "Pays off only while drafting and verifying overlap" in said(screen)
        await app.press("t")
        assert picture(screen).count("▤") == 0


async def test_without_a_measurement_that_is_said_and_words_are_checked_where_they_are_typed(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root)
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        assert "no speed is predicted. Press m" in said(screen)
        assert "not measured" in app.screen_text
        for name, text, problem in (
            ("cores", "l3:9", "! cores: L3 group 9 does not exist"),
            ("draft_cores", "banana", "! draft: "),
            ("memory", "bind:3", "! memory: Node 3 has no memory"),
            ("threads", "many", "! threads: needs a whole number"),
            ("threads", "33", "! threads: Cannot use 33 threads"),
        ):
            field(screen, name).focus()
            field(screen, name).value = text
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
    backend = backend_on(root)
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        field(screen, "cores").focus()
        await app.press("ctrl+a", "ctrl+k")
        for key in (*"l3:0", "enter"):  # as they come from a fast typist while the app is busy
            app.app.simulate_key(key)
        await app.until(lambda: not app.chat.busy and "Applied" in said(screen))
        assert [spec.cores for spec in backend.specs] == ["auto", "l3:0"]


async def test_a_placement_is_chosen_and_taken_back(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root)
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        await app.press("down", "enter")
        await app.until(lambda: not app.chat.busy and "Applied; u reverts it." in said(screen))
        assert [spec.draft_cores for spec in backend.specs] == ["auto", "l3:7"]
        assert backend.requests == []
        await app.until(lambda: settings.load().speculation.draft_cores == "l3:7")
        assert "draft on its own L3 group  in use" in app.screen_text
        await app.press("u")
        await app.until(lambda: len(backend.loads) == 3 and not app.chat.busy)
        await app.until(lambda: settings.load().speculation.draft_cores == "auto")
        assert backend.specs[2].draft_cores == "auto"
        assert "all cores, shared  in use" in app.screen_text
        assert app.conversation.messages == []


async def test_a_load_that_fails_goes_back_with_the_reason(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root)
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


async def test_escape_during_the_load_goes_back(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root)
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        gate = Gate()
        loaded, backend.load_steps = backend.load_steps, [LoadProgress(phase="reading", done=1, total=2), gate]
        await app.press("down", "down", "enter")
        await app.until(gate.reached.is_set)
        assert "reloading the model  50 %" in said(screen)
        await app.press("enter", "m", "u")  # refused meanwhile
        backend.load_steps = loaded
        await app.press("escape")
        await app.until(lambda: not app.chat.busy and "Cancelled" in said(screen))
        assert [spec.cores for spec in backend.specs] == ["auto", "2/l3", "auto"]
        assert app.conversation.model is not None


async def test_a_lost_draft_model_goes_back(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root)
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
        await app.count_up_to(gate)
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


async def test_quitting_during_a_load_loads_nothing_more(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root)
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
