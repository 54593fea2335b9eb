"""Tools on the command line: which are offered, asking before each call, and `cpuchat tools`, which lists servers."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from cpuchat.base import paths
from cpuchat.base.errors import Interrupted, SettingsError, UsageError
from cpuchat.base.text import clean_line
from cpuchat.cli.options import Decorator, stacked
from cpuchat.cli.output import error_json, print_json
from cpuchat.cli.terminal import columns, is_terminal
from cpuchat.present.table import table

if TYPE_CHECKING:
    from cpuchat.cli.session import Session
    from cpuchat.cli.terminal import TerminalOutput
    from cpuchat.protocol.messages import Tool, ToolCall
    from cpuchat.session.conversation import Conversation
    from cpuchat.tools.config import ToolServerConfig
    from cpuchat.tools.loop import Choice, ToolLoop, ToolSource
    from cpuchat.tools.servers import ToolServer


_CHOICES: Final[dict[str, Choice]] = {"y": "once", "yes": "once", "a": "chat"}


def tools_options() -> Decorator:
    return stacked(
        click.option(
            "--tools",
            "tool_servers",
            multiple=True,
            metavar="NAME",
            help="Let the model call tools of this MCP server in mcp.json, or of `all`; each call needs your approval.",
        ),
        click.option(
            "--tools-folder",
            metavar="DIR",
            help="Let the model read, list and search files in this folder; each call needs your approval.",
        ),
        click.option("--allow-tools", is_flag=True, help="Do not ask before calls of tools that only read."),
    )


def tools_of(values: Mapping[str, Any], terminal: TerminalOutput, *, raw: bool, has_form: bool) -> ToolLoop | None:
    """Return what the options offer to the model; None: nothing. Raises UsageError."""
    folder, names, is_allowed = values["tools_folder"], values["tool_servers"], values["allow_tools"]
    if folder is None and not names:
        if is_allowed:
            raise UsageError("--allow-tools without tools.", "Name a folder with --tools-folder, or leave it out.")
        return None
    flag = "--tools-folder" if folder is not None else "--tools"
    if raw:
        raise UsageError(f"{flag} cannot be used with --raw, which skips the chat template.", "Leave one out.")
    if has_form:
        raise UsageError(
            f"{flag} cannot be used with --json-schema or --grammar: tool calls have their own format.",
            "Leave one out.",
        )
    return tool_loop(folder, names, terminal, is_allowed=is_allowed, remedy=" (--allow-tools allows it)")


def tool_loop(
    folder: str | None,
    names: Sequence[str],
    terminal: TerminalOutput,
    read_line: Callable[[], Awaitable[str]] | None = None,
    *,
    is_allowed: bool = False,
    remedy: str = "",
) -> ToolLoop | None:
    """Return the built-in tools in a folder and those of servers, None for neither. Raises UsageError, SettingsError.

    Args:
        names: of servers of mcp.json; `all` is all that are valid, with a warning about others.
        read_line: returns what the user answers; None reads standard input.
        is_allowed: calls are not asked for.
        remedy: added where nobody can be asked about a tool that only reads.
    """
    if folder is None and not names:
        return None
    from cpuchat.tools.folder import Folder
    from cpuchat.tools.loop import Approvals, FolderSource, Toolbox, ToolLoop
    from cpuchat.tools.servers import ToolServer

    async def ask(tool: Tool, call: ToolCall) -> Choice:
        if is_allowed and tool.read_only:
            return "once"
        return await _asked(terminal, tool, call, read_line or _line, remedy if tool.read_only else "")

    servers = servers_wanted(names) if names else {}
    sources: list[ToolSource] = []
    if folder is not None:  # first, as in the app: it keeps its tools beside a server that has very many
        sources.append(FolderSource(Folder(paths.expanded(folder))))
    for name, server in servers.items():
        if isinstance(server, SettingsError):
            terminal.warn(f"cpuchat: {server}")
        else:
            sources.append(ToolServer(name, server))
    return ToolLoop(Toolbox(sources), Approvals(paths.approvals_file()), ask)


def servers_wanted(names: Sequence[str]) -> dict[str, ToolServerConfig | SettingsError]:
    """Return what `servers_named` does, for use: a server that is asked for by its name has to be valid. Raises
    SettingsError, UsageError: as `servers_named`; or such a server, or all of them, are not valid.
    """
    servers = servers_named(names)
    errors = [one for one in servers.values() if isinstance(one, SettingsError)]
    if errors and ("all" not in names or len(errors) == len(servers)):
        raise errors[0]
    return servers


def servers_named(names: Sequence[str]) -> dict[str, ToolServerConfig | SettingsError]:
    """Return the servers of mcp.json with these names (none, or `all`: all of them); the error of one not valid. Raises
    SettingsError, UsageError: mcp.json cannot be read, or has no such server.
    """
    from cpuchat.tools.config import load_servers

    servers = load_servers()
    if not servers:
        file = paths.shown(paths.tool_servers_file())
        raise UsageError(f"There are no MCP servers in {file}.", "See docs/tools.md, or cpuchat tools --help.")
    if "all" in names:
        return servers
    for name in names:
        if name not in servers:
            raise UsageError(f"There is no MCP server {clean_line(name)}.", f"Known: {clean_line(', '.join(servers))}.")
    return {name: servers[name] for name in names or servers}


async def start_tools(
    tools: ToolLoop | None, conversation: Conversation, terminal: TerminalOutput, session: Session | None = None
) -> None:
    """Make all tools ready, and give them to the conversation, which gives them up. Say which are left out. Raises
    ToolServerFailed: a server cannot be started; Interrupted: Ctrl+C, which `session` tells.
    """
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
    from cpuchat.tools.servers import ToolServer

    box = tools.toolbox
    servers = [(one, box.offered(one)) for one in box.sources if isinstance(one, ToolServer)]
    if text := left_out(servers):
        terminal.warn(f"cpuchat: {text}")


async def _asked(
    terminal: TerminalOutput, tool: Tool, call: ToolCall, read_line: Callable[[], Awaitable[str]], remedy: str
) -> Choice:
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
    return _CHOICES.get((await read_line()).strip().lower(), "refuse")


async def _line() -> str:
    """Return the next line of standard input. Can be cancelled."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str] = loop.create_future()
    descriptor = sys.stdin.fileno()
    loop.add_reader(descriptor, lambda: line.done() or line.set_result(sys.stdin.readline()))
    try:
        return await line
    finally:
        loop.remove_reader(descriptor)


