"""Tests files in the prompt: completion, what is said before sending, refusals, pasted texts, and what is resent."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cpuchat.models.library.library import Library
from cpuchat.telemetry.roofline import Reach
from cpuchat.tui.chat.composer import Paths
from tests.support.chat_app import RunningApp, loaded
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, answer

NOTES = "notes.md:\n```\n# Notes\n```\n\n"
LONG = "\n".join(f"line {n}" for n in range(41))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "main.py").write_text("one\ntwo\n")
    (folder / "notes.md").write_text("# Notes\n")
    (folder / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    monkeypatch.chdir(folder)
    return folder


def offered(app: RunningApp) -> list[str]:
    return app.chat.query_one(Paths).marks


def last_asked(app: RunningApp) -> str:
    return app.backend.requests[-1].messages[-1].content


async def test_paths_are_completed_and_what_is_no_path_is_sent_at_once() -> None:
    async with loaded() as app:
        await app.press("@")
        await app.until(lambda: offered(app) == ["@src/", "@logo.png", "@notes.md"])
        await app.press("escape")
        assert not offered(app) and app.prompt.text == "@"
        await app.press("backspace", "@")
        await app.until(lambda: len(offered(app)) == 3)
        await app.press("down", "down", "up", "down", "tab")
        assert app.prompt.text == "@notes.md "

        app.prompt.clear()
        await app.press("@", "s")
        await app.until(lambda: offered(app) == ["@src/"])
        await app.press("tab")
        assert app.prompt.text == "@src/"
        await app.until(lambda: offered(app) == ["@src/main.py"])
        await app.press("enter")
        assert app.prompt.text == "@src/main.py "
        assert not offered(app) and app.prompt.has_focus and not app.backend.requests
        await app.press("h", "i", "enter")
        await app.idle(1)
        assert last_asked(app) == "src/main.py:\n```\none\ntwo\n```\n\n@src/main.py hi"
        assert app.stored()[0] == ("user", "@src/main.py hi")

        for text in ("@pytest.fixture", "me@example.py", "@types/node", "@someone, look", "@app.get('/x.py')"):
            await app.send(text)
            assert last_asked(app) == text
        await app.send("What is in @src/")
        assert last_asked(app).startswith("src/, a folder:\n```\nmain.py  8 B\n```")
        await app.press("up")  # a recalled message that ends with a path offers none
        await app.shows("Message · src/, a folder, ≈")
        assert app.prompt.text == "What is in @src/" and not offered(app)


async def test_what_would_be_sent_is_named_with_its_tokens_and_the_wait_for_it() -> None:
    async with loaded(ScriptedBackend([answer("One.", prompt_n=7000)])) as app:
        Path("long.txt").write_text("many words " * 10_000)
        for text, shown in (
            ("What is in @notes.md?", "Message · notes.md, ≈"),
            ("What is in @notes.md and @src/main.py:1", "Message · 2 attachments, ≈"),
            ("What is in @long.txt?", "too long for the context of 8,192"),
            ("many words " * 20, "Message · ≈63 tokens"),
            ("x = 123456789\n" * 20, "Message · ≈209 tokens"),
        ):
            await app.write(text)
            await app.shows(shown)
        assert "to read" not in app.screen_text  # before the speed is known
        await app.write("What is a @property?")
        await app.until(lambda: "Message · " not in app.screen_text)
        app.conversation.meter.reach = Reach(compute_tok_s=30.0)
        await app.write("some words " * 40)
        await app.shows("Message · ≈126 tokens · ≈4 s to read")
        await app.send("First")
        await app.write("many words " * 400)
        await app.shows("with this chat")


async def test_a_file_that_cannot_be_sent_is_said_and_the_message_stays_in_the_prompt() -> None:
    async with loaded() as app:
        for text, problem in (
            ("What is @logo.png?", "logo.png is not UTF-8"),
            ("Show @gone.py!", "No such file: gone"),
        ):
            await app.write(text)
            await app.shows(f"Message · {problem}")
            await app.press("enter")
            await app.until(lambda text=text: "Request failed" in app.screen_text and app.prompt.text == text)
        assert not app.backend.requests and app.conversation.chat is None
        await app.send("Show \\@gone.py!")
        assert last_asked(app) == "Show \\@gone.py!"


async def test_attachments_are_folded_and_regenerating_and_editing_send_a_file_as_it_was() -> None:
    gate = Gate()
    async with loaded(ScriptedBackend([answer("One two", gate=gate), answer("Two.")])) as app:
        await app.send("What is in @notes.md?", wait=False)
        await app.until(gate.reached.is_set)
        await app.shows("▸ notes.md · 1 line (F7)")  # while the answer is written
        gate.open()
        await app.idle()
        assert "▸ notes.md · 1 line (F7)" in app.screen_text and "# Notes" not in app.screen_text
        await app.press("f7")
        await app.shows("▾ notes.md", "│ # Notes")
        assert app.contents()[0] == "What is in @notes.md?"

        Path("notes.md").write_text("changed\n")
        await app.press("ctrl+r")
        await app.idle(2)
        assert last_asked(app) == f"{NOTES}What is in @notes.md?"
        await app.press("f4", "!", "enter")
        await app.idle(3)
        assert last_asked(app) == f"{NOTES}What is in @notes.md?!"
        await app.send("And now, @notes.md?")
        assert last_asked(app) == "notes.md:\n```\nchanged\n```\n\nAnd now, @notes.md?"


async def test_a_long_pasted_text_becomes_an_attachment() -> None:
    async with loaded() as app:
        await app.paste(LONG.rpartition("\n")[0])
        assert app.prompt.text == LONG.rpartition("\n")[0]  # not long enough
        app.prompt.clear()
        await app.paste(LONG)
        assert app.prompt.text == "[Pasted text 1: 41 lines] "  # for what is typed next
        await app.shows("Message · Pasted text 1, ≈")
        await app.press("enter")
        await app.idle(1)
        assert last_asked(app) == f"Pasted text 1:\n```\n{LONG}\n```\n\n[Pasted text 1: 41 lines]"
        assert app.open_chat.title == LONG.splitlines()[0]
        await app.paste("word " * 100_000)
        assert app.prompt.text == "[Pasted text 2: 1 line] "


async def test_both_sides_of_a_comparison_get_the_attachments() -> None:
    demo = Library([]).resolve("demo")
    async with loaded(ScriptedBackend(model=msgspec.structs.replace(MODEL, path=str(demo))), model=demo) as app:
        sides = [ScriptedBackend(), ScriptedBackend()]
        app.app.services.new_backend = iter(sides).__next__
        await app.write("What is in @notes.md?")
        await app.press("ctrl+l")
        await app.until(lambda: all(side.requests for side in sides))
        for side in sides:
            assert side.requests[-1].messages[-1].content == f"{NOTES}What is in @notes.md?"
