"""`cpuchat tools`: the MCP servers of mcp.json, with their tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

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

Exit codes: 0 all of them run, 2 wrong usage or mcp.json, 25 a server could not be started or used, 1 anything else."""


@click.command(epilog=_EPILOG, short_help="List the tools of MCP servers.")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def tools(names: tuple[str, ...], as_json: bool) -> int:
    """Start the MCP servers of mcp.json, or those called NAME, list their tools, and end them."""
    import asyncio

    from cpuchat.cli.output import json_line
    from cpuchat.cli.tools import servers_named
    from cpuchat.present.tools import server_state
    from cpuchat.tools.servers import ToolServer
    from cpuchat.tools.toolbox import Toolbox

    servers = [ToolServer(name, server) for name, server in servers_named(names).items()]

    async def run() -> None:
        box = Toolbox(servers)
        try:
            await box.start()
            if as_json:
                print(json_line({"servers": [_fields(server) for server in servers]}))
                return
            for server in servers:
                click.echo(f"{server.name}: {server_state(server)}")
                if server.problem is not None:
                    click.echo(f"  {server.problem.hint}")
                for line in _tool_lines(server):
                    click.echo(line)
        finally:
            await box.close()

    asyncio.run(run())
    return next((server.problem.exit_code for server in servers if server.problem is not None), 0)


def _tool_lines(server: ToolServer) -> list[str]:
    from cpuchat.cli.terminal import columns
    from cpuchat.present.table import table

    rows = [
        (
            f"  {tool.name}",
            "reads only" if tool.read_only else "",
            tool.description.partition("\n")[0].partition(". ")[0],
        )
        for tool in server.tools
    ]
    return table([("  tool", "says", "description"), *rows], width=columns()) if rows else []


def _fields(server: ToolServer) -> dict[str, Any]:
    from cpuchat.cli.output import error_json

    shown = [
        {"name": tool.name, "description": tool.description, "read_only": tool.read_only, "parameters": tool.parameters}
        for tool in server.tools
    ]
    problem = error_json(server.problem) if server.problem is not None else {}
    return {"name": server.name, "state": server.state, "tools": shown, **problem}
