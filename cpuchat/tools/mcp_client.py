"""Speaks MCP with a server process, through the package `mcp`. Only the first server that is started imports this.

The process of an MCP server: in a group of its own, read in lines within limits, ended with all that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import anyio
import mcp_types as types
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client import Client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from cpuchat import __version__
from cpuchat.base.processes import exit_reason
from cpuchat.base.text import clean, clean_line
from cpuchat.protocol.messages import Tool, ToolCall, ToolResult
from cpuchat.telemetry.units import size
from cpuchat.tools.config import Server
from cpuchat.tools.loop import LONGEST_MESSAGE, MOST_BYTES, MOST_MESSAGES, MOST_TOOLS

if TYPE_CHECKING:
    import psutil


_MARK = "CPUCHAT_TOOL_SERVER"  # a variable that tells what a server has started
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
_LOG_BYTES = 1 << 20
_LINE_BYTES = 1_000  # of the last line, which may tell why it ended
_CLOSING_SECONDS = 0.5
"""Seconds that a server gets to exit when its standard input is closed, as the protocol has it."""
_ENDING_SECONDS = 1.0
"""Seconds between SIGTERM and SIGKILL."""


class ServerEnded(Exception):
    """The server has ended, or closed its output; its process knows why."""


class ServerInvalid(Exception):
    """What the server sent is not MCP, or an error."""


class ServerProcess(asyncio.SubprocessProtocol):
    """A running server, as `start` makes one. Use it from one event loop only.

    `fault` is the rule that it broke, for which it was ended; "": none. `n_messages` counts the lines of its output
    since `begin_call`.
    """

    def __init__(self, log: BinaryIO | None) -> None:
        self.fault = ""
        self.n_messages = 0
        self._n_bytes = 0
        self._rest = b""
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._log = log
        self._log_bytes = 0
        self._said = b""
        self._status: int | None = None
        self._exited = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._mark = secrets.token_hex(8)
        self._transport: asyncio.SubprocessTransport

    @classmethod
    async def start(cls, server: Server, log: Path) -> ServerProcess:
        """Start a server; what it writes to its standard error goes to `log`, a megabyte at most.

        Raises:
            OSError: there is no such command or folder.
            ValueError: an argument has a NUL.
        """
        file = _opened(log)
        process = cls(file)
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: process, server.command, *server.args,
                env=server.environment() | {_MARK: process._mark}, cwd=server.cwd or None, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            if file is not None:
                file.close()
            raise
        return process

    @property
    def alive(self) -> bool:
        """Return whether it runs and is not being ended."""
        return self._status is None and self._ending is None

    def begin_call(self) -> None:
        """Count what it writes from here on."""
        self._n_bytes = self.n_messages = 0

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield what it writes, until it ends or breaks a limit."""
        while (line := await self._lines.get()) is not None and not self.fault:
            yield line

    def write(self, line: bytes) -> None:
        """Queue a line for it. What is written to a server that has ended is dropped."""
        pipe = cast("asyncio.WriteTransport | None", self._transport.get_pipe_transport(0))
        if pipe is not None and not pipe.is_closing():
            pipe.write(line + b"\n")

    def log(self, data: bytes) -> None:
        """Keep what it wrote that is no message."""
        if line := data.rstrip().rpartition(b"\n")[2]:
            self._said = line[:_LINE_BYTES]
        if self._log is None or self._log.closed or self._log_bytes >= _LOG_BYTES:
            return
        with contextlib.suppress(OSError):
            self._log_bytes += self._log.write(data[: _LOG_BYTES - self._log_bytes])

    def fail(self, fault: str) -> None:
        """End it for a rule that it broke."""
        self.fault, self._rest = fault, b""
        self._lines.put_nowait(None)
        self.end(now=True)

    async def failure(self) -> str:
        """Return why it has ended, once it has; it is ended if it has only closed its output."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), _CLOSING_SECONDS)
        if self.fault or self._status is None:
            await self.end()
            return self.fault or "it closed its output"
        return exit_reason(self._status, "", self._said.decode("utf-8", "replace").strip().rstrip("."))

    def end(self, *, now: bool = False) -> asyncio.Task[None]:
        """End it and all that it started; `now`: in the middle of a call. Returns what to wait for."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(now))
        return self._ending

    async def _end(self, now: bool) -> None:
        started = _descendants(self._transport.get_pid()) if self._status is None else []
        stdin = self._transport.get_pipe_transport(0)
        if stdin is not None:
            stdin.close()
        if now or not await self._exits_within(_CLOSING_SECONDS):
            self._signal_group(signal.SIGTERM)
            await self._exits_within(_ENDING_SECONDS)
        self._signal_group(_KILL)
        await self._exits_within(_ENDING_SECONDS)
        await asyncio.to_thread(_kill, self._mark, started)
        self._transport.close()
        if self._log is not None:
            self._log.close()

    async def _exits_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), seconds)
        return self._exited.is_set()

    def _signal_group(self, number: int) -> None:
        if self._status is not None:  # its number may be that of another group by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if sys.platform == "win32":
                self._transport.kill()
            else:
                os.killpg(self._transport.get_pid(), number)

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self.log(data)
        elif not self.fault:
            self._receive(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self._lines.put_nowait(None)

    def process_exited(self) -> None:
        self._signal_group(_KILL)  # what it has left behind
        with contextlib.suppress(RuntimeError):  # the loop is being closed
            asyncio.get_running_loop().run_in_executor(None, _kill, self._mark)
        self._status = self._transport.get_returncode()
        self._exited.set()

    def _receive(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._n_bytes += len(data)
        self.n_messages += len(lines)
        if max(map(len, (*lines, self._rest))) > LONGEST_MESSAGE:
            return self.fail(f"it wrote more than {size(LONGEST_MESSAGE)} in one message")
        if self._n_bytes > MOST_BYTES:
            return self.fail(f"it wrote more than {size(MOST_BYTES)}")
        if self.n_messages > MOST_MESSAGES:
            return self.fail(f"it sent more than {MOST_MESSAGES:,} messages")
        for line in lines:
            if line.strip():
                self._lines.put_nowait(line)


def _descendants(pid: int) -> list[psutil.Process]:
    import psutil  # slow

    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _kill(mark: str, started: Sequence[psutil.Process] = ()) -> None:
    """Kill what a server has started in other sessions: `started`, and what has inherited its mark. One that dropped
    the mark and whose parent has ended is not found.
    """
    import psutil

    for process in (*started, *psutil.process_iter()):
        with contextlib.suppress(psutil.Error, OSError):
            if process in started or process.environ().get(_MARK) == mark:
                process.kill()


def _opened(log: Path) -> BinaryIO | None:
    """Return a new log; None where none can be written. One that another instance writes is left to it."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        log.unlink(missing_ok=True)
        return log.open("xb", buffering=0)
    except OSError:
        return None


_LONGEST_DESCRIPTION = 4_000
_LONGEST_NAME = 128  # characters: modelcontextprotocol.io, specification, server/tools
_FIRST_KEY = re.compile(rb'[\xef\xbb\xbf\s]*[\[{][\s{]*"(?:jsonrpc|id|result)"')
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError)

for _name in ("mcp", "client"):  # which would write to the terminal
    logging.getLogger(_name).addHandler(logging.NullHandler())


class Connection:
    """An open session, as `open` makes one.

    `changed`: the server says that its tools are others than those read. `has_more`: it has some beyond them.
    """

    def __init__(self, process: ServerProcess) -> None:
        self.changed = False
        self.has_more = False
        self._process = process
        self._client: Client
        self._task: asyncio.Task[None]
        self._over = False

    @classmethod
    async def open(cls, process: ServerProcess, *, legacy: bool) -> Connection:
        """Agree on a version of the protocol. Cancelling this leaves no task behind.

        Args:
            legacy: do not ask for its versions first, for which some servers end.

        Raises:
            ServerEnded, ServerInvalid
        """
        self = cls(process)
        opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(opened, "legacy" if legacy else "auto"))
        try:
            self._client = await opened
        except Exception as error:
            raise self._failure(error) from None
        finally:
            if not opened.done() or opened.cancelled() or opened.exception() is not None:
                await self.close()
        return self

    @property
    def alive(self) -> bool:
        return not self._over and self._process.alive

    async def close(self) -> None:
        """End the session; the process goes on."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def tools(self, source: str, origin: str) -> tuple[Tool, ...]:
        """Return the tools of the server, which is called `source`; `origin` as in `Tool`.

        Raises:
            ServerEnded, ServerInvalid
        """
        self.changed = False
        found: list[Tool] = []
        cursor: str | None = None
        try:
            while len(found) < MOST_TOOLS:
                params = types.PaginatedRequestParams(cursor=cursor) if cursor else None
                page = await self._client.session.send_request(
                    types.ListToolsRequest(params=params), types.ListToolsResult
                )
                found += [_tool(tool, source, origin) for tool in page.tools]
                cursor = page.next_cursor
                if not cursor:
                    break
        except Exception as error:
            raise self._failure(error) from None
        self.has_more = bool(cursor)
        return tuple(found)

    async def call(self, call: ToolCall) -> ToolResult:
        """Run a call; what the server finds wrong with it is in the result. Raises ServerEnded.

        The result is not compared with the schema that the tool has for it: a pattern in there may take forever.
        """
        params = types.CallToolRequestParams(name=call.name, arguments=call.arguments)
        try:
            result = await self._client.session.send_request(types.CallToolRequest(params=params), types.CallToolResult)
        except Exception as error:
            failure = self._failure(error)
            if isinstance(failure, ServerEnded):
                raise failure from None
            return ToolResult(text=str(failure), failed=True)
        return ToolResult(text=_text(result), failed=result.is_error)

    def _failure(self, error: Exception) -> Exception:
        if not self.alive:
            return ServerEnded()
        if isinstance(error, MCPError):
            return ServerInvalid(f"{clean_line(error.message)[:_LONGEST_DESCRIPTION]} (error {error.code})")
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            return ServerInvalid(f"it sent an invalid answer: {where}: {first['msg']}")
        return ServerInvalid(clean_line(str(error)))

    async def _hold(self, opened: asyncio.Future[Client], mode: str) -> None:
        """Keep the session open until `close`; one task has to enter and leave it."""
        info = types.Implementation(name="cpuchat", version=__version__)
        try:
            async with Client(
                self._streams(), mode=mode, cache=None, client_info=info, message_handler=self._notice
            ) as client:
                if not opened.done():
                    opened.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(error)
        finally:
            self._over = True

    async def _notice(self, message: object) -> None:
        self.changed = self.changed or isinstance(message, types.ToolListChangedNotification)

    @contextlib.asynccontextmanager
    async def _streams(self) -> AsyncIterator[Any]:
        """Yield the two streams of messages that the package wants of a transport."""
        incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        pumps = {asyncio.create_task(self._receive(incoming)), asyncio.create_task(self._send(outgoing))}
        try:
            yield read, write
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
            for stream in (incoming, read, write, outgoing):
                stream.close()

    async def _receive(self, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        with incoming, contextlib.suppress(*_GONE):
            async for line in self._process.lines():
                try:
                    message = _parsed(line)
                except (ValueError, RecursionError):
                    self._process.log(line + b"\n")
                    if _is_message(line):  # others are prints to the standard output by mistake
                        self._process.fail("it sent a message that is no valid JSON-RPC")
                else:
                    await incoming.send(SessionMessage(message))
            self._over = True

    async def _send(self, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async for item in outgoing:
            self._process.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode())


def _parsed(line: bytes) -> types.JSONRPCMessage:
    """Parse a message. Half of a surrogate pair, with which a text ends that its server has cut, becomes "?".

    Raises:
        ValueError, RecursionError: it is none.
    """
    try:
        return types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        whole = json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace")
        return types.jsonrpc_message_adapter.validate_json(whole, by_name=False)


def _is_message(line: bytes) -> bool:
    """Return whether a line that cannot be parsed was meant as a message: who waits for it is not kept waiting."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return _FIRST_KEY.match(line) is not None and (b'"jsonrpc"' in line or b'"result"' in line)
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and ("jsonrpc" in first or {"id", "result"} <= first.keys())


def _tool(tool: types.Tool, source: str, origin: str) -> Tool:
    """Convert a tool. Raises ValueError for a name or schema that cannot be used."""
    annotations = tool.annotations
    if len(tool.name) > _LONGEST_NAME:
        raise ValueError(f"a tool has a name of {len(tool.name):,} characters; {_LONGEST_NAME} are allowed")
    try:
        msgspec.msgpack.encode(tool.input_schema)
    except (ValueError, OverflowError, RecursionError):
        raise ValueError(f"the schema of {clean_line(tool.name)[:100]} has a value that cannot be sent") from None
    return Tool(
        name=tool.name,
        description=clean(tool.description or tool.title or "")[:_LONGEST_DESCRIPTION],
        parameters=tool.input_schema,
        source=source,
        origin=origin,
        read_only=annotations is not None and bool(annotations.read_only_hint),
    )


def _text(result: types.CallToolResult) -> str:
    """Return a result as a model reads it: text, and in place of anything else what it was."""
    texts = [text for text in map(_block_text, result.content) if text]
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(texts) or "(no output)"


def _block_text(block: types.ContentBlock) -> str:
    match block:
        case types.TextContent(text=text):
            return text
        case types.EmbeddedResource(resource=types.TextResourceContents(text=text)):
            return text
        case types.EmbeddedResource(resource=types.BlobResourceContents(blob=data, mime_type=kind)):
            return f"[{kind or 'binary data'}, {size(len(data) * 3 // 4)}, not shown]"
        case types.ImageContent(data=data, mime_type=kind) | types.AudioContent(data=data, mime_type=kind):
            return f"[{kind}, {size(len(data) * 3 // 4)}, not shown]"
        case types.ResourceLink(name=name, uri=uri):
            return f"{name}: {uri}"
    return ""
