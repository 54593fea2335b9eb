"""The plan screen: the catalog on this and other machines."""

from __future__ import annotations

import pytest
from textual.widgets import Input

from cpuchat.base import paths
from cpuchat.models.catalog import Catalog, load_catalog
from cpuchat.planner.specs import machines
from cpuchat.tui.plan import MachinesScreen, PlanScreen
from cpuchat.tui.widgets.dialogs import AskTextScreen
from cpuchat.tui.widgets.model_list import Labelled, ModelList
from tests.support.chat_app import SMALL, WIDE, RunningApp, running
from tests.support.snapshots import snapshot


@pytest.fixture(autouse=True)
def few_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for some models of the catalog: quicker than for all."""
    names = ("Llama 3.3 70B Instruct", "Llama 3.1 8B Instruct", "Llama 3.2 1B Instruct", "PARD Llama 3.2 1B",
             "gpt-oss 20B", "Qwen3 30B A3B Instruct 2507")  # fmt: skip
    few = Catalog(tuple(one for one in load_catalog().models if one.name in names))
    monkeypatch.setattr("cpuchat.tui.plan.load_catalog", lambda: few)


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


def figures(app: RunningApp) -> str:
    return "\n".join("  ".join(row) for row in app.app.screen.query_one(Labelled)._rows)


async def marked(app: RunningApp, name: str) -> None:
    """Select a model, and wait for its plan."""
    listed(app).mark(name)
    await app.until(lambda: name in details(app))


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
    await app.until(lambda: not isinstance(app.app.screen, AskTextScreen))


async def test_this_machine_says_what_is_missing_until_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuchat.hardware.bandwidth.read_bandwidth.known_peak", lambda *_, **__: None)
    async with running() as app:
        await opened(app)
        assert "probe`" in app.screen_text  # its lines are short
        assert "another machine" in figures(app)
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
        await marked(app, "Llama 3.3 70B Instruct")
        assert "draft model  Llama 3.2 1B Instruct" in figures(app)
        assert "α 0.8  " in figures(app)
        for width, height in (WIDE, SMALL):
            await app.pilot.resize_terminal(width, height)
            await snapshot(app.app, f"plan-{width}x{height}")
        await app.press("d")
        await app.until(lambda: "draft model  PARD Llama 3.2 1B" in figures(app))
        await app.press("d")
        await app.until(lambda: "draft model" not in figures(app))
        await app.press("left")
        await app.until(lambda: title(app) != "EPYC 9754")
        assert listed(app).marked == "Llama 3.3 70B Instruct"
        assert "draft model" not in figures(app)
        await marked(app, "gpt-oss 20B")
        await app.press("d")
        await app.until(lambda: any("no draft model for gpt-oss 20B" in one for one in app.notices))


async def test_the_workload_is_asked_for_and_machines_are_compared_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cpuchat.hardware.bandwidth.read_bandwidth.known_peak", lambda *_, **__: None
    )  # only known machines
    async with running(size=SMALL) as app:
        await opened(app)
        await on_machine(app, "EPYC 9754")
        assert load(app) == "ctx 8,192 · prompt 500 · answer 300 · 5 tok/s"
        await answered(app, "t", "many")
        await app.until(lambda: any("many is not a number" in one for one in app.notices))
        await answered(app, "t", "15")
        await marked(app, "Llama 3.3 70B Instruct")
        await app.press("m")
        await app.until(lambda: isinstance(app.app.screen, MachinesScreen) and figures(app))
        names = [row.name for row in listed(app).rows]
        assert names[:2] == ["only with the draft model, in code", "EPYC 9655"]
        assert names[-3:] == ["too large", "Ampere A2, 8 OCPU", "Apple M4 Pro, CPU only"]
        await snapshot(app.app, "plan-machines-80x24")
        listed(app).mark("epyc-9655")
        await app.press("enter")
        await app.until(lambda: isinstance(app.app.screen, PlanScreen) and title(app) == "EPYC 9655")
        assert listed(app).marked == "Llama 3.3 70B Instruct"
        await answered(app, "p", "20,000")
        await answered(app, "a", "1000")
        await app.until(lambda: "ctx 21,000 · prompt 20,000 · answer 1,000" in load(app))
        await answered(app, "c", "9000")
        await app.until(lambda: any("exceed the context" in one for one in app.notices))
        await answered(app, "t", "2.5")
        await app.until(lambda: load(app) == "ctx 21,000 · prompt 20,000 · answer 1,000 · 2.5 tok/s")
        assert "2.5 tok/s or more" in [row.name for row in listed(app).rows]


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
