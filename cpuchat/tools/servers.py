"""The MCP servers of mcp.json: started when their tools are wanted, and again after they have ended."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import ToolServerFailed
from cpuchat.base.text import clean_line
from cpuchat.protocol.messages import Tool, ToolCall, ToolResult
from cpuchat.tools.config import ToolServerConfig
from cpuchat.tools.loop import START_SECONDS
from cpuchat.tools.server_process import ServerEnded, ServerInvalid, ToolServerProcess

if TYPE_CHECKING:
    from cpuchat.tools.mcp_client import McpSession

State = Literal["stopped", "starting", "running", "failed"]
_LONGEST_REASON = 300


class ToolServer:
    """One server; see `toolbox.Source`. Use it from one event loop.

    `tools` are those that it offered when it ran last. `problem` is why it does not run; None when nothing is wrong.
    """

    def __init__(self, name: str, server: ToolServerConfig) -> None:
        self.name = name
        self.timeout = server.timeout
        self.tools: tuple[Tool, ...] = ()
        self.problem: ToolServerFailed | None = None
        self.log = paths.log_dir() / f"tools-{name}.log"
        self._server = server
        told = msgspec.json.encode([server.command, server.args, server.cwd, server.env], order="sorted")
        self._origin = hashlib.sha256(told).hexdigest()[:16]
        self._process: ToolServerProcess | None = None
        self._connection: McpSession | None = None
        self._busy = asyncio.Lock()  # starting, or closing
        self._closed = False

    @property
    def state(self) -> State:
        if self._connection is not None and self._connection.alive:
            return "running"
        if self._busy.locked():
            return "starting"
        return "failed" if self.problem is not None else "stopped"

    @property
    def has_more(self) -> bool:
        """Return whether it has tools beyond `tools`: reading ends where there are enough to offer."""
        return self._connection is not None and self._connection.has_more

    async def ready(self) -> None:
        """Start the server unless it runs, and read its tools if they have changed. Raises ToolServerFailed: it cannot
        be started, or does not speak MCP; or the extra is not installed.
        """
        async with self._busy:
            if await self._is_running():
                return
            try:
                await self._start()
            except ToolServerFailed as error:
                self.problem = error
                raise
            self.problem = None

    async def run(self, call: ToolCall) -> ToolResult:
        process, connection = self._process, self._connection
        if process is None or connection is None:
            return self._ended("it was not started")
        process.begin_call()
        try:
            return await connection.call(call)
        except ServerEnded:
            reason = await process.failure()
            self.problem = self._failure(f"ended: {reason}")
            return self._ended(reason)
        except asyncio.CancelledError:  # it may go on with the call
            process.end(now=True)
            raise

    async def close(self) -> None:
        """End the server for good."""
        self._closed = True
        if self._process is not None:
            self._process.end()  # so that a start ends, too
        async with self._busy:
            await self._end()

    async def _is_running(self) -> bool:
        """Return whether it runs; reads its tools again if they have changed."""
        connection = self._connection
        if connection is None or not connection.alive:
            return False
        if connection.changed:
            try:
                async with asyncio.timeout(START_SECONDS):
                    self.tools = await connection.tools(self.name, self._origin)
            except (ServerEnded, ServerInvalid, TimeoutError):
                return False
        return True

    async def _start(self) -> None:
        """Connect, or connect again. Some servers end when they are asked for their versions: those are not asked."""
        client, reason = await _mcp_client(), "was closed"
        for legacy in (False, True):
            await self._end()
            if self._closed:
                break
            self._process = process = await self._spawn()
            if self._closed:  # meanwhile
                break
            try:
                async with asyncio.timeout(START_SECONDS):
                    connection: McpSession = await client.McpSession.open(process, legacy=legacy)
                    self._connection = connection
                    self.tools = await connection.tools(self.name, self._origin)
                return
            except ServerEnded:
                reason = f"ended: {await process.failure()}"
                if process.n_messages or process.fault:
                    break
            except ServerInvalid as error:
                reason = f"cannot be used: {str(error).rstrip('.')}"
                break
            except TimeoutError:
                reason = f"gave no answer within {START_SECONDS:.0f} s"
                break
            except BaseException:
                process.end(now=True)
                raise
        await self._end()
        raise self._failure(reason)

    async def _spawn(self) -> ToolServerProcess:
        try:
            return await ToolServerProcess.start(self._server, self.log)
        except OSError as error:
            what = clean_line(error.filename or self._server.command)
            raise self._failure(f"cannot be started: {what}: {error.strerror}") from None
        except ValueError as error:
            raise self._failure(f"cannot be started: {error}") from None

    async def _end(self) -> None:
        connection, self._connection = self._connection, None
        process, self._process = self._process, None
        with contextlib.ExitStack() as stack:
            if process is not None:
                stack.callback(process.end)  # also when this is cancelled
            if connection is not None:
                await connection.close()
        if process is not None:
            await asyncio.wait({process.end()})

    def _ended(self, reason: str) -> ToolResult:
        text = f"The MCP server {self.name} ended: {clean_line(reason)[:_LONGEST_REASON]}. The next call restarts it."
        return ToolResult(text=text, failed=True)

    def _failure(self, what: str) -> ToolServerFailed:
        reason = f"{clean_line(what)[:_LONGEST_REASON]}."
        places = [paths.tool_servers_file()]
        with contextlib.suppress(OSError):
            if self.log.stat().st_size:
                places.append(self.log)
        hint = f"See {' and '.join(map(paths.shown, places))}."
        return ToolServerFailed(f"The MCP server {self.name} {reason}", hint, reason)


async def _mcp_client() -> Any:
    """Return the module that speaks MCP; the first import takes a second. Raises ToolServerFailed."""
    try:
        return await asyncio.to_thread(importlib.import_module, "cpuchat.tools.mcp_client")
    except ImportError as error:
        raise ToolServerFailed(
            f"MCP servers need the extra `tools` ({error}).",
            'Run `uv tool install ".[tools]"` in the checkout of cpuchat.',
        ) from None
