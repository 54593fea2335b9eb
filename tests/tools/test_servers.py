"""Tests MCP servers over standard input and output: good ones, and ones that break every rule."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cpuchat.base import paths
from cpuchat.base.errors import ToolServerFailed
from cpuchat.present.tools import server_state
from cpuchat.protocol.messages import Tool, ToolCall, ToolResult
from cpuchat.tools import servers as tool_servers
from cpuchat.tools.config import ToolServerConfig
from cpuchat.tools.loop import Toolbox
from cpuchat.tools.servers import ToolServer
from tests.support.chatting import in_use

SUPPORT = Path(__file__).parent.parent / "support"
LOOK = ToolCall(name="look")


@contextlib.asynccontextmanager
async def hostile(way: str, folder: Path, **more: Any) -> AsyncIterator[ToolServer]:
    """Yield a server of `hostile_server.py` that was not started; wait until nothing of it is left."""
    file = folder / "started"
    arguments = ("-I", "-S", str(SUPPORT / "hostile_server.py"), way, str(file))
    server = ToolServer(way, ToolServerConfig(command=sys.executable, args=arguments, **more))
    try:
        yield server
    finally:
        await server.close()
        pids = file.read_text().split() if file.exists() else []  # it may be ended before it has written them
        while any(is_alive(int(pid)) for pid in pids):  # until the test takes too long
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended may wait for its parent."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def call(box: Toolbox, call: ToolCall = LOOK) -> tuple[Tool | ToolResult, ToolResult | None]:
    """Return what is found for a call, and its result if it is a tool."""
    found = await box.find(call)
    return found, await box.run(call) if isinstance(found, Tool) else None


async def test_a_server_of_the_package_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    monkeypatch.setenv("PYTHONPATH", "")
    script = str(SUPPORT / "mcp_server.py")
    server = ToolServer("good", ToolServerConfig(command=sys.executable, args=(script,), env={"GIVEN": "1"}))
    async with in_use(Toolbox([server])) as box:
        assert server.state == "stopped"
        assert await box.start() == [] and server.state == "running"
        add, *others = box.tools
        assert (add.name, add.source, add.read_only) == ("add", "good", True)
        assert add.description.startswith("Add two numbers.") and add.parameters["required"] == ["first", "second"]
        assert [tool.name for tool in others] == ["environment", "draw", "find", "count", "refuse", "halves", "fail"]
        assert not others[0].read_only
        for name, arguments, text in (
            ("add", {"first": 20, "second": 22}, "42"),
            ("draw", {}, "[image/png, 1.2 kB, not shown]"),
            ("count", {"words": "a b"}, '2 words\n{"words": ["a", "b"]}'),
            ("halves", {"number": 5}, "2\n3"),
            (
                "find",
                {},
                "[link, reports://2026/q3 now, q3, Third quarter, Revenue, application/pdf, 1.2 kB]\n"
                "[link, https://host/x, bare]\n[notes://one, text/markdown]\n# One\n"
                "[file:///a.bin, binary data, 300 B, not shown]",
            ),
        ):
            assert (await call(box, ToolCall(name=name, arguments=arguments)))[1] == ToolResult(text=text)
        for name, arguments, text in (
            ("refuse", {"words": True}, 'Not now.\n{"code": 7}'),
            ("refuse", {"words": False}, '{"code": 7}'),
            ("add", {"first": "x", "second": 1}, "first"),
            ("fail", {}, "fail"),
        ):
            _, result = await call(box, ToolCall(name=name, arguments=arguments))
            assert result is not None and result.failed and text in result.text
        _, result = await call(box, ToolCall(name="environment"))
        assert result is not None and "GIVEN=1" in result.text and "SECRET_TOKEN" not in result.text
    assert server.state == "stopped"


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("noise", "seen"),
        ("strict", "seen"),
        ("lie", f'seen\n{{"seen": "{"a" * 40}!"}}'),
        ("cut", "seen ?"),
        ("die", "The MCP server die ended: no memory left. The next call restarts it."),
        ("shout", "The MCP server shout ended: it wrote more than 4.0 MB in one message. The next call restarts it."),
        (
            "garbled",
            "The MCP server garbled ended: it sent a message that is no valid JSON-RPC. The next call restarts it.",
        ),
    ],
)
async def test_what_a_server_does_is_told_and_it_is_restarted(way: str, told: str, tmp_path: Path) -> None:
    async with hostile(way, tmp_path) as server:
        await server.ready()
        box = Toolbox([server])
        for _ in range(2):
            _, result = await call(box)
            assert result == ToolResult(text=told, failed=not told.startswith("seen"))
        n_starts = len((tmp_path / "started").read_text().splitlines())
        assert n_starts == (1 if told.startswith("seen") else 2)
        assert (server.state == "running") == told.startswith("seen") == (server.problem is None)
        log = paths.log_dir() / f"tools-{way}.log"
        assert ("DEBUG: sending" in log.read_text()) == (way == "noise")


async def test_a_call_that_takes_too_long_or_is_stopped_ends_the_server_and_its_children(tmp_path: Path) -> None:
    async with hostile("hang", tmp_path, timeout=0.05) as server:
        await server.ready()
        _, result = await call(Toolbox([server]))
        assert result == ToolResult(text="The tool was stopped: no result after 0 s.", failed=True)
        assert server.state != "running"
        server.timeout = 60.0
        await server.ready()
        assert server.state == "running"
        running = asyncio.ensure_future(server.run(LOOK))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert server.state != "running"


async def test_another_variable_makes_another_tool(tmp_path: Path) -> None:
    fingerprints = set[str]()
    for value in ("https://one.example", "https://other.example", "https://one.example"):
        async with hostile("noise", tmp_path, env={"API": value}) as server:
            await server.ready()
            fingerprints.add(server.tools[0].fingerprint)
    assert len(fingerprints) == 2


async def test_a_tool_that_changes_is_another_one(tmp_path: Path) -> None:
    async with hostile("change", tmp_path) as server:
        await server.ready()
        box = Toolbox([server])
        before, result = await call(box)
        after, _ = await call(box)
        assert isinstance(before, Tool) and isinstance(after, Tool) and result == ToolResult(text="seen")
        assert before.fingerprint != after.fingerprint and after.description == "Delete everything."
        assert box.tools == (after,)


@pytest.mark.parametrize(("way", "told"), [("many", "128 of 200 tools"), ("endless", "128 of over 200 tools")])
async def test_tools_that_are_not_offered_are_told(way: str, told: str, tmp_path: Path) -> None:
    async with hostile(way, tmp_path) as server:
        box = Toolbox([server])
        assert await box.start() == [] and len(box.tools) == 128
        assert server_state(server, box.offered(server)).startswith(f"running, {told}, about ")


@pytest.mark.parametrize(("way", "names"), [("again", ["look"]), ("blank", [])])
async def test_a_list_of_tools_that_goes_on_without_new_ones_ends(way: str, names: list[str], tmp_path: Path) -> None:
    async with hostile(way, tmp_path) as server:
        box = Toolbox([server])
        assert await box.start() == [] and [tool.name for tool in box.tools] == names
        assert not server.has_more


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("malformed", "cannot be used: it sent an invalid answer: .*inputSchema"),
        ("long", "cannot be used: a tool has a name of 1,000,000 characters; 128 are allowed"),
        ("silent", "gave no answer within 0 s"),
    ],
)
async def test_a_server_that_cannot_be_used_is_ended(
    way: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hostile(way, tmp_path) as server:
        if way == "silent":
            monkeypatch.setattr(tool_servers, "START_SECONDS", 0.3)
        assert await Toolbox([server]).start() == [server.problem] and server.state == "failed"
        with pytest.raises(ToolServerFailed, match=reason) as error:
            await server.ready()
        assert "mcp.json" in error.value.hint
        found = await Toolbox([server]).find(LOOK)
        assert isinstance(found, ToolResult) and found.failed


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (ToolServerConfig(command="gone-mad"), "cannot be started: gone-mad: No such file"),
        (ToolServerConfig(command="sh", cwd="/gone"), "cannot be started: /gone: No such file"),
        (ToolServerConfig(command="sh", args=("a\0b",)), "cannot be started: .*null byte"),
        (ToolServerConfig(command="sh", args=("-c", "echo it is Sunday >&2; exit 3")), "ended: it is Sunday"),
        (ToolServerConfig(command="sh", args=("-c", "exit 3")), "ended: exit status 3"),
    ],
)
async def test_a_server_that_does_not_start_says_why(server: ToolServerConfig, reason: str) -> None:
    started = ToolServer("odd", server)
    with pytest.raises(ToolServerFailed, match=f"The MCP server odd {reason}") as error:
        await started.ready()
    assert ("tools-odd.log" in error.value.hint) == ("Sunday" in reason)
    assert re.match(reason, error.value.reason)
    assert started.state == "failed"
    await started.close()


async def test_a_start_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    async with hostile("silent", tmp_path) as server:
        starting = asyncio.ensure_future(server.ready())
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.01)
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()
