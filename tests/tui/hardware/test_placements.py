"""Tests choosing, loading and taking back placements, on a scripted worker."""

from __future__ import annotations

from pathlib import Path

from cpuchat.config import settings
from cpuchat.hardware.topology import read_topology
from cpuchat.present import machine
from cpuchat.protocol.messages import LoadProgress, ModelLoaded
from cpuchat.tui.hardware.screen import HardwareScreen
from tests.hardware.trees import make_tree, write
from tests.support.chat_app import running
from tests.support.hardware_screen import backend_on, opened, picture, said
from tests.support.machines import FixtureReader, OnMachine, on
from tests.support.scripted_backend import Gate, answer


async def test_marking_a_placement_previews_it(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    async with running(backend_on(root)) as app:
        screen = await opened(app, FixtureReader(root, known=True))
        assert picture(screen).count("▣") == 33  # the legend has one, too
        await app.press("down")
        assert picture(screen).count("▣") == 17
        assert "2 cores nearly saturate a group's memory link" in said(screen)


def told(screen: HardwareScreen) -> str:
    """Return what would help."""
    assert screen.facts is not None
    return "\n".join(f"{label}: {text}" for label, text in machine.helping(screen.facts, screen.now))


async def test_what_would_help_is_told_until_it_is_done(tmp_path: Path) -> None:
    """The load of the model in use is none of other programs."""
    settings.update({"engine": {"cores": "0-3,32-33"}})
    root = write(make_tree(tmp_path, "epyc-9354"), {"proc/loadavg": "40.1 1 1 2/3 4"})
    async with running(backend_on(root)) as app:
        screen = await opened(app, FixtureReader(root))
        assert "would help: SMT siblings are in use" in told(screen) and "Other programs" not in told(screen)
        await app.press("home", "enter")
        await app.until(lambda: said(screen) == "Applied.")
        await app.until(lambda: "SMT siblings are in use" not in told(screen))
        assert said(screen) == "Applied."


async def test_cores_of_the_settings_that_no_placement_has_are_listed_and_taken_back(tmp_path: Path) -> None:
    settings.update({"engine": {"cores": "l3:0-3"}})
    root = make_tree(tmp_path, "epyc-9354")
    async with running(backend_on(root), size=(60, 20)) as app:
        screen = await opened(app, FixtureReader(root))
        assert "● cores l3:0-3, memory auto  in use" in app.screen_text
        assert "recommended" in app.screen_text
        await app.press("enter")
        assert said(screen) == "Already in use."
        for keys, cores in ((("up",) * 2, "auto"), (("down",), "2/l3"), (("down",), "l3:0-3")):
            await app.press(*keys, "enter")
            await app.until(lambda cores=cores: not app.chat.session.busy and settings.load().engine.cores == cores)
            await app.until(lambda: said(screen) == "Applied.")
        assert "● cores l3:0-3, memory auto  in use" in app.screen_text


async def test_a_placement_is_loaded_and_taken_back(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root)
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        await app.press("down", "enter")
        await app.until(lambda: not app.chat.session.busy and "Applied" in said(screen))
        assert [spec.cores for spec in backend.specs] == ["auto", "2/l3"]
        assert backend.requests == []
        await app.until(lambda: settings.load().engine.cores == "2/l3")
        assert "2 cores per L3 group  in use" in app.screen_text
        await app.press("up", "enter")
        await app.until(lambda: len(backend.loads) == 3 and not app.chat.session.busy)
        await app.until(lambda: settings.load().engine.cores == "auto")
        assert backend.specs[2].cores == "auto"
        assert "all cores  in use" in app.screen_text
        assert app.conversation.messages == []


async def test_a_load_that_is_stopped_or_fails_goes_back(tmp_path: Path) -> None:
    """Stopped while it loads, refused by the worker, and without the draft model."""
    root = make_tree(tmp_path, "epyc-9354")
    backend = backend_on(root)
    async with running(backend) as app:
        screen = await opened(app, FixtureReader(root))
        loaded, gate = backend.load_steps, Gate()
        backend.load_steps = [LoadProgress(phase="reading", done=1, total=2), gate]
        await app.press("down", "enter")
        await app.until(gate.reached.is_set)
        assert "reloading the model  50 %" in said(screen)
        await app.press("enter")  # refused meanwhile
        backend.load_steps = loaded
        await app.press("escape")
        await app.until(lambda: not app.chat.session.busy and "Cancelled" in said(screen))
        assert [spec.cores for spec in backend.specs] == ["auto", "2/l3", "auto"]
        assert app.conversation.model is not None and app.app.screen is screen

        gate = Gate()
        backend.load_steps = [gate, ModelLoaded(model=on(read_topology(root)))]
        await app.press("down", "enter")
        await app.until(gate.reached.is_set)
        backend.load_steps = loaded
        gate.open()
        await app.until(lambda: not app.chat.session.busy and "The draft model was not loaded." in said(screen))
        assert app.conversation.model is not None and app.conversation.model.draft

        backend.bad_cores = "2/l3"
        await app.press("down", "enter")
        await app.until(lambda: not app.chat.session.busy and "These cores cannot be used." in said(screen))
        assert backend.specs[-1].cores == settings.load().engine.cores == "auto"
        assert app.conversation.settings.engine.cores == "auto" and app.conversation.model is not None


async def test_nothing_runs_beside_an_answer(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    gate = Gate()
    backend = OnMachine(on(read_topology(root)), answers=[answer("One two", gate=gate)])
    async with running(backend) as app:
        await app.count_up_to(gate)
        app.app.push_screen(HardwareScreen(app.app.services, FixtureReader(root)))
        await app.until(lambda: isinstance(app.app.screen, HardwareScreen) and app.app.screen.facts is not None)
        await app.press("down", "enter")
        assert any("change the placement when the answer is done" in notice for notice in app.notices)
        assert len(backend.loads) == 1
        screen = app.app.screen
        assert isinstance(screen, HardwareScreen)
        gate.open()
        await app.until(lambda: not app.chat.session.busy)
        await app.until(lambda: screen.now.answered is not None and screen.now.answered.phase == "done")
