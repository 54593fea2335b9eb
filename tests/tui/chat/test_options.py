"""Tests the form of what a chat is answered with: values, their sources, and what a change of them does."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from textual.widgets import Input, TextArea

from cpuchat.config import settings
from cpuchat.config.settings import SettingSources
from cpuchat.models.gguf.header import read_model
from cpuchat.protocol.messages import LoadOptions, ToolCall
from cpuchat.telemetry.roofline import Reach
from cpuchat.tui.chat.call_screen import CallScreen
from cpuchat.tui.chat.options import ChatOptionsScreen, ContextField
from cpuchat.tui.chat.transcript import ChatTranscript
from cpuchat.tui.widgets.setting_rows import SettingRow
from tests.support.chat_app import SMALL, WIDE, RunningApp, loaded
from tests.support.looking import configure
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, answer, calling
from tests.support.snapshots import snapshot


class Form:
    """The form that is open, and what stands in it."""

    def __init__(self, app: RunningApp) -> None:
        assert isinstance(app.app.screen, ChatOptionsScreen)
        self.app, self.screen = app, app.app.screen

    def row(self, key: str) -> SettingRow:
        return self.screen.query_one(f"#row-{key.replace('.', '-')}", SettingRow)

    def shown(self, key: str) -> tuple[str, str]:
        """Return the value of a row, and what stands beside it."""
        row = self.row(key)
        return str(row.content), row.text_beside

    async def put(self, key: str, value: object) -> None:
        self.row(key).put(value)
        await self.app.pilot.pause()

    async def save(self) -> None:
        await self.app.press("ctrl+s")
        await self.app.closes()


async def opened(app: RunningApp) -> Form:
    await app.press("alt+s")
    await app.until(lambda: isinstance(app.app.screen, ChatOptionsScreen) and app.app.screen.query(SettingRow))
    return Form(app)


async def test_each_value_is_shown_with_its_source_and_a_change_holds_from_the_next_message_on() -> None:
    settings.update({"sampling": {"top_k": 20}})
    backend = ScriptedBackend([answer("One."), answer("Two."), answer("Three.")])
    async with loaded(backend) as app:
        app.app.services.setting_sources = SettingSources({"sampling.min_p": "preset review"})
        form = await opened(app)
        assert form.shown("sampling.top_k") == ("20", "set in config.toml")
        assert form.shown("sampling.min_p") == ("", "set by preset review")
        assert form.shown("sampling.temperature") == ("", "default")
        assert form.row("sampling.temperature").query_one(Input).placeholder
        assert form.shown("engine.ctx") == ("0", "8,192 in use · default")
        await form.put("sampling.temperature", 1.5)
        await form.put("sampling.top_k", 7)
        assert form.shown("sampling.temperature") == ("1.5", "this chat")
        await form.save()
        assert app.prompt.border_title == "Message · temperature 1.5 · top-k 7"
        await app.send("First")
        assert (backend.requests[-1].sampling.temperature, backend.requests[-1].sampling.top_k) == (1.5, 7)

        form = await opened(app)  # what the chat has of its own is taken back by field
        assert form.shown("sampling.top_k") == ("7", "this chat")
        form.row("sampling.top_k").editor.focus()
        await app.press("ctrl+d")
        await app.until(lambda: form.shown("sampling.top_k") == ("20", "set in config.toml"))
        await form.save()
        await app.send("Second")
        assert (backend.requests[-1].sampling.temperature, backend.requests[-1].sampling.top_k) == (1.5, 20)
        assert app.conversation.history.store.chat(app.open_chat.id).own == {"sampling.temperature": 1.5}
        await app.press("ctrl+n")  # the next chat is as the settings say
        await app.send("Third")
        assert backend.requests[-1].sampling.temperature != 1.5
    assert settings.load().sampling.temperature is None


async def test_what_a_new_system_prompt_costs_is_said_and_the_next_chat_begins_as_the_settings_say() -> None:
    backend = ScriptedBackend([answer("One.", prompt_n=500), answer("Two."), answer("Three."), answer("Four.")])
    async with loaded(backend, size=SMALL) as app:
        await app.write("a draft")
        form = await opened(app)
        assert app.app.focused is form.row("chat.system_prompt").editor  # the key, the text, and it is saved
        await app.press(*"Be brief.")
        await form.save()
        assert app.prompt.border_title == "Message · own system prompt" and app.prompt.text == "a draft"
        await app.send("First")
        assert backend.requests[-1].messages[0].content == "Be brief."
        assert "▸ System prompt: Be brief. · 1 line (F7)" in app.screen_text
        assert app.prompt.border_title == "Message"

        app.conversation.meter.reach = Reach(compute_tok_s=100.0)
        app.chat.query_one(ChatTranscript).focus()
        await app.press(*"kkkkk", "f4")  # at the system prompt F4 edits it, and not the last question
        await app.opens(ChatOptionsScreen)
        form = Form(app)
        assert form.shown("chat.system_prompt") == ("Be brief.", "this chat")
        await form.put("chat.system_prompt", "Sing.")
        await form.save()
        await app.shows("▸ System prompt: Sing. · 1 line (F7)")
        await app.told("reads the whole chat again: 501 tokens")
        await app.send("Second")
        assert backend.requests[-1].messages[0].content == "Sing."
        assert app.conversation.history.store.chat(app.open_chat.id).system_prompt == "Sing."

        app.conversation.settings.chat.system_prompt = "Hum."  # of new chats; an empty one of their own replaces it
        await app.press("ctrl+n")
        form = await opened(app)
        assert form.shown("chat.system_prompt") == ("Hum.", "default")
        await form.put("chat.system_prompt", "")
        await form.save()
        await app.send("Third")
        assert [message.role for message in backend.requests[-1].messages] == ["user"]
        assert "▸ System" not in app.screen_text


async def test_a_chat_reasons_as_was_chosen_for_it_and_answers_now() -> None:
    gate = Gate()
    backend = ScriptedBackend([answer("One.", reasoning="Let me see.", gate=gate)])
    async with loaded(backend) as app:
        form = await opened(app)
        await form.put("chat.reasoning", "on")
        await form.put("chat.reasoning_budget", 300)
        await form.save()
        assert app.prompt.border_title == "Message · reasoning on, at most 300 tokens"
        await app.send("First", wait=False)
        await app.shows("▾ reasoning · 3 words · F10 answers now")
        assert (backend.requests[-1].reasoning, backend.requests[-1].reasoning_budget) == (True, 300)
        await app.press("alt+s")
        await app.told("You can change this chat when the answer is done")
        await app.press("f10")
        await app.until(lambda: backend.reasoning_ended)
        gate.open()
        await app.idle()
        await app.press("f10", "ctrl+n")
        await app.told("The model is not reasoning")
        await app.until(lambda: app.prompt.border_title == "Message")


async def test_another_context_loads_the_model_again_and_one_that_cannot_be_keeps_the_form_open() -> None:
    async with loaded() as app:
        form = await opened(app)
        await form.put("engine.ctx", 100)
        await app.press("ctrl+s")
        await app.told("below the minimum of")
        assert app.app.screen is form.screen
        await form.put("engine.ctx", 4096)
        await form.put("chat.when_full", "stop")
        await form.save()
        await app.until(lambda: len(app.backend.loads) == 2 and not app.chat.session.busy)
        await app.send("First")
        assert app.open_chat.when_full == "stop" and app.open_chat.own == {"engine.ctx": 4096}
        chat_id = app.open_chat.id
        await app.press("ctrl+n")  # whose first message has the model loaded as the settings say
        assert len(app.backend.loads) == 2 and "0/8k ctx" in app.status
        await app.send("Second")
        await app.chat.commands.open(chat_id).wait()
        await app.press("ctrl+r")
        await app.until(lambda: len(app.backend.requests) == 3 and not app.chat.session.busy)
        app.backend.die()  # which would start again as it was
        await app.press("ctrl+n")
        await app.send("Third")
        await app.chat.commands.open(chat_id).wait()
        await app.run("/compact")
        await app.until(lambda: len(app.backend.requests) == 5 and not app.chat.session.busy)
        assert [options.n_ctx for _, options in app.backend.loads] == [0, 4096, 0, 4096, 0, 4096]
        form = await opened(app)
        assert form.shown("chat.when_full") == ("stop", "this chat")
        assert form.shown("engine.ctx")[1].endswith("in use · this chat")
        await form.put("sampling.top_p", 7)
        assert form.row("sampling.top_p").text_beside == "! needs a number from 0 to 1"
        await app.press("escape")
        await app.confirm()
        await app.closes()


def test_a_context_beyond_training_or_memory_is_refused_in_the_form(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = read_model(tiny_model).n_ctx_train
    model = msgspec.structs.replace(MODEL, path=str(tiny_model), n_ctx=256, n_ctx_train=trained)
    field = ContextField.of_model(model, LoadOptions())
    assert field.parse(str(trained)) == trained and field.parse("0") == 0 and field.need(0) < field.need(trained)
    with pytest.raises(ValueError, match=f"needs 0 to {trained:,}, as trained"):
        field.parse(str(trained + 1))
    monkeypatch.setattr("cpuchat.tui.chat.options.available_bytes", lambda: 0)
    with pytest.raises(ValueError, match="needs 0 to 256, as memory allows"):
        ContextField.of_model(model, LoadOptions()).parse("512")


async def test_servers_are_started_called_and_ended_and_approvals_are_taken_back(tmp_path: Path) -> None:
    configure(tmp_path, "noise", gone={"command": "gone-mad"}, odd={})
    backend = ScriptedBackend([calling("", ToolCall(name="look")), answer("It was seen.")])
    async with loaded(backend) as app:
        form = await opened(app)
        assert "mcpServers.odd" in form.shown("tools.server-2")[1]
        await form.put("tools.server-0", True)
        await form.put("tools.server-1", True)
        await form.save()
        await app.told("gone-mad: No such file")
        await app.until(lambda: "1 tool" in app.status)
        await app.send("What is it?", wait=False)
        await app.opens(CallScreen)
        await app.shows("server noise, says that it only reads; it gets these arguments")
        await app.press("right", "right", "enter")  # always in this chat
        await app.idle()
        assert backend.requests[1].messages[-1].content.startswith("seen\n\n[If this")
        form = await opened(app)
        assert form.shown("tools.approved") == ("True", "run without asking")
        assert form.shown("tools.server-0")[1].startswith("running, 1 tool")
        assert form.shown("tools.server-1")[0] == "False"
        await form.put("tools.approved", False)
        await form.put("tools.server-0", False)
        await form.save()
        await app.until(lambda: "tool" not in app.status)
        assert not app.chat.session.tool_servers and not app.chat.session.tools.approved


@pytest.mark.parametrize("size", [(60, 20), SMALL, WIDE])
async def test_every_field_is_reached_by_tab_alone(size: tuple[int, int]) -> None:
    async with loaded(size=size) as app:
        form = await opened(app)
        for field in form.screen.query("Input, TextArea"):
            field.cursor_blink = False  # type: ignore[attr-defined]
        reached = list[str]()
        for row in form.screen.query(SettingRow):
            await app.until(lambda row=row: row.editor.has_focus or not reached)
            reached.append(row.field.key)
            row.editor.focus()
            await app.shows(row.field.label)
            await app.press("tab")
        assert len(reached) > 10
        form.row("chat.system_prompt").query_one(TextArea).focus()
        await app.pilot.pause()
        await snapshot(app.app, f"options-{size[0]}x{size[1]}")
