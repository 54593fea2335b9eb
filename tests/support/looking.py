"""MCP servers with a tool `look`, which only reads; see `hostile_server` for their ways."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cpuchat.base import paths
from cpuchat.protocol.messages import ToolCall
from cpuchat.tools.config import ToolServerConfig

LOOK = ToolCall(name="look", arguments={"path": "notes.md"})


def server_config(folder: Path, way: str = "noise") -> ToolServerConfig:
    """Return a server that writes its PIDs to a file in `folder`."""
    script = str(Path(__file__).with_name("hostile_server.py"))
    return ToolServerConfig(command=sys.executable, args=("-I", "-S", script, way, str(folder / way)))


def configure(folder: Path, *ways: str, **others: object) -> None:
    """Write mcp.json with servers that have the names of their ways, and others as they are."""
    servers: dict[str, object] = {}
    for way in ways:
        config = server_config(folder, way)
        servers[way] = {"command": config.command, "args": config.args}
    file = paths.tool_servers_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"mcpServers": servers | others}))
