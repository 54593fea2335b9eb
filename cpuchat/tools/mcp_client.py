"""Runs an MCP server and speaks with it, through the package `mcp`. Only the first server that is started imports this.

A server is in a process group of its own, read in lines of limited length, and ended with its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
from asyncio.subprocess import SubprocessStreamProtocol
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import anyio
import mcp_types as types
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client import Client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from cpuchat import __version__
from cpuchat.base.errors import ToolServerFailed
from cpuchat.base.processes import exit_reason, is_set_within, kill_group, last_output
from cpuchat.base.text import clean, clean_line
from cpuchat.protocol.messages import Tool, ToolCall, ToolResult
from cpuchat.telemetry.units import size
from cpuchat.tools.config import KEPT, LONGEST_MESSAGE, MAX_TOOLS, ToolServerConfig

_LONGEST_DESCRIPTION = 4_000
_LONGEST_NAME = 128  # characters: modelcontextprotocol.io, specification, server/tools
_CLOSING_SECONDS = 0.5
"""Seconds that a server gets to exit when its standard input is closed, as the protocol has it."""
_ENDING_SECONDS = 1.0
"""Seconds between SIGTERM and SIGKILL."""
_MESSAGE = re.compile(rb'[\xef\xbb\xbf\s]*[\[{][\s{]*"(?:jsonrpc|id|result)"')
"""What begins a message, by its first key; other lines that cannot be parsed are prints by mistake."""
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError)

for _name in ("mcp", "client"):  # which would write to the terminal
    logging.getLogger(_name).addHandler(logging.NullHandler())


class _Pipes(SubprocessStreamProtocol):
    """The pipes of a server; what it has left behind ends with it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(LONGEST_MESSAGE, loop)
        self.exited = asyncio.Event()
        self.pid = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.pid = cast("asyncio.SubprocessTransport", transport).get_pid()

    def process_exited(self) -> None:
        kill_group(self.pid)
        super().process_exited()
        self.exited.set()


