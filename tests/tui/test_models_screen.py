from __future__ import annotations

from pathlib import Path

import pytest
from textual.widgets import Input

from cpuchat.models.library import Library, LocalModel
from cpuchat.tui.screens.models import ModelsScreen, typed_path
from tests.support.chat_app import SMALL, WIDE, RunningApp, running
from tests.support.scripted_backend import MODEL
from tests.support.snapshots import snapshot


class Shelf(Library):
    """A library whose contents don't depend on the machine."""

    def local_models(self) -> list[LocalModel]:
        return [
            LocalModel(path=Path(MODEL.path), name=MODEL.name, source="huggingface", repo="Qwen/Qwen2.5-1.5B-Instruct",
                       architecture="qwen2", quantization="Q8_0", n_params=MODEL.n_params, size=MODEL.size,
                       n_ctx_train=32768),
            LocalModel(path=Path("/models/qwen2.5-0.5b-instruct-q4_k_m.gguf"), name="Qwen2.5-0.5B-Instruct",
                       source="folder", architecture="qwen2", quantization="Q4_K_M", n_params=494_032_768,
                       size=397_808_192, n_ctx_train=32768),
            LocalModel(path=Path("/models/broken.gguf"), name="broken", source="folder",
                       damaged="broken.gguf is cut short: 12 of 4,000 bytes of its header are there."),
            LocalModel(path=Path("/models/llama-3.2-3b.gguf"), name="Llama 3.2 3B Instruct", source="folder",
                       architecture="llama", quantization="Q5_K_M", n_params=3_212_749_888, size=2_322_153_792,
                       n_ctx_train=131072),
        ]  # fmt: skip


async def opened(app: RunningApp, library: Library | None = None) -> ModelsScreen:
    await app.ready()
    if library is not None:
        app.app.library = library
    await app.press("ctrl+o")
    await app.until(lambda: isinstance(app.app.screen, ModelsScreen) and app.app.screen._models is not None)
    screen = app.app.screen
    assert isinstance(screen, ModelsScreen)
    return screen


async def test_real_files_are_listed_and_enter_loads(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(tiny_model.read_bytes()[:100])
    async with running(folders=(tiny_model.parent, tmp_path)) as app:
        await opened(app)
        assert "cut" in app.screen_text
        await app.press(*"tiny-f32", "enter")
        await app.until(lambda: len(app.backend.loads) == 2 and not app.chat.busy)
        assert app.backend.loads[1][0].name == tiny_model.name
        assert app.app.screen is app.chat


async def test_typing_narrows_the_list_and_escape_widens_it_first() -> None:
    async with running() as app:
        screen = await opened(app, Shelf())
        assert [row.path.name for row in screen._rows].count("broken.gguf") == 1
        await app.press(*"qwen q4")
        await app.until(lambda: len(screen._rows) == 1)
        assert screen._rows[0].path.name == "qwen2.5-0.5b-instruct-q4_k_m.gguf"
        await app.press("escape")
        await app.until(lambda: len(screen._rows) == 4)
        await app.press("escape")
        await app.until(lambda: app.app.screen is app.chat)
        assert len(app.backend.loads) == 1


async def test_a_damaged_one_is_marked_and_not_loaded() -> None:
    async with running() as app:
        await opened(app, Shelf())
        assert "! broken" in app.screen_text
        assert "cut short" in app.screen_text
        await app.press(*"broken", "enter")
        assert any("cut short" in notice for notice in app.notices)
        assert isinstance(app.app.screen, ModelsScreen)


async def test_the_arrows_move_the_mark_while_the_search_keeps_the_focus() -> None:
    async with running() as app:
        screen = await opened(app, Shelf())
        assert screen._marked and screen._marked.path == Path(MODEL.path)
        await app.press("down", "down", "down", "down")
        assert screen._marked and screen._marked.path.name == "llama-3.2-3b.gguf"
        assert "131,072 tokens" in app.screen_text
        await app.press("pageup")
        assert screen._marked and screen._marked.path == Path(MODEL.path)
        assert isinstance(screen.focused, Input)


async def test_a_pasted_path_is_loaded(tiny_model: Path) -> None:
    async with running() as app:
        screen = await opened(app, Shelf())
        screen.query_one("#filter", Input).value = f"'{tiny_model}'"
        await app.until(lambda: screen._rows and screen._rows[0].path == tiny_model)
        await app.press("enter")
        await app.until(lambda: len(app.backend.loads) == 2)
        assert app.backend.loads[1][0] == tiny_model


async def test_a_path_that_is_not_there_says_so() -> None:
    async with running() as app:
        screen = await opened(app, Shelf())
        screen.query_one("#filter", Input).value = "/no/such/file.gguf"
        await app.until(lambda: "no such file" in app.screen_text)
        await app.press("enter")
        assert any("no such file" in notice for notice in app.notices)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("qwen", None),
        ("qwen 1.5b", None),
        ("model.gguf", None),
        ("/a/b.gguf", "/a/b.gguf"),
        ("'/a/b c.gguf'", "/a/b c.gguf"),
        ("/a/b\\ c.gguf ", "/a/b c.gguf"),
        ("file:///a/b%20c.gguf", "/a/b c.gguf"),
        ("./b.gguf", "b.gguf"),
        ("models/b.GGUF", "models/b.GGUF"),
    ],
)
def test_what_counts_as_a_path(text: str, path: str | None) -> None:
    assert typed_path(text) == (None if path is None else Path(path))


def test_a_tilde_is_the_home_folder() -> None:
    assert typed_path("~/b.gguf") == Path.home() / "b.gguf"


@pytest.mark.parametrize(("name", "size"), [("80x24", SMALL), ("120x40", WIDE)])
async def test_snapshots(name: str, size: tuple[int, int]) -> None:
    async with running(size=size) as app:
        screen = await opened(app, Shelf())
        screen.query_one("#filter", Input).cursor_blink = False
        await app.pilot.pause()
        snapshot(app.app, f"models-{name}")
