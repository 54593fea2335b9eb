"""The plan screen: the catalog on this and other machines."""

from __future__ import annotations

import pytest

from cpuchat.planner.machine_specs import machines
from cpuchat.tui.plan.screen import PlanScreen
from cpuchat.tui.widgets.model_list import ModelList
from tests.support.chat_app import SMALL, WIDE, RunningApp, running
from tests.support.snapshots import snapshot


async def opened(app: RunningApp) -> PlanScreen:
    await app.ready()
    await app.app.run_action("app.plan")
    await app.until(lambda: isinstance(app.app.screen, PlanScreen) and app.app.screen.query(ModelList))
    await app.until(lambda: app.app.screen.query_one("#list").border_title)
    screen = app.app.screen
    assert isinstance(screen, PlanScreen)
    return screen


def listed(app: RunningApp) -> ModelList:
    return app.app.screen.query_one(ModelList)


async def on_machine(app: RunningApp, name: str) -> None:
    """Press → until that machine is shown."""
    number = 1 + next(at for at, one in enumerate(machines()) if one.name == name)
    await app.press(*["right"] * number)
    await app.until(lambda: str(app.app.screen.query_one("#list").border_title) == name)


async def test_this_machine_says_what_is_missing_until_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuchat.hardware.bandwidth.peaks.known_peak", lambda *_, **__: None)
    async with running() as app:
        await opened(app)
        assert "cpuchat probe" in app.screen_text
        assert listed(app).marked == ""
        await app.press("escape")
        await app.until(lambda: app.app.screen is app.chat)


async def test_other_machines_list_models_by_speed_with_their_plan() -> None:
    async with running() as app:
        await opened(app)
        await on_machine(app, "EPYC 9754")
        names = [row.name for row in listed(app).rows]
        assert names.index("10 tok/s or more") < names.index("Qwen3 30B A3B Instruct 2507")
        assert names.index("Qwen3 30B A3B Instruct 2507") < names.index("Llama 3.3 70B Instruct")
        listed(app).mark("Llama 3.3 70B Instruct")
        await app.until(lambda: "Llama 3.3 70B" in str(app.app.screen.query_one("#about").border_title))
        assert "with a draft" in app.screen_text
        assert "tok/s" in app.screen_text


async def test_the_selected_model_stays_selected_on_the_next_machine() -> None:
    async with running() as app:
        await opened(app)
        await on_machine(app, "EPYC 9334")
        listed(app).mark("Llama 3.1 8B Instruct")
        await app.press("right")
        await app.until(lambda: str(app.app.screen.query_one("#list").border_title) == "EPYC 9354")
        assert listed(app).marked == "Llama 3.1 8B Instruct"
        await app.press("left", "left")
        await app.until(lambda: "his machine" in str(app.app.screen.query_one("#list").border_title))


@pytest.mark.parametrize("size", [WIDE, SMALL])
async def test_snapshots(size: tuple[int, int]) -> None:
    async with running(size=size) as app:
        await opened(app)
        await on_machine(app, "EPYC 9754")
        listed(app).mark("Llama 3.3 70B Instruct")
        await app.until(lambda: "Llama 3.3 70B" in str(app.app.screen.query_one("#about").border_title))
        await app.pilot.pause()
        snapshot(app.app, f"plan-{size[0]}x{size[1]}")