class McpSession:
    """A running server, as `start` makes one, and the session with it after `connect`. Use it from one event loop only.

    `changed`: the server says that its tools are others than those read. `has_more`: it has some beyond them."""

    def __init__(self, transport: asyncio.SubprocessTransport, pipes: _Pipes, log: BinaryIO) -> None:
        self.changed = False
        self.has_more = False
        self._transport, self._pipes, self._log = transport, pipes, log
        self._fault = ""  # the rule that it broke, for which it was ended
        self._over = False  # nothing more comes from it
        self._ending: asyncio.Task[None] | None = None
        self._client: Client
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, server: ToolServerConfig, log: Path) -> McpSession:
        """Start a server, whose errors go to `log`. Raises OSError: no such command or folder; ValueError: a NUL."""
        file, loop = _opened(log), asyncio.get_running_loop()
        environment = {name: os.environ[name] for name in KEPT if name in os.environ} | server.env
        try:
            transport, pipes = await loop.subprocess_exec(
                lambda: _Pipes(loop), server.command, *server.args, stderr=file,
                env=environment, cwd=server.cwd or None, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            file.close()
            raise
        return cls(transport, pipes, file)

    async def connect(self) -> None:
        """Agree on a version of the protocol. Raises ToolServerFailed."""
        opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(opened))
        try:
            self._client = await opened
        except Exception as error:
            raise await self._failure(error) from None

    @property
    def alive(self) -> bool:
        return not self._over and self._ending is None and not self._pipes.exited.is_set()

    def end(self, *, now: bool = False) -> asyncio.Task[None]:
        """End it and its group; `now`: in the middle of a call. Returns what to wait for."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(now))
        return self._ending

    async def tools(self, source: str, origin: str) -> tuple[Tool, ...]:
        """Return the server's tools; `source` is its name, `origin` as in `Tool`. Raises ToolServerFailed."""
        self.changed = False
        found: dict[str, Tool] = {}
        cursor: str | None = None
        try:
            while len(found) < MAX_TOOLS:
                params = types.PaginatedRequestParams(cursor=cursor) if cursor else None
                page = await self._client.session.send_request(
                    types.ListToolsRequest(params=params), types.ListToolsResult
                )
                n_before = len(found)
                found |= {tool.name: _tool(tool, source, origin) for tool in page.tools}
                cursor = page.next_cursor if len(found) > n_before else None  # some servers give the same page for ever
                if not cursor:
                    break
        except Exception as error:
            raise await self._failure(error) from None
        self.has_more = bool(cursor)
        return tuple(found.values())

    async def call(self, call: ToolCall) -> ToolResult:
        """Run a call; what the server finds wrong with it is in the result. Raises ToolServerFailed: it has ended.

        The result is not compared with the schema that the tool has for it: a pattern in there may take forever."""
        params = types.CallToolRequestParams(name=call.name, arguments=call.arguments)
        try:
            result = await self._client.session.send_request(types.CallToolRequest(params=params), types.CallToolResult)
        except Exception as error:
            if not self.alive:
                raise await self._failure(error) from None
            return ToolResult(text=_words(error), failed=True)
        return ToolResult(text=_text(result), failed=result.is_error)

    async def _failure(self, error: Exception) -> ToolServerFailed:
        """Return why the server cannot be used, or why it has ended, once it has."""
        if self.alive:
            return ToolServerFailed(f"cannot be used: {_words(error).rstrip('.')}")
        reason = self._fault or "it closed its output"
        if await is_set_within(self._pipes.exited, _CLOSING_SECONDS) and not self._fault:
            said = ""
            with contextlib.suppress(OSError, ValueError):
                said = last_output(self._log).rpartition("\n")[2].strip().rstrip(".")
            reason = exit_reason(self._transport.get_returncode() or 0, "", said)
        await asyncio.wait({self.end()})
        return ToolServerFailed(f"ended: {reason}")

    async def _hold(self, opened: asyncio.Future[Client]) -> None:
        """Keep the session open until the end; one task has to enter and leave it."""
        info = types.Implementation(name="cpuchat", version=__version__)
        try:
            # The handshake that all servers have: some end when they are asked for their versions first.
            async with Client(
                self._streams(), mode="legacy", cache=None, client_info=info, message_handler=self._notice
            ) as client:
                opened.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(error)
        finally:
            self._over = True
            if not opened.done():  # it was closed meanwhile
                opened.set_exception(EOFError("it was closed"))

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
        assert self._pipes.stdout is not None
        with incoming, contextlib.suppress(*_GONE):
            try:
                while (line := await self._pipes.stdout.readline()) and not self._fault:
                    try:
                        message = _parsed(line)
                    except (ValueError, RecursionError):
                        with contextlib.suppress(OSError):
                            self._log.write(line)
                        if _MESSAGE.match(line):
                            self._fail("it sent a message that is no valid JSON-RPC")
                    else:
                        await incoming.send(SessionMessage(message))
            except ValueError:  # of `readline`
                self._fail(f"it wrote more than {size(LONGEST_MESSAGE)} in one message")
            self._over = True

    async def _send(self, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        assert self._pipes.stdin is not None
        async for item in outgoing:
            if not self._pipes.stdin.is_closing():
                line = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                self._pipes.stdin.write(line.encode() + b"\n")

    def _fail(self, fault: str) -> None:
        """End it for a rule that it broke."""
        self._fault = fault
        self.end(now=True)

    async def _end(self, now: bool) -> None:
        if self._pipes.stdin is not None:
            self._pipes.stdin.close()
        if now or not await is_set_within(self._pipes.exited, _CLOSING_SECONDS):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if sys.platform == "win32":
                    self._transport.kill()
                else:
                    os.killpg(self._pipes.pid, signal.SIGTERM)
            await is_set_within(self._pipes.exited, _ENDING_SECONDS)
        if not self._pipes.exited.is_set():  # its number may be that of another group by then
            kill_group(self._pipes.pid)
            await is_set_within(self._pipes.exited, _ENDING_SECONDS)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._transport.close()
        self._log.close()


def _opened(log: Path) -> BinaryIO:
    """Return a new log, or a place where all is lost. One that another instance writes is left to it."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        log.unlink(missing_ok=True)
        return log.open("a+b", buffering=0)
    except OSError:
        return Path(os.devnull).open("a+b", buffering=0)


def _words(error: Exception) -> str:
    """Return an error of the session in words."""
    if isinstance(error, MCPError):
        return f"{clean_line(error.message)[:_LONGEST_DESCRIPTION]} (error {error.code})"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"it sent an invalid answer: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return clean_line(str(error))


def _parsed(line: bytes) -> types.JSONRPCMessage:
    """Parse a message; half a surrogate pair (of a cut text) becomes "?". Raises ValueError, RecursionError."""
    try:
        return types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        whole = json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace")
        return types.jsonrpc_message_adapter.validate_json(whole, by_name=False)


def _tool(tool: types.Tool, source: str, origin: str) -> Tool:
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
        read_only=bool(tool.annotations and tool.annotations.read_only_hint),
    )


def _text(result: types.CallToolResult) -> str:
    """Return a result as a model reads it: text, in place of anything else what it was, and the structured value unless
    the texts are it: JSON of it, or of what the package `mcp` wraps in `result`. Many servers give a summary only."""
    texts = [text for text in map(_block_text, result.content) if text]
    value = result.structured_content
    if value is not None:
        inner = value["result"] if isinstance(value, dict) and value.keys() == {"result"} else value
        said: list[Any] = [*texts, "\n".join(texts), texts]
        with contextlib.suppress(ValueError, RecursionError):
            values = [json.loads(text) for text in texts]
            said += [*values, values]
        if inner not in said:
            texts.append(json.dumps(value, ensure_ascii=False))
    return "\n".join(texts) or "(no output)"


def _block_text(block: types.ContentBlock) -> str:
    match block:
        case types.TextContent(text=text):
            return text
        case types.EmbeddedResource(resource=types.TextResourceContents(text=text) as source):
            return f"{_in_brackets(source.uri, source.mime_type)}\n{text}"
        case types.EmbeddedResource(resource=types.BlobResourceContents(blob=data) as source):
            return _in_brackets(source.uri, source.mime_type or "binary data", size(len(data) * 3 // 4), "not shown")
        case types.ImageContent(data=data, mime_type=kind) | types.AudioContent(data=data, mime_type=kind):
            return _in_brackets(kind, size(len(data) * 3 // 4), "not shown")
        case types.ResourceLink():
            told = (block.name, block.title, block.description, block.mime_type)
            return _in_brackets("link", block.uri, *told, size(block.size) if block.size else "")
    return ""


def _in_brackets(*facts: str | None) -> str:
    return f"[{', '.join(clean_line(fact) for fact in facts if fact)}]"
