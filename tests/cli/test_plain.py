"""Tests the chat in lines of text: `cpuchat --plain`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import termios
from contextlib import closing
from pathlib import Path

import pytest

from cpuchat.backend.switching import SwitchingBackend
from cpuchat.base import paths
from cpuchat.chats.history import SUMMARY_TITLE
from cpuchat.chats.store import ChatStore
from cpuchat.cli.plain import PlainChat
from cpuchat.cli.terminal import TerminalOutput
from cpuchat.config.servers import ServerModel
from cpuchat.config.settings import Settings
from cpuchat.session.chat import ChatSession
from cpuchat.session.conversation import Conversation
from tests.cli.program import run_process
from tests.support.presets import write_presets
from tests.support.remote_server import Reply, remote_server
from tests.support.terminal import Terminal


async def test_a_chat_is_lines_of_text_and_is_kept() -> None:
    async def answer(reply: Reply) -> None:
        await reply.head()
        for word in ("Part ", "one. ", "Part ", "two."):
            await reply.text(word)
        await reply.finish()

    typed = (
        '"""\nTwo\nlines @LICENSE:1\n"""\n/regenerate\n/compact\n/new\n/nonsense\n/open 3\n'
        '/chats\n/open 1\n/help\n"""\nunclosed'
    )
    write_presets('[strict]\nsystem_prompt = "Be strict."')
    async with remote_server(answer=answer) as server:
        arguments = ("--plain", "--preset", "strict", "--server", server.url)
        done = await asyncio.to_thread(run_process, *arguments, stdin=typed)
        asked = [[message["content"] for message in chat.body["messages"]] for chat in server.chats()]
    assert done.returncode == 0, done.stderr
    line = Path("LICENSE").read_text().splitlines()[0]
    message = f"LICENSE, line 1:\n```\n{line}\n```\n\nTwo\nlines @LICENSE:1"
    assert asked[:2] == [["Be strict.", message]] * 2 and asked[2][-1].startswith("Summarize")
    assert asked[3][0].startswith("Be strict.\n\nSummary of") and asked[3][1:] == ["unclosed"]
    answered = "some-Q4_K_M: Part one. Part two."
    lines = done.stdout.splitlines()
    assert lines[:3] == [answered] * 3
    assert re.fullmatch(r"1\. Two, \d{4}-\d\d-\d\d \d\d:\d\d", lines[3])
    assert lines[4:8] == ["You: Two", "lines @LICENSE:1", answered, "Summary: Part one. Part two."]
    assert "/open N: open chat N of that list." in lines
    for words in (
        "OpenAI-compatible server at", "≈ 4 tokens, ", "Summarized. The summary replaces", "New chat.",
        "No such command: /nonsense", "No chat 3", "Attached: LICENSE, line 1.", "/chats lists",
    ):  # fmt: skip
        assert words in done.stderr
    assert "\x1b" not in done.stdout + done.stderr and "·" not in done.stdout + done.stderr


async def test_a_full_chat_does_what_it_remembers_and_the_message_is_answered() -> None:
    async def answer(reply: Reply) -> None:
        messages = reply.asked.body["messages"]
        if messages[-1]["content"] == "Next?" and len(messages) > 2:
            said = "This model's maximum context length is 1024 tokens. Your request has 1500 input tokens."
            await reply.json({"error": {"message": said}}, 400)
        else:
            await reply.whole("Fine.")

    store = ChatStore(paths.chats_db())
    chat = store.create_chat("some", title="Long")
    store.add_message(chat.id, "user", "x " * 2000)
    store.add_message(chat.id, "assistant", "Yes.", model="some")
    store.set_options(chat.id, {"when_full": "compact"})
    store.close()
    paths.state_file().mkdir(parents=True)  # so that it cannot be written
    async with remote_server(answer=answer, owner="vllm") as server:
        typed = "/chats\n/open 1\nNext?\n/edit Other?\n/edit\n/history\n"
        done = await asyncio.to_thread(run_process, "--plain", "--server", server.url, stdin=typed)
        asked = [[message["content"] for message in one.body["messages"]] for one in server.chats()]
    assert done.returncode == 0, done.stderr
    assert asked[1][-1].startswith("Summarize") and asked[2] == [f"{SUMMARY_TITLE}\n\nFine.", "Next?"]
    assert asked[3][-1] == "Other?" and "You: Other?" in done.stdout
    for words in ("Summarized. The summary replaces", "Could not remember the model", "No text given."):
        assert words in done.stderr
    assert "bug" not in done.stderr


