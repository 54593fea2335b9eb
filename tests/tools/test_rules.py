"""Tests configuration and limits of tools."""

from __future__ import annotations

import re

import msgspec
import pytest

from cpuchat.base import paths
from cpuchat.base.errors import SettingsError
from cpuchat.protocol.messages import ToolCall, ToolResult
from cpuchat.tools.config import ToolServerConfig, load_servers
from cpuchat.tools.loop import MAX_ROUNDS, CallLimits, Count, shortened


def configure(text: str) -> None:
    file = paths.tool_servers_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_servers_are_read_as_other_programs_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_servers() == {}
    configure("")
    assert load_servers() == {}
    monkeypatch.setenv("TOKEN", "abc")
    monkeypatch.delenv("ABSENT", raising=False)
    configure(
        '{"mcpServers": {"files": {"type": "stdio", "command": "npx", "args": ["-y", "server", "${ABSENT:-/tmp}"],'
        ' "env": {"KEY": "${TOKEN}"}, "autoApprove": ["all"]},'
        ' "off": {"command": "${ABSENT}", "disabled": true}}, "theme": "dark"}'
    )
    servers = load_servers()
    assert list(servers) == ["files"]
    server = servers["files"]
    assert isinstance(server, ToolServerConfig)
    assert (server.command, server.args, server.timeout) == ("npx", ("-y", "server", "/tmp"), 60.0)
    assert server.env == {"KEY": "abc"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"mcpServers": {"a": {"command": 7, "env": {"KEY": "hidden"}}}}', r"mcpServers\.a\.command"),
        ('{"mcpServers": {"a": {}}}', r"mcpServers\.a: .*command"),
        ('{"mcpServers": {"a b": {"command": "x"}}}', "not a name"),
        ('{"mcpServers": {"a": {"url": "http://x"}}}', "a server at an address"),
        ('{"mcpServers": {"a": {"command": "x", "env": {"KEY": "${ABSENT}"}}}}', "ABSENT is not set"),
        ('{"mcpServers": {"a": {"command": "x", "timeout": 60000}}}', r"mcpServers\.a\.timeout"),
    ],
)
def test_a_wrong_server_is_an_error_of_its_own(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABSENT", raising=False)
    configure(text.removesuffix("}}") + ', "fine": {"command": "x"}, "off": {"url": "http://x", "disabled": true}}}')
    wrong, fine = load_servers().values()
    assert isinstance(wrong, SettingsError) and re.search(reason, str(wrong)) and "hidden" not in str(wrong)
    assert isinstance(fine, ToolServerConfig)


@pytest.mark.parametrize(("text", "reason"), [("{", "line 1, column 2"), ("[]", 'no object "mcpServers"')])
def test_a_file_that_cannot_be_read_is_refused(text: str, reason: str) -> None:
    configure(text)
    with pytest.raises(SettingsError, match=reason):
        load_servers()


async def test_long_results_are_cut_in_the_middle() -> None:
    async def unknown(_: str) -> None:
        return None

    async def counted(text: str) -> int:
        return len(text)

    async def cut(text: str, free: int | None, count: Count = unknown) -> str:
        return (await shortened(text, free, count))[0]

    assert await cut("short", 0) == "short"
    text = f"begin{'x' * 20_000}end"
    short = await cut(text, 3_000)
    assert short.startswith("begin") and short.endswith("end") and 2_500 < len(short) < 3_100
    assert 900 < len(await cut(text, 3_000, counted)) < 1_100  # a token a character
    for free in (0, 100, 400, 1_000):
        short = await cut(text, free, counted)
        assert short.startswith("begin") and short.endswith("end") and len(short) <= max(free // 2, 200)
    assert len(await cut("x" * 900, 400, counted)) <= 200
    assert await cut(text, 100_000) == text
    assert await cut("a\x1b[2Jb", None) == "a␛[2Jb"
    assert (await shortened(text, 100_000, counted))[1] == len(text)


def test_calls_end_when_they_bring_nothing_new() -> None:
    one, other = ToolCall(name="read"), ToolCall(name="list")
    first, second = ToolResult(text="1"), ToolResult(text="2")
    limits = CallLimits()
    assert not limits.reached([one], [first])
    assert not limits.reached([one], [second])  # such as a state that is asked for again
    assert not limits.reached([other], [first]) and not limits.reached([one], [second])
    assert limits.reached([one], [second]) == "it repeated a call"
    limits = CallLimits()
    said = [limits.reached([one], [ToolResult(text=str(at))]) for at in range(MAX_ROUNDS)]
    assert said[-1] == "it had called tools 20 times" and not any(said[:-1])
    refusals = [limits.refusal(ToolCall(name="read", arguments={"b": at // 3, "a": 1})) for at in range(4)]
    assert [one is not None and one.failed for one in refusals] == [False, False, True, False]


@pytest.mark.parametrize("value", [1 << 64, "\ud83d"])
def test_a_call_that_cannot_be_sent_has_no_arguments(value: object) -> None:
    call = ToolCall(name="read\ud83d", arguments={"at": [value]})
    assert call.problem and call.arguments == {} and call.name == "read?"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=ToolCall) == call
