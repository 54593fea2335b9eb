"""Tests that the model names a chat while the app is idle, and never against the user."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cpuchat.chats.records import written_title
from cpuchat.tui.chat import probes
from cpuchat.tui.chat.probes import IdleProbe
from tests.support.chat_app import RunningApp, running
from tests.support.scripted_backend import MODEL, READ, Gate, ScriptedBackend, answer, calling


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes.ChatTitler, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(probes.ChatTitler, "CHECKS", 1)
    monkeypatch.setattr(IdleProbe, "cores_idle", lambda _: True)


def title(app: RunningApp) -> str:
    chat = app.conversation.chat
    return app.conversation.history.store.chat(chat.id).title if chat is not None else ""


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("Regex for dates", "Regex for dates"),
        ('"Regex for dates."\n', "Regex for dates"),
        ("**Title:** Regex for dates", "Regex for dates"),
        ("# Chat title: “Daten mit Regex”", "Daten mit Regex"),
        ("Sure! Here is a title that goes on for longer than any title should be", ""),
        ("…", ""),
        ("", ""),
    ],
)
def test_a_title_is_taken_out_of_what_the_model_wrote(written: str, found: str) -> None:
    assert written_title(written) == found


async def test_the_model_names_a_chat_once_after_its_first_answer() -> None:
    backend = ScriptedBackend([answer("Use a regex."), answer('"Regex for dates"'), answer("More.")])
    async with running(backend) as app:
        await app.ready()
        await app.send("How do I find dates in a text?")
        await app.until(lambda: title(app) == "Regex for dates" and "Regex for dates" in app.screen_text)
        asked = backend.requests[1]
        assert [one.content for one in asked.messages[:2]] == ["How do I find dates in a text?", "Use a regex."]
        assert asked.state.chat == "" and app.stored()[-1] == ("assistant", "Use a regex.")
        await app.send("And times?")
        assert len(backend.requests) == 3 and title(app) == "Regex for dates"


async def test_a_message_stops_the_title_and_a_name_of_the_users_stays() -> None:
    gate = Gate()
    backend = ScriptedBackend([answer("One."), answer("Never a title", gate=gate), answer("Two."), answer("A title")])
    async with running(backend) as app:
        await app.ready()
        await app.send("First")
        await app.until(gate.reached.is_set)
        await app.conversation.history.rename(app.conversation.chat.id, "Mine")  # type: ignore[union-attr]
        await app.send("Second")
        assert app.stored()[-1] == ("assistant", "Two.")
        assert len(backend.requests) == 3 and title(app) == "Mine"


async def test_a_title_is_asked_for_with_the_tools_of_the_chat_and_is_no_call(tmp_path: Path) -> None:
    backend = ScriptedBackend([answer("Use a regex."), calling("A title", READ)])
    async with running(backend) as app:
        await app.ready()
        app.chat.session.offer_folder(tmp_path)
        await app.send("How do I find dates?")
        await app.until(lambda: len(backend.requests) == 2 and not app.conversation.busy)
        assert backend.requests[1].tools == backend.requests[0].tools != ()
        assert title(app) == "How do I find dates?"


async def test_a_model_on_a_server_is_not_asked_for_titles() -> None:
    backend = ScriptedBackend(model=msgspec.structs.replace(MODEL, server="llama-server at 127.0.0.1:8080"))
    async with running(backend) as app:
        await app.ready()
        await app.send("First")
        assert not app.chat.session.untitled
