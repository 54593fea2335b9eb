"""Tools on the command line: which are offered, and asking before each call."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from cpuchat.base import paths
from cpuchat.base.errors import Interrupted, SettingsError, UsageError
from cpuchat.base.text import clean_line
from cpuchat.cli.output import is_terminal

if TYPE_CHECKING:
    from cpuchat.cli.session import Session
    from cpuchat.cli.terminal import TerminalOutput
    from cpuchat.protocol.messages import Tool, ToolCall
    from cpuchat.session.conversation import Conversation
    from cpuchat.tools.config import ToolServerConfig
    from cpuchat.tools.loop import Choice, ToolLoop


_CHOICES: Final[dict[str, Choice]] = {"y": "once", "yes": "once", "a": "chat"}


def tools_of(values: Mapping[str, Any], terminal: TerminalOutput, *, raw: bool, has_form: bool) -> ToolLoop | None:
    """Return what the options offer to the model; None: nothing. Raises UsageError."""
    names, is_allowed = values["tool_servers"], values["allow_tools"]
    if not names:
        if is_allowed:
            raise UsageError("--allow-tools without tools.", "Name an MCP server with --tools, or leave it out.")
        return None
    if raw:
        raise UsageError("--tools cannot be used with --raw, which skips the chat template.", "Leave one out.")
    if has_form:
        raise UsageError(
            "--tools cannot be used with --json-schema or --grammar: tool calls have their own format.",
            "Leave one out.",
        )
    return tool_loop(names, terminal, is_allowed=is_allowed, remedy=" (--allow-tools allows it)")


def tool_loop(
    names: Sequence[str], terminal: TerminalOutput, *, is_allowed: bool = False, remedy: str = ""
) -> ToolLoop | None:
    """Return the tools of MCP servers, None without any. `names`: of mcp.json; `all` is all that are valid, with a
    warning about others. `is_allowed`: calls are not asked for. `remedy` is added where nobody can be asked about a
    tool that only reads. Raises UsageError, SettingsError."""
    if not names:
        return None
    from cpuchat.tools.loop import Toolbox, ToolLoop
    from cpuchat.tools.servers import ToolServer

    async def ask(tool: Tool, call: ToolCall) -> Choice:
        if is_allowed and tool.read_only:
            return "once"
        return await _ask(terminal, tool, call, remedy if tool.read_only else "")

    sources = list[ToolServer]()
    for name, server in servers_wanted(names).items():
        if isinstance(server, SettingsError):
            terminal.warn(f"cpuchat: {server}")
        else:
            sources.append(ToolServer(name, server))
    return ToolLoop(Toolbox(sources), ask)


def servers_wanted(names: Sequence[str]) -> dict[str, ToolServerConfig | SettingsError]:
    """Return the servers of mcp.json with these names, which have to be valid; `all`: all, or the error of one. Raises
    SettingsError, UsageError: mcp.json cannot be read, or has no such server; it is, or all are, not valid."""
    from cpuchat.tools.config import load_servers

    servers = load_servers()
    if not servers:
        raise UsageError(
            f"There are no MCP servers in {paths.shown(paths.tool_servers_file())}.", "See `cpuchat docs tools`."
        )
    if "all" not in names:
        for name in names:
            if name not in servers:
                known = clean_line(", ".join(servers))
                raise UsageError(f"There is no MCP server {clean_line(name)}.", f"Known: {known}.")
        servers = {name: servers[name] for name in names}
    errors = [one for one in servers.values() if isinstance(one, SettingsError)]
    if errors and ("all" not in names or len(errors) == len(servers)):
        raise errors[0]
    return servers


async def start_tools(
    tools: ToolLoop | None, conversation: Conversation, terminal: TerminalOutput, session: Session | None = None
) -> None:
    """Make all tools ready, and give them to the conversation, which gives them up. Say which are left out. Raises
    ToolServerFailed: a server cannot be started; Interrupted: Ctrl+C, which `session` tells."""
    conversation.tools = tools
    if tools is None:
        return
    starting = asyncio.ensure_future(tools.toolbox.start())
    if session is not None:
        session.on_interrupt = starting.cancel
    try:
        await asyncio.wait({starting})
    finally:
        if session is not None:
            session.on_interrupt = lambda: None
        starting.cancel()  # if this is
    if starting.cancelled():
        raise Interrupted("Stopped before the MCP servers were ready.")
    for problem in starting.result():
        raise problem
    from cpuchat.present.tools import left_out

    if text := left_out([(one, tools.toolbox.offered(one)) for one in tools.toolbox.sources]):
        terminal.warn(f"cpuchat: {text}")


async def _ask(terminal: TerminalOutput, tool: Tool, call: ToolCall, remedy: str) -> Choice:
    """Ask on the terminal, dropping what was typed before; without one, refuse."""
    import termios

    from cpuchat.present import tools as words

    if not is_terminal(sys.stdin) or not is_terminal(sys.stderr):
        terminal.warn(f"cpuchat: {words.title(call)} was refused: no terminal to ask for approval{remedy}.")
        return "refuse"
    columns, rows = shutil.get_terminal_size()
    shown = f"{words.shown_name(call.name)} ({words.owner(tool)})\n{words.arguments(call, max(columns, 20))}"
    n_rows = shown.count("\n") + 1
    termios.tcflush(sys.stdin, termios.TCIFLUSH)
    terminal.warn(shown)
    above = f" {n_rows:,} rows above, from {words.shown_name(call.name)} on." if n_rows >= rows - 1 else ""
    terminal.warn(f"Run it?{above} y: yes, a: yes, and do not ask again for this tool, anything else: no")
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    line: asyncio.Future[str] = loop.create_future()
    loop.add_reader(descriptor, lambda: line.done() or line.set_result(sys.stdin.readline()))
    try:
        said = await line
    finally:
        loop.remove_reader(descriptor)
    return _CHOICES.get(said.strip().lower(), "refuse")
