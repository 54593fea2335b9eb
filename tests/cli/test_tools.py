"""Tests `ask --tools` and the same in a plain chat: what the model is offered, what it calls, and who allowed it."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from cpuchat.base.errors import SettingsError
from cpuchat.cli.session import Session
from cpuchat.cli.terminal import TerminalOutput
from cpuchat.cli.tools import start_tools, tool_loop
from cpuchat.config.settings import Settings
from tests.cli.program import refused, run_process
from tests.support.looking import configure
from tests.support.remote_server import Reply, remote_server
from tests.support.terminal import Terminal


async def _answer(reply: Reply) -> None:
    """Call look first; then say what it returned."""
    await reply.head()
    told = [one for one in reply.asked.body["messages"] if one["role"] == "tool"]
    if told:
        await reply.text(f"It says: {told[-1]['content']}")
        await reply.finish()
        return
    await reply.text("I will look.")
    for part in ('{"path": ', '"notes.md"}'):
        function = {"name": "look", "arguments": part}
        delta = {"tool_calls": [{"index": 0, "id": "x", "function": function}]}
        await reply.event({"id": "a1", "choices": [{"index": 0, "delta": delta}]})
    await reply.finish("tool_calls")


@pytest.mark.parametrize(
    ("options", "said", "noted"),
    [
        (("--allow-tools",), "It says: seen", "the model calls look(path: notes.md)"),
        ((), "It says: The user refused this call.", "no terminal to ask for approval (--allow-tools allows it)"),
    ],
)
async def test_a_model_calls_a_tool_if_that_is_allowed(
    tmp_path: Path, options: tuple[str, ...], said: str, noted: str
) -> None:
    configure(tmp_path, "noise", "malformed")
    async with remote_server(answer=_answer) as server:
        arguments = "ask", "--server", server.url, "--tools", "noise", *options, "What is in it?"
        done = await asyncio.to_thread(run_process, *arguments, stdin="")
        first, second = (chat.body for chat in server.chats())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"I will look.\n\n{said}") and noted in done.stderr
    assert "DEBUG" not in done.stderr
    assert [tool["function"]["name"] for tool in first["tools"]] == ["look"]
    call, result = second["messages"][-2:]
    assert call["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"path": "notes.md"}'}
    assert (result["role"], result["tool_call_id"]) == ("tool", call["tool_calls"][0]["id"])


async def test_a_plain_chat_asks_before_a_call_and_tells_of_it_later(tmp_path: Path) -> None:
    configure(tmp_path, "noise")

    def chat(url: str) -> str:
        arguments = ["--plain", "--server", url, "--tools", "noise"]
        with closing(Terminal(arguments, rows=40, home=tmp_path)) as terminal:
            terminal.wait_for("You:")
            terminal.type("What is in it?\r")
            terminal.wait_for("Run it?")
            terminal.type("y\r")
            terminal.wait_for("It says: seen")
            terminal.wait_for("first token")
            terminal.type("/history\r")
            terminal.wait_for("The model called look(path: notes.md).")
            later = terminal.text.rpartition("/history")[2]
            assert later.index(": I will look.") < later.index("The model called") < later.index(": It says")
            return terminal.text

    async with remote_server(answer=_answer) as server:
        shown = await asyncio.to_thread(chat, server.url)
    assert "look (server noise, says that it only reads; it gets these arguments)\npath: notes.md" in shown
    assert "·" not in shown


async def test_ask_drops_what_was_typed_before_it_asked(tmp_path: Path) -> None:
    configure(tmp_path, "noise")
    typed = asyncio.Event()

    async def answer(reply: Reply) -> None:
        await reply.head()
        if any(one["role"] == "tool" for one in reply.asked.body["messages"]):
            return await _answer(reply)
        await reply.text("I will look.")
        await typed.wait()
        arguments = json.dumps({"text": "line\n" * 30 + "path: here", "path": "notes.md"})
        call = {"index": 0, "id": "x", "function": {"name": "look", "arguments": arguments}}
        await reply.event({"id": "a1", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
        await reply.finish("tool_calls")

    def ask(url: str, loop: asyncio.AbstractEventLoop) -> str:
        arguments = ["ask", "--server", url, "--tools", "noise", "What is in it?"]
        with closing(Terminal(arguments, rows=60, home=tmp_path)) as terminal:
            terminal.wait_for("I will look.")
            for _ in range(2):
                terminal.type("y\r")
            terminal.wait_until(lambda text: text.count("y\n") == 2, "what was typed")
            loop.call_soon_threadsafe(typed.set)
            terminal.wait_for("Run it?")
            terminal.type("no\r")
            return terminal.wait_for("It says: ")

    async with remote_server(answer=answer) as server:
        shown = await asyncio.to_thread(ask, server.url, asyncio.get_running_loop())
    assert "It says: The user refused this call." in shown
    assert "these arguments)\n2 arguments: text, path\npath: notes.md\ntext:\n│ line\n" in shown
    assert "│ path: here\nRun it? " in shown


def test_all_leaves_out_servers_that_are_not_valid_with_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(tmp_path, "noise", remote={"url": "http://127.0.0.1"})
    assert "a server at an address" in refused(2, "ask", "--tools", "remote", "Hello")
    monkeypatch.setitem(sys.modules, "cpuchat.tools.mcp_client", None)
    assert 'uv tool install ".[tools]"' in refused(25, "ask", "--tools", "noise", "Hello")
    assert [source.timeout for source in tool_loop(["all"], TerminalOutput()).toolbox.sources] == [60.0]
    assert "mcpServers.remote: a server at an address" in capfd.readouterr().err
    with pytest.raises(SettingsError, match="a server at an address"):
        tool_loop(["noise", "remote"], TerminalOutput())


async def test_tools_that_are_left_out_are_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configure(tmp_path, "many")
    terminal = TerminalOutput(quiet=True)
    session = Session(Settings(), terminal)
    await start_tools(tool_loop(["many"], terminal), session.conversation, terminal)
    await session.conversation.close()
    told = "cpuchat: At most 128 tools are offered: 128 of 200 of server many.\n"
    assert capfd.readouterr().err == told
