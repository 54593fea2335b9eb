"""Tests the models screen on real files, the real client against a local hub, and pictures of it."""

from __future__ import annotations

import dataclasses
import re
import threading
from pathlib import Path

import msgspec
import pytest
from textual.widgets import Input

from cpuchat.base import paths
from cpuchat.models import machine
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.models.library.usage import RecentModels
from cpuchat.protocol.messages import ModelLoaded
from cpuchat.tui.compare.screen import CompareScreen
from cpuchat.tui.help import HelpScreen
from cpuchat.tui.models.entries import HubSearch
from cpuchat.tui.models.quantize import QuantizeScreen
from cpuchat.tui.models.screen import ModelsScreen
from tests.support.big_headers import big_header, hollow_file
from tests.support.chat_app import SMALL, WIDE, running
from tests.support.downloads import download, left_by_the_last_run, model
from tests.support.models_screen import about, keys, list_of, looked, marked, opened, opened_shelf, settled, type_in
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend
from tests.support.shelf import LOCAL, shelf_reader
from tests.support.snapshots import snapshot
from tests.support.tiny_gguf import write_tiny_gguf


async def test_real_files_are_listed_described_quantized_and_loaded(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(tiny_model.read_bytes()[:100])
    async with running(folders=(tiny_model.parent, tmp_path)) as app:
        screen = await opened(app)
        assert "! cut" in app.screen_text
        await app.press(*"tiny-f32")
        await app.until(lambda: tiny_model.name in marked(app))
        await looked(app, screen)
        await app.until(lambda: "KV cache" in about(app))
        for words in ("fit fits · ≈", "llama · 4k context", "GB free: weights", "never used"):
            assert words in about(app)
        await app.press("enter")
        assert (await app.loaded(2))[0].name == tiny_model.name and app.app.screen is app.chat


async def test_a_load_that_runs_is_shown_goes_on_at_enter_and_is_seen_to_end(tmp_path: Path) -> None:
    gate = Gate()
    async with running(ScriptedBackend(load_steps=[gate, ModelLoaded(model=MODEL)])) as app:
        await app.until(gate.reached.is_set)
        reader = dataclasses.replace(shelf_reader(tmp_path / "no-hub"), loaded=None)
        for again in range(2):
            await app.app.push_screen(ModelsScreen(app.app.services, reader))
            screen = await settled(app)
            assert marked(app) == f"local {MODEL.path}" and "●" not in app.screen_text
            assert re.search("  ◐ .* loading", app.screen_text)
            if not again:
                await app.press("enter")
        gate.open()
        await app.until(lambda: "  ● " in app.screen_text)
        assert screen.reader.loaded == app.conversation.model and len(app.backend.loads) == 1


async def test_ctrl_l_compares_the_loaded_model_with_the_selected_file(tiny_model: Path) -> None:
    demo = paths.demo_dir() / DEMO_FILES["demo"]
    backend = ScriptedBackend(model=msgspec.structs.replace(MODEL, path=str(demo)))
    async with running(backend, model=demo, folders=(tiny_model.parent,)) as app:
        await opened(app)
        await app.press(*"tiny-f32")
        await app.until(lambda: tiny_model.name in marked(app))
        await app.press("ctrl+l")
        screen = await app.opens(CompareScreen)
        assert [Path(side.path) for side in screen.comparison.sides] == [demo, tiny_model]


async def test_with_the_demo_alone_what_is_recommended_is_selected() -> None:
    demo = paths.demo_dir() / DEMO_FILES["demo"]
    backend = ScriptedBackend(model=msgspec.structs.replace(MODEL, path=str(demo)))
    async with running(backend, model=demo, size=(60, 20)) as app:
        screen = await opened(app)
        await app.until(lambda: screen.state.catalog.suits)
        await app.until(lambda: marked(app) == f"catalog {screen.state.catalog.suits[0].id}")
        await app.shows("recommended for this machine")


async def test_what_is_typed_and_pressed_on_the_list(tmp_path: Path) -> None:
    async with running() as app:
        screen = await opened_shelf(app, tmp_path)
        everything, loaded = keys(app), f"local {MODEL.path}"
        assert marked(app) == loaded
        await app.press("pageup")
        assert marked(app) == "local /models/llama-3.1-70b-q4_k_m.gguf"
        await app.until(lambda: "128k context" in about(app))
        await app.press("q")  # other words put the mark on the first line again
        await app.until(lambda: keys(app)[-1] == "search")
        assert marked(app) == loaded
        await app.press("escape", "down", "up")
        assert marked(app) == loaded
        assert isinstance(screen.focused, Input)  # the arrows leave it there

        await app.press(*"qwen 0.5b q4_k_m")
        await app.until(lambda: keys(app)[0] == f"local {LOCAL[0].path}" and keys(app)[-1] == "search")
        assert len(keys(app)) == 2  # here, and the search on the hub; that of the catalog is the one that is here
        await app.press("escape")
        await app.until(lambda: keys(app) == everything)

        await app.press(*"broken", "enter")
        await app.told("cut short")
        await app.press("escape", *"llama", "home", "delete")  # inside the text, it edits
        await app.until(lambda: screen.query_one("#filter", Input).value == "lama")
        await app.until(lambda: "F5 quantize" in app.screen_text)
        await app.press("escape", *"gpt-oss")
        await app.until(lambda: "F5 quantize" not in app.screen_text)  # of what is not here
        await type_in(app, "/no/such/file.gguf")
        await app.press("enter")
        await app.told("no such file")
        await app.press("escape", "escape")
        await app.closes()
        assert len(app.backend.loads) == 1


async def test_a_pasted_path_is_quantized_and_loaded_and_enter_means_what_was_typed_before_it(tiny_model: Path) -> None:
    async with running() as app:
        screen = await opened(app)
        await type_in(app, f"'{tiny_model}'", f"local {tiny_model}")
        await app.until(lambda: any(row.columns and row.columns[0] == "F32" for row in list_of(app).rows))
        await app.press("f5")
        await app.opens(QuantizeScreen)
        await app.press("escape")
        await app.until(lambda: app.app.screen is screen)
        await app.press("enter")
        assert (await app.loaded(2))[0] == tiny_model
        await opened(app)
        for key in (*"demo-draft", "enter"):
            app.app.simulate_key(key)  # without waiting for the list
        assert (await app.loaded(3))[0].name == DEMO_FILES["demo-draft"]


async def test_a_typed_folder_is_completed_listed_and_added(tmp_path: Path, tiny_model: Path) -> None:
    (folder := tmp_path / "llms" / "deep").mkdir(parents=True)
    (mine := folder / "my own.gguf").write_bytes(tiny_model.read_bytes())
    (tmp_path / "llms" / "other").mkdir()
    async with running() as app:
        screen = await opened(app)
        await type_in(app, str(tmp_path / "ll"))
        await app.until(lambda: keys(app) == [f"path {tmp_path}/llms/"])
        await app.press("tab")
        added, found = "folder", f"local {mine}"
        await app.until(
            lambda: keys(app) == [added, found, *(f"path {tmp_path}/llms/{one}/" for one in ("deep", "other"))]
        )
        assert "1 model" in app.screen_text
        await app.press("tab")
        await app.until(lambda: keys(app) == [added, found] and marked(app) == added)
        await app.press("enter")
        await app.until(lambda: marked(app) == found and screen.query_one("#filter", Input).value == "")
        await app.until(lambda: app.app.services.settings.model.folders == [str(folder)])
        await app.press("enter")
        assert (await app.loaded(2))[0] == mine


async def test_what_cannot_be_loaded_is_told_here_and_a_choice_is_not_lost_below_another_screen(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = threading.Event()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_model.read_bytes()[:100])
    large = hollow_file(tmp_path / "large.gguf", big_header("70b", "F16"))
    async with running() as app:
        await opened(app)
        for path, why in ((cut, "is damaged"), (large, "Not enough memory")):
            await type_in(app, str(path), f"local {path}")
            await app.press("enter")
            await app.told(why)
            assert isinstance(app.app.screen, ModelsScreen)
        assert len(app.backend.loads) == 1 and app.conversation.model == MODEL

        monkeypatch.setattr(machine, "require_loadable", lambda *_: checked.wait(180))
        await type_in(app, str(tiny_model), f"local {tiny_model}")
        await app.press("enter", "f1")
        await app.opens(HelpScreen)
        checked.set()
        await app.press("down")  # the check has ended when this is done
        await app.press("escape")
        assert (await app.loaded(2))[0] == tiny_model


async def test_a_model_opened_by_its_path_is_listed_like_the_others(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny-F32.gguf")
    backend = ScriptedBackend(model=msgspec.structs.replace(MODEL, path=str(path)))
    async with running(backend, model=path) as app:
        await opened(app)
        assert marked(app) == f"local {path}"
    async with running() as app:  # another model, another day
        await opened(app)
        assert f"local {path}" in keys(app)
        path.unlink()
        await app.press("ctrl+r")
        await app.until(lambda: f"local {path}" not in keys(app))
        assert RecentModels().files() == []


async def test_snapshots(tmp_path: Path, without_amx: None) -> None:
    arriving = download(model("Q5_K_M", 5_444_831_232), 0.61, state="running", speed=38e6, seconds_left=47.0)
    shown = left_by_the_last_run(arriving)
    async with running(size=SMALL, downloads=shown.opener) as app:
        await opened_shelf(app, tmp_path)
        await app.pilot.pause()
        await snapshot(app.app, "models-80x24")
        await app.pilot.resize_terminal(*WIDE)
        await snapshot(app.app, "models-120x40")


async def test_snapshot_of_what_is_not_here(tmp_path: Path) -> None:
    async with running(size=SMALL) as app:
        app.app.theme = "cpuchat-light"
        screen = await opened_shelf(app, tmp_path)
        await type_in(app, "qwen2.5 7b", "catalog qwen2.5-7b")
        failed = HubSearch("qwen2.5 7b", problem="Hugging Face cannot be reached.", hint="Check the connection.")
        screen.state = dataclasses.replace(screen.state, downloads=(), here=frozenset(), search=failed, on_servers=())
        screen.state_changed()
        await app.pilot.pause()
        await snapshot(app.app, "models-catalog-light-80x24")
