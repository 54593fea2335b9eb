"""`cpuchat tools`: the MCP servers of mcp.json, with their tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cpuchat.cli.output import error_json, json_line
from cpuchat.cli.terminal import columns
from cpuchat.errors import SettingsError
from cpuchat.present.table import table
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.tools.servers import ToolServer

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
    import asyncio

    from cpuchat.cli.tools import servers_named
    from cpuchat.present.tools import server_state
    from cpuchat.tools.servers import ToolServer
    from cpuchat.tools.toolbox import Toolbox

    listed = {
        name: one if isinstance(one, SettingsError) else ToolServer(name, one)
        for name, one in servers_named(names).items()
    }
    servers = [one for one in listed.values() if isinstance(one, ToolServer)]

    async def run() -> None:
        box = Toolbox(servers)
        try:
            await box.start()
            if as_json:
                print(json_line({"servers": [_fields(name, one) for name, one in listed.items()]}))
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
    rows = [
        (
            f"  {tool.name}",
            "reads only" if tool.read_only else "",
            tool.description.partition("\n")[0].partition(". ")[0],
        )
        for tool in server.tools
    ]
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
