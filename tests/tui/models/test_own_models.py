"""Tests what can be done with a model that is here: delete, inspect, quantize."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest
from textual import events

from cpuchat.models.library.deleting import Deletion
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import LocalModel
from cpuchat.models.synthetic.model import write_model
from cpuchat.tui.models.quantize import QuantizeScreen
from cpuchat.tui.models.screen import ModelsScreen
from cpuchat.tui.widgets.dialogs import ConfirmScreen
from tests.support.chat_app import running
from tests.support.models_screen import keys, marked, opened, type_in
from tests.support.scripted_backend import MODEL, ScriptedBackend
from tests.support.shapes import TINY_LLAMA
from tests.support.tiny_gguf import write_tiny_gguf


async def test_deleting_asks_says_what_is_freed_and_refuses_what_is_loaded_and_its_draft_model(tmp_path: Path) -> None:
    file, draft, mine = (write_tiny_gguf(tmp_path / f"{name}.gguf") for name in ("loaded", "beside", "mine"))
    loaded = msgspec.structs.replace(MODEL, path=str(file), draft="tiny", draft_quantization="F32")
    async with running(ScriptedBackend(model=loaded), model=file, folders=(tmp_path,)) as app:
        await opened(app)
        for number, wanted in enumerate((file, draft), 1):
            await type_in(app, wanted.stem, f"local {wanted}")
            await app.press("f8")
            await app.until(lambda number=number: sum("in use" in notice for notice in app.notices) == number)
        assert file.exists() and draft.exists() and isinstance(app.app.screen, ModelsScreen)
    async with running(folders=(tmp_path,)) as app:
        await opened(app)
        await type_in(app, "mine", f"local {mine}")
        await app.press("end", "delete")
        await app.opens(ConfirmScreen)
        assert "will be freed (1 file)" in app.screen_text
        await app.press("n")
        await app.opens(ModelsScreen)
        assert mine.exists()
        await app.press("f8")
        await app.confirm()
        await app.until(lambda: not mine.exists() and f"local {mine}" not in keys(app))
        await app.told("freed")


async def test_a_key_pressed_twice_on_a_slow_disk_asks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planning, may_plan, handled, plan = threading.Event(), threading.Event(), asyncio.Event(), Library.deletion

    def slowly(library: Library, model: LocalModel, in_use: Collection[Path]) -> Deletion:
        planning.set()
        may_plan.wait(180)
        return plan(library, model, in_use)

    monkeypatch.setattr(Library, "deletion", slowly)
    write_tiny_gguf(tmp_path / "mine.gguf")
    async with running(folders=(tmp_path,)) as app:
        await opened(app)
        await type_in(app, "mine", f"local {tmp_path / 'mine.gguf'}")
        await app.press("f8")
        await app.until(planning.is_set)
        app.app.simulate_key("f8")
        app.app.post_message(events.Callback(handled.set))
        may_plan.set()
        await app.until(lambda: isinstance(app.app.screen, ConfirmScreen) and handled.is_set())
        await app.press("n")
        await app.opens(ModelsScreen)


async def test_a_model_that_was_made_is_listed_and_marked(tmp_path: Path) -> None:
    source = write_model(tmp_path / "llama-F16.gguf", TINY_LLAMA, "F16")
    async with running(folders=(tmp_path,)) as app:
        await opened(app)
        await app.press(*"llama-f16")
        await app.until(lambda: source.name in marked(app))
        await app.press("f5")
        screen = await app.opens(QuantizeScreen)
        await app.until(lambda: "Q8_0" in screen.predictions)
        screen.listed.mark("Q8_0")
        await app.press("enter")
        await app.opens(ModelsScreen)
        await app.until(lambda: "llama-Q8_0.gguf" in marked(app))
