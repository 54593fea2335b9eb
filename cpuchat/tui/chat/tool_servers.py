"""MCP servers on the chat screen: started and ended from the command palette."""

from __future__ import annotations

import asyncio
from functools import partial

from textual import work

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, SettingsError, UsageError
from cpuchat.base.text import clean_line
from cpuchat.present.tools import server_state
from cpuchat.tools.config import Server, load_servers
from cpuchat.tools.servers import ToolServer
from cpuchat.tui.chat.calling import CallingScreen
from cpuchat.tui.commands import Palette, Row, listing


class ToolServersScreen(CallingScreen):
    """Base of the chat screen."""

    @work(exclusive=True, group="tools")
    async def action_tool_servers(self) -> None:
        """Choose a server of mcp.json; one that runs is ended."""
        if self.refuse_while_writing("change the tools"):
            return
        with self._telling():
            servers = await asyncio.to_thread(load_servers)
            if not servers:
                file = paths.shown(paths.tool_servers_file())
                raise UsageError(f"There are no MCP servers in {file}.", "docs/tools.md shows the format.")
            rows = listing([self._row(name, config) for name, config in servers.items()])
            self.app.push_screen(Palette(providers=[rows], placeholder="MCP server …"))

    @work(group="tool servers")
    async def start_server(self, name: str, config: Server | SettingsError) -> None:
        """Start a server; the model may call its tools from the next answer on. Of one that is not valid, say why."""
        if isinstance(config, SettingsError):
            self.tell(str(config), "error")
            return
        self.tell(f"Starting the MCP server {name}…")
        server = ToolServer(name, config)
        self.tool_servers[name] = server
        self.offer_tools()  # so that it is ended with the app
        with self._telling():
            try:
                await server.ready()
            except CpuchatError:
                self.tool_servers.pop(name, None)
                if self.is_running:  # not when the app has ended it
                    self.offer_tools()
                raise
            self.offer_tools()
            self.tell_offered(f"MCP server {name}: {self._server_state(server)}. Each call needs your approval.")

    @work(group="tool servers")
    async def end_server(self, name: str) -> None:
        """End a server; the model has its tools no longer."""
        if self.refuse_while_writing("change the tools") or name not in self.tool_servers:
            return
        server = self.tool_servers.pop(name)
        self.offer_tools()
        await server.close()
        self.tell_offered(f"MCP server {name} ended.")

    def _row(self, name: str, config: Server | SettingsError) -> Row:
        running = self.tool_servers.get(name)
        if running is None:
            if isinstance(config, SettingsError):
                return Row(clean_line(name), partial(self.start_server, name, config), about="invalid: see why")
            return Row(name, partial(self.start_server, name, config), about="start")
        return Row(name, partial(self.end_server, name), about=self._server_state(running))

    def _server_state(self, server: ToolServer) -> str:
        return server_state(server, self._toolbox.offered(server))
