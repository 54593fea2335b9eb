"""Tests servers in the models screen and in the chat."""

from __future__ import annotations

import os
from pathlib import Path

from textual.widgets import Input, Static

from cpuchat.backend.switching import SwitchingBackend
from cpuchat.config import settings
from cpuchat.config.servers import RunningServer, ServerModel, recorded
from cpuchat.tui.models.screen import ModelsScreen
from cpuchat.tui.settings import SettingsScreen
from cpuchat.tui.widgets.setting_rows import SettingRow
from tests.support.chat_app import running
from tests.support.models_screen import about, keys, marked, type_in
from tests.support.remote_server import Reply, remote_server


async def test_models_of_servers_are_listed_and_enter_uses_one(tiny_model: Path) -> None:
    models = {"data": [{"id": "one-Q8_0", "owned_by": "x"}, {"id": "two", "owned_by": "x"}]}
    async with remote_server(pages={"/v1/models": models}) as server:
        settings.update({"servers": {"urls": [server.url, "http://127.0.0.1:9"]}})
        async with running(SwitchingBackend(), model=None) as app:
            await app.press("ctrl+o")
            await app.opens(ModelsScreen)
            await app.until(lambda: f"server {server.url}#two" in keys(app) and "cannot be reached" in app.screen_text)
            place = server.url.removeprefix("http://")
            assert f"on {place} · OpenAI-compatible server" in app.screen_text and "on servers" in app.screen_text
            assert app.screen_text.count(place) == 1  # the rows have no room for it
            await type_in(app, "two", f"server {server.url}#two")
            assert "OpenAI-compatible server" in about(app)
            await app.press("enter")
            await app.until(lambda: app.conversation.model is not None and not app.chat.session.busy)
            assert "OpenAI-compatible server at" in app.status
            await app.send("Hi")
            assert app.conversation.messages[-1].content == "Hello there."
            assert "≈" in app.screen_text
            assert settings.load().model.last == str(ServerModel(server.url, "two"))


async def test_a_pasted_address_is_asked_for_its_models() -> None:
    async with remote_server() as server, running(SwitchingBackend(), model=None) as app:
        await app.press("ctrl+o")
        await app.opens(ModelsScreen)
        await type_in(app, "http://u:p@127.0.0.1", "server")
        await app.press("enter")
        await app.told("must not contain a password")
        assert not app.chat.services.servers_seen
        await type_in(app, server.url + "/v1")
        await app.until(lambda: "connect to" in app.screen_text)
        await app.press("enter")
        await app.until(lambda: marked(app).endswith("some-Q4_K_M"))
        await app.press("enter")
        await app.until(lambda: app.conversation.model is not None and not app.chat.session.busy)
        assert app.conversation.model is not None and app.conversation.model.name == "some-Q4_K_M"


async def test_a_lost_connection_is_reported_and_the_text_kept() -> None:
    async def answer(reply: Reply) -> None:
        await reply.head()
        await reply.text("The first half")

    async with (
        remote_server(answer=answer) as server,
        running(SwitchingBackend(), model=ServerModel(server.url)) as app,
    ):
        await app.ready()
        await app.send("Hi")
        assert app.conversation.messages[-1].content == "The first half"
        await app.until(lambda: "Connection lost" in app.screen_text)
        assert "was closed before" in app.screen_text
        await app.press("ctrl+l")
        await app.told("Only models on this machine")


async def test_what_has_no_effect_on_a_model_on_a_server_says_so() -> None:
    async with remote_server() as server, running(SwitchingBackend(), model=ServerModel(server.url)) as app:
        await app.ready()
        await app.press("ctrl+t")
        await app.until(lambda: any("answers of models on this machine" in one for one in app.notices))
        app.chat.run_worker(app.chat.commands.answer_now())
        await app.until(lambda: any("The model is not reasoning." in one for one in app.notices))
        await app.press("f2")
        screen = await app.opens(SettingsScreen)
        await app.until(lambda: screen.rows)
        about = {row.field.key: row.text_beside for row in screen.rows}
        assert {about["chat.reasoning_budget"], about["sampling.top_k"]} == {"not supported by the server"}
        assert about["sampling.temperature"].startswith("0 = greedy")
        assert screen.query_one("#row-sampling-temperature Input", Input).placeholder == "server default"
        notes = [str(note.render()) for note in screen.query(".note").results(Static)]
        assert sum("are for models on this machine" in note for note in notes) == 2
        screen.query_one("#row-engine-ctx", SettingRow).put(4096)
        await app.press("ctrl+s")
        await app.until(lambda: any("next load of a model on this machine" in notice for notice in app.notices))


async def test_servers_that_run_here_are_listed_until_they_end() -> None:
    async with remote_server() as server, running(SwitchingBackend(), model=None) as app:
        key = f"server {server.url}#org/some-Q4_K_M"
        with recorded(RunningServer(server.url, "some", os.getpid())):
            await app.press("ctrl+o")
            await app.opens(ModelsScreen)
            await app.until(lambda: key in keys(app))
        await app.press("ctrl+r")
        await app.until(lambda: key not in keys(app))
