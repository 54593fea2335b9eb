"""The MCP servers of mcp.json: started when their tools are wanted, and again after they have ended."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
from typing import TYPE_CHECKING, Literal

import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import ToolServerFailed
from cpuchat.base.text import clean_line
from cpuchat.protocol.messages import Tool, ToolCall, ToolResult
from cpuchat.tools.config import START_SECONDS, ToolServerConfig

if TYPE_CHECKING:
    from cpuchat.tools.mcp_client import McpSession

State = Literal["stopped", "starting", "running", "failed"]
_LONGEST_REASON = 300


class ToolServer:
    """One server. Use it from one event loop. `timeout`: seconds of one call. `tools`: those that it offered when it
    ran last. `problem`: why it does not run; None when nothing is wrong."""

    def __init__(self, name: str, server: ToolServerConfig) -> None:
        self.name = name
        self.timeout = server.timeout
        self.tools: tuple[Tool, ...] = ()
        self.problem: ToolServerFailed | None = None
        self.log = paths.log_dir() / f"tools-{name}.log"
        self._server = server
        told = msgspec.json.encode([server.command, server.args, server.cwd, server.env], order="sorted")
        self._origin = hashlib.sha256(told).hexdigest()[:16]
        self._session: McpSession | None = None
        self._busy = asyncio.Lock()  # starting, or closing
        self._closed = False

    @property
    def state(self) -> State:
        if self._session is not None and self._session.alive:
            return "running"
        if self._busy.locked():
            return "starting"
        return "failed" if self.problem is not None else "stopped"

    @property
    def has_more(self) -> bool:
        """Return whether it has tools beyond `tools`: reading ends where there are enough to offer."""
        return self._session is not None and self._session.has_more

    async def ready(self) -> None:
        """Start the server unless it runs, and read its tools if they have changed. Raises ToolServerFailed: it cannot
        be started, or does not speak MCP; or the extra is not installed."""
        async with self._busy:
            session = self._session
            try:
                if session is not None and session.alive and session.changed:
                    async with asyncio.timeout(START_SECONDS):
                        self.tools = await session.tools(self.name, self._origin)
                if session is not None and session.alive:
                    return
            except (ToolServerFailed, TimeoutError):
                pass  # it is started again
            try:
                await self._start()
            except ToolServerFailed as error:
                self.problem = error
                raise
            self.problem = None

    async def run(self, call: ToolCall) -> ToolResult:
        session = self._session
        if session is None:
            return ToolResult(text=f"The MCP server {self.name} was not started.", failed=True)
        try:
            return await session.call(call)
        except ToolServerFailed as error:
            self.problem = self._failure(error.reason)
            return ToolResult(text=f"{self.problem.message} The next call restarts it.", failed=True)
        except asyncio.CancelledError:  # it may go on with the call
            session.end(now=True)
            raise

    async def close(self) -> None:
        """End the server for good."""
        self._closed = True
        if self._session is not None:
            self._session.end()  # so that a start ends, too
        async with self._busy:
            await self._end()

    async def _start(self) -> None:
        """Connect, or connect again. Raises ToolServerFailed: with the reason alone."""
        try:  # the first import takes a second
            client = await asyncio.to_thread(importlib.import_module, "cpuchat.tools.mcp_client")
        except ImportError as error:
            raise ToolServerFailed(
                f"MCP servers need the extra `tools` ({error}).",
                'Run `uv tool install ".[tools]"` in the checkout of cpuchat.',
            ) from None
        await self._end()
        try:
            self._session = session = await client.McpSession.start(self._server, self.log)
            async with asyncio.timeout(START_SECONDS):
                if not self._closed:
                    await session.connect()
                    self.tools = await session.tools(self.name, self._origin)
                    return
            problem = "was closed"
        except TimeoutError:
            problem = f"gave no answer within {START_SECONDS:.0f} s"
        except ToolServerFailed as error:
            problem = error.reason
        except OSError as error:
            problem = f"cannot be started: {error.filename or self._server.command}: {error.strerror}"
        except ValueError as error:
            problem = f"cannot be started: {error}"
        except BaseException:
            if self._session is not None:
                self._session.end(now=True)
            raise
        await self._end()
        raise self._failure(problem)

    async def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await asyncio.wait({session.end()})

    def _failure(self, what: str) -> ToolServerFailed:
        reason = f"{clean_line(what)[:_LONGEST_REASON]}."
        places = [paths.tool_servers_file()]
        with contextlib.suppress(OSError):
            if self.log.stat().st_size:
                places.append(self.log)
        hint = f"See {' and '.join(map(paths.shown, places))}."
        return ToolServerFailed(f"The MCP server {self.name} {reason}", hint, reason)