@pytest.mark.parametrize("ending", ["ctrl+c", "ctrl+d", "ctrl+d before", "ctrl+d at once", "SIGTERM"])
async def test_ctrl_c_stops_an_answer_the_next_line_is_sent_and_ctrl_c_quits(tmp_path: Path, ending: str) -> None:
    async def answer(reply: Reply) -> None:
        await reply.head()
        if reply.asked.body["messages"][-1]["content"] == "Next?":
            await reply.text("Done.")
            await reply.finish()
        else:
            await reply.text("The beginning. And")
            await reply.until_left()

    def chat(url: str) -> tuple[int, bytes]:
        with closing(Terminal(["--plain", "--server", url], home=tmp_path)) as terminal:
            talk(terminal)
            code, flags = terminal.wait_for_end(), terminal.last_modes[3]
        assert isinstance(flags, int) and not flags & termios.NOFLSH
        return code, bytes(terminal.raw)

    def talk(terminal: Terminal) -> None:
        terminal.wait_for("You:")
        terminal.type("Hello\r")
        terminal.wait_for("some-Q4_K_M: The beginning.")
        if ending == "SIGTERM":
            os.kill(terminal.pid, signal.SIGTERM)
            return
        if ending == "ctrl+d before":
            terminal.press("ctrl+d")  # which the line after it takes back
        if ending != "ctrl+d at once":
            terminal.type("Next?\r")  # sent after this answer
        if ending in ("ctrl+d", "ctrl+d at once"):
            terminal.press("ctrl+d")  # after that one
        terminal.press("ctrl+c")
        terminal.wait_for("stopped")
        if ending == "ctrl+d at once":
            return
        terminal.wait_for("some-Q4_K_M: Done.")
        if ending == "ctrl+d":
            return
        terminal.wait_until(lambda screen: screen.rstrip().endswith("You:"), "the next prompt")
        terminal.press("ctrl+c")
        terminal.wait_for("Ctrl+C again")
        terminal.press("ctrl+c")

    async with remote_server(answer=answer) as server:
        code, raw = await asyncio.to_thread(chat, server.url)
    if ending == "SIGTERM":
        assert code == -signal.SIGTERM
        return
    assert code == 0 and b"And\r\n" in raw  # the partial answer
    assert b"\x1b[2K" not in raw and b"\x1b[2m" not in raw and b"Traceback" not in raw


def test_two_ctrl_c_stop_an_answer_of_a_server_and_the_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(reply: Reply) -> None:
        await reply.head()
        if reply.asked.body["messages"][-1]["content"] == "Hello":
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            await reply.until_left()
        await reply.text("Done.")
        await reply.finish()

    typed = iter(["Hello", "Next?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    with asyncio.Runner() as runner:
        serving = remote_server(answer=answer)
        server = runner.run(serving.__aenter__())
        core = Conversation(settings=Settings(), backend=SwitchingBackend(), store=ChatStore(paths.chats_db()))
        chat = PlainChat(ChatSession(core), TerminalOutput(plain=True), runner)
        assert chat.run(ServerModel(server.url)) == 0
        runner.run(core.close())
        runner.run(serving.__aexit__(None, None, None))
    said = capsys.readouterr()
    assert said.out == "some-Q4_K_M: Done.\n" and "closed" not in said.err
