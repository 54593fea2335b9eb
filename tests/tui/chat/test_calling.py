"""Tests calls of tools on the chat screen: asked for, shown, kept, stopped."""

from __future__ import annotations

from pathlib import Path

from textual.widgets import Button

from cpuchat.present.tools import CHOICES
from cpuchat.protocol.messages import Tool, ToolCall
from cpuchat.tui.chat.call_screen import CallScreen
from tests.support.chat_app import SMALL, RunningApp, loaded, running
from tests.support.looking import LOOK, server_config
from tests.support.scripted_backend import ScriptedBackend, answer, calling


async def offered(app: RunningApp, folder: Path) -> None:
    await app.ready()
    await app.chat.session.start_server("noise", server_config(folder))
    await app.until(lambda: "1 tool" in app.status)


async def asked(app: RunningApp) -> str:
    await app.until(lambda: isinstance(app.app.screen, CallScreen))
    await app.pilot.pause()
    return app.screen_text


async def test_calls_are_asked_for_shown_folded_and_kept(tmp_path: Path) -> None:
    other = ToolCall(name="look", arguments={"text": "a text that is far too long for one line of the chat"})
    backend = ScriptedBackend([calling("I will look.", LOOK, other), answer("It says: the content.")])
    async with running(backend, size=SMALL) as app:
        await offered(app, tmp_path)

        def calls() -> str:
            return "\n".join(line.text for line in app.transcript.lines)

        await app.send("What is in it?", wait=False)
        shown = await asked(app)
        assert "The model calls look" in shown and "path: notes.md" in shown and "Always in this chat" in shown
        await app.until(lambda: "notes.md) · waiting for your approval" in calls())
        assert "running…" not in calls()
        await app.press("right", "enter")
        await app.until(lambda: isinstance(app.app.screen, CallScreen) and "text: a text" in app.screen_text)
        assert "one line of the chat" in app.screen_text
        await app.press("enter")  # refusing has the focus
        await app.until(lambda: not app.chat.session.busy)
        lines = [line.strip() for line in calls().splitlines()]
        assert "▸ look(path: notes.md) · 1 line (F7)" in lines
        assert lines.index("I will look.") < lines.index("It says: the content.")
        assert any("refused" in line for line in lines)
        assert app.transcript.messages[-1].note.startswith("7 tokens · 40")  # of both answers
        await app.press("f7")
        assert "text: a text that is far too long for one line of the chat" in calls()
        assert [message.role for message in backend.requests[1].messages[1:]] == ["assistant", "tool", "tool"]
        chat = app.open_chat
        app.chat.commands.new_chat()
        app.chat.commands.open(chat.id)
        await app.until(lambda: "│ seen" in calls())
        await app.send("And now?")
        assert len(backend.requests[2].messages) == 6


async def test_a_call_is_stopped_and_tools_are_turned_off(tmp_path: Path) -> None:
    backend = ScriptedBackend([calling("I will look.", LOOK), answer("Hello.")])
    async with running(backend) as app:
        await offered(app, tmp_path)
        await app.send("What is in it?", wait=False)
        await asked(app)
        await app.press("ctrl+c")
        await app.until(lambda: not app.chat.session.busy and app.app.screen is app.chat)
        assert app.transcript.messages[-1].note.endswith("stopped") and len(backend.requests) == 1
        await app.chat.session.end_server("noise")
        await app.until(lambda: "tool" not in app.status)
        await app.send("Hello?")
        assert not backend.requests[1].tools


async def test_arguments_are_shown_exactly_and_a_call_runs_only_once_its_last_row_was_shown() -> None:
    lines = "\n".join(f"{number}: {'word ' * 20}" for number in range(100))
    false = "path: ~/notes/today.md"
    call = ToolCall(name="read_file", arguments={"content": f"a  b\u200b{' ' * 300}{false}\n{lines}", "path": "~/x"})
    async with loaded(ScriptedBackend([]), size=SMALL) as app:
        chosen = list[str | None]()
        app.app.push_screen(dialog := CallScreen(Tool(name="read_file", source="files"), call), chosen.append)
        shown = await asked(app)
        assert "2 arguments: content, path" in shown and "a  b‹U+200B›‹300 spaces›" in shown and "path: ~/x" in shown
        await app.until(lambda: " more rows: " in app.screen_text)
        run = [button for button in dialog.query(Button) if button.id != "refuse"]
        assert len(run) == 2 and all(button.disabled for button in run)
        await app.press("down", "right", "left")
        assert app.app.focused is dialog.query_one("#refuse") and all(button.disabled for button in run)
        await app.press("end")
        await app.until(lambda: not any(button.disabled for button in run))
        assert " more row" not in app.screen_text and "99: word" in app.screen_text
        assert all(label in app.screen_text for label in CHOICES.values())
        await app.press("right", "enter")
        await app.until(lambda: chosen == ["once"])