_EPILOG = """\b
Examples:
  cpuchat tools            start the servers of mcp.json, and list their tools
  cpuchat tools files      only this server
  cpuchat ask --tools files "Where is the port of the server set?"

\b
mcp.json is in the config folder (~/.config/cpuchat), in the form that other programs use:
  {"mcpServers": {"files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "/srv"]}}}

Exit codes: 0 all of them run, 2 wrong usage, or mcp.json or a server in it is not valid, 25 a server could not be
started or used, 1 anything else."""


@click.command(epilog=_EPILOG, short_help="List the tools of MCP servers.")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def tools(names: tuple[str, ...], as_json: bool) -> int:
    """Start the MCP servers of mcp.json, or those called NAME, list their tools, and end them."""
    from cpuchat.present.tools import server_state
    from cpuchat.tools.loop import Toolbox
    from cpuchat.tools.servers import ToolServer

    listed = {
        name: one if isinstance(one, SettingsError) else ToolServer(name, one)
        for name, one in servers_named(names).items()
    }

    async def run() -> None:
        box = Toolbox([one for one in listed.values() if isinstance(one, ToolServer)])
        try:
            await box.start()
            if as_json:
                print_json({"servers": [_fields(name, one) for name, one in listed.items()]})
                return
            for name, one in listed.items():
                if isinstance(one, ToolServer):
                    state, problem, lines = server_state(one, box.offered(one)), one.problem, _tool_lines(one)
                else:
                    state, problem, lines = f"invalid: {one.message}", one, list[str]()
                click.echo(f"{clean_line(name)}: {state}")
                if problem is not None:
                    click.echo(f"  {problem.hint}")
                for line in lines:
                    click.echo(line)
        finally:
            await box.close()

    asyncio.run(run())
    problems = (one.problem if isinstance(one, ToolServer) else one for one in listed.values())
    return next((problem.exit_code for problem in problems if problem is not None), 0)


def _tool_lines(server: ToolServer) -> list[str]:
    rows: list[tuple[str, str, str]] = []
    for tool in server.tools:
        says = "reads only" if tool.read_only else ""
        rows.append((f"  {tool.name}", says, tool.description.partition("\n")[0].partition(". ")[0]))
    return table([("  tool", "says", "description"), *rows], width=columns()) if rows else []


def _fields(name: str, server: ToolServer | SettingsError) -> dict[str, Any]:
    if isinstance(server, SettingsError):
        return {"name": name, "state": "invalid", "tools": [], **error_json(server)}
    shown = [
        {"name": tool.name, "description": tool.description, "read_only": tool.read_only, "parameters": tool.parameters}
        for tool in server.tools
    ]
    problem = error_json(server.problem) if server.problem is not None else {}
    return {"name": name, "state": server.state, "tools": shown, **problem}
