"""The plan screen: the catalog on this and other machines."""

from __future__ import annotations

import pytest
from textual.widgets import Input

from cpuchat import paths
from cpuchat.models.catalog import Catalog, load_catalog
from cpuchat.planner.machine_specs import machines
from cpuchat.tui.plan.screen import PlanScreen
from cpuchat.tui.widgets.dialogs import AskTextScreen
from cpuchat.tui.widgets.model_list import ModelList
from tests.support.chat_app import SMALL, WIDE, RunningApp, running
from tests.support.snapshots import snapshot


@pytest.fixture
def few_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for four models of the catalog: quicker than for all."""
    names = ("Llama 3.3 70B Instruct", "Llama 3.1 8B Instruct", "Llama 3.2 1B Instruct", "gpt-oss 20B")
    few = Catalog(tuple(one for one in load_catalog().models if one.name in names))
    monkeypatch.setattr("cpuchat.tui.plan.screen.load_catalog", lambda: few)


async def opened(app: RunningApp) -> PlanScreen:
    await app.ready()
    await app.app.run_action("app.plan")
    await app.until(lambda: isinstance(app.app.screen, PlanScreen) and app.app.screen.query(ModelList))
    await app.until(lambda: title(app))
    screen = app.app.screen
    assert isinstance(screen, PlanScreen)
    return screen


def listed(app: RunningApp) -> ModelList:
    return app.app.screen.query_one(ModelList)


def title(app: RunningApp) -> str:
    return str(app.app.screen.query_one("#list").border_title or "").partition(" · ")[0]


def load(app: RunningApp) -> str:
    return str(app.app.screen.query_one("#list").border_subtitle)


def details(app: RunningApp) -> str:
    return str(app.app.screen.query_one("#about").border_title)


async def on_machine(app: RunningApp, name: str) -> None:
    """Press → until that machine is shown."""
    number = 1 + next(at for at, one in enumerate(machines()) if one.name == name)
    await app.press(*["right"] * number)
    await app.until(lambda: title(app) == name)


async def answered(app: RunningApp, key: str, text: str) -> None:
    """Press a key that asks for a figure, and answer."""
    await app.press(key)
    await app.until(lambda: isinstance(app.app.screen, AskTextScreen) and app.app.screen.query(Input))
    app.app.screen.query_one(Input).value = text
    await app.press("enter")
    await app.until(lambda: isinstance(app.app.screen, PlanScreen))


async def test_this_machine_says_what_is_missing_until_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuchat.hardware.bandwidth.peaks.known_peak", lambda *_, **__: None)
    async with running() as app:
        await opened(app)
        assert "probe`" in app.screen_text  # its lines are short
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
        await app.until(lambda: "Llama 3.3 70B" in details(app))
        assert "with a draft" in app.screen_text
        assert "tok/s" in app.screen_text


@pytest.mark.usefixtures("few_models")
async def test_the_selected_model_stays_selected_on_the_next_machine() -> None:
    async with running() as app:
        await opened(app)
        await on_machine(app, "EPYC 9334")
        listed(app).mark("Llama 3.1 8B Instruct")
        await app.press("right")
        await app.until(lambda: title(app) == "EPYC 9354")
        assert listed(app).marked == "Llama 3.1 8B Instruct"
        await app.press("left", "left")
        await app.until(lambda: "his machine" in title(app))


@pytest.mark.usefixtures("few_models")
async def test_quantization_context_prompt_users_and_target_have_keys() -> None:
    async with running() as app:
        await opened(app)
        await on_machine(app, "EPYC 9334")
        assert load(app) == "default quantization · context 8,192 · prompt 500 · 5 tok/s"
        listed(app).mark("Llama 3.3 70B Instruct")
        await app.press("q", "q", "q", "q")
        await app.until(lambda: load(app).startswith("Q8_0 · "))
        await app.until(lambda: details(app) == "Llama 3.3 70B Instruct Q8_0")
        assert {row.columns[0] for row in listed(app).rows if row.columns} == {"Q8_0", "MXFP4"}
        await answered(app, "p", "20,000")
        await app.until(lambda: "context 20,300 · prompt 20,000" in load(app))
        await answered(app, "c", "9000")
        await app.until(lambda: any("exceed the context" in one for one in app.notices))
        await answered(app, "u", "many")
        await app.until(lambda: any("many is not a number" in one for one in app.notices))
        await answered(app, "u", "200")
        await answered(app, "t", "2.5")
        await app.until(lambda: load(app) == "Q8_0 · context 20,300 · prompt 20,000 · 200 users at 2.5 tok/s")
        assert "2.5 tok/s or more" in [row.name for row in listed(app).rows]


@pytest.mark.usefixtures("few_models")
async def test_machines_of_the_config_folder_are_listed_and_wrong_ones_told() -> None:
    folder = paths.user_machines_dir()
    folder.mkdir(parents=True)
    own = 'cpu = "zen4"\ncores = 48\nclock_ghz = 3.1\nmemory_gb = 384\nmeasured = 350\n'
    (folder / "lab.toml").write_text(f'name = "Lab server"\n{own}')
    (folder / "broken.toml").write_text("cores = 48\n")
    async with running() as app:
        await opened(app)
        await app.until(lambda: any("broken.toml" in one for one in app.notices))
        await app.press("left")
        await app.until(lambda: title(app) == "Lab server")
        assert listed(app).rows


@pytest.mark.parametrize("size", [WIDE, SMALL])
async def test_snapshots(size: tuple[int, int]) -> None:
    async with running(size=size) as app:
        await opened(app)
        await on_machine(app, "EPYC 9754")
        listed(app).mark("Llama 3.3 70B Instruct")
        await app.until(lambda: "Llama 3.3 70B" in details(app))
        await app.pilot.pause()
        snapshot(app.app, f"plan-{size[0]}x{size[1]}")
