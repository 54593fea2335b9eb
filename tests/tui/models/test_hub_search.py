"""Tests searching the hub from the models screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.tui.models.repository import RepositoryScreen
from cpuchat.tui.models.screen import ModelsScreen
from tests.support.chat_app import SMALL, running
from tests.support.hub_server import Fault, Gate, HubServer
from tests.support.models_screen import REPO, about, keys, list_of, marked, opened, opened_shelf, type_in


async def test_what_is_found_is_marked_and_opened_and_links_are_opened_and_without_a_connection_it_says_what_to_do(
    hub_server: HubServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_server.add(REPO, {"tiny-F32.gguf": tiny_model})
    hub_server.add("other/Thing-GGUF", {"thing.gguf": tiny_model})
    async with running(folders=(tiny_model.parent,), size=SMALL) as app:
        screen = await opened(app)
        await app.press(*"tiny")
        await app.until(lambda: tiny_model.name in marked(app))
        await app.press("ctrl+s")
        await app.until(lambda: marked(app) == f"hub {REPO}")
        assert REPO in app.screen_text and "hub other/Thing-GGUF" not in keys(app)
        await app.press("enter")
        await app.opens(RepositoryScreen)
        await app.press("escape")
        await app.opens(ModelsScreen)

        await type_in(app, "zzz-unheard-of")
        await app.press("enter")  # of what is not here, it searches
        await app.shows("no matches for “zzz-unheard-of”")
        await type_in(app, f"{hub_server.endpoint}/{REPO}/tree/main")
        await app.press("enter")
        await app.opens(RepositoryScreen)
        await app.shows(REPO)
        await app.press("escape")
        await app.opens(ModelsScreen)
        await type_in(app, "https://example.com/a/b/c")
        await app.press("enter")
        await app.told("is not a model repository")
        assert isinstance(app.app.screen, ModelsScreen)

        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        requests = len(hub_server.requests)
        await type_in(app, "zzz")
        await app.press("ctrl+s")
        await app.until(lambda: screen.state.search is not None and screen.state.search.problem)
        search = screen.state.search
        assert search is not None and "ffline" in search.problem and search.hint
        await app.until(lambda: marked(app) == "search" and "what to do" in about(app))
        assert len(hub_server.requests) == requests


async def test_escape_leaves_a_search_that_takes_long(hub_server: HubServer) -> None:
    gate = Gate()
    hub_server.fault("", "", Fault(where="api", gate=gate))
    async with running() as app:
        screen = await opened(app)
        await app.press(*"zzz", "ctrl+s")
        await app.until(lambda: "searching for “zzz”" in app.screen_text)
        await app.press("escape")
        assert screen.state.search is None
        assert not [worker for worker in app.app.workers if worker.group == "search" and worker.is_running]
        assert list_of(app).rows[-1].name == "search Hugging Face for “zzz”"
        gate.open()


async def test_a_model_of_the_catalog_opens_its_repository(hub_server: HubServer, tmp_path: Path) -> None:
    async with running() as app:
        await opened_shelf(app, tmp_path)
        await app.press(*"gpt-oss", "enter")
        await app.opens(RepositoryScreen)
        await app.until(lambda: any("gpt-oss-20b-GGUF" in request.path for request in hub_server.requests))
