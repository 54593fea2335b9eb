"""Speaks MCP with a server process, through the package `mcp`. Only the first server that is started imports this."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import anyio
import mcp_types as types
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client import Client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from cpuchat import __version__
from cpuchat.base.text import clean, clean_line
from cpuchat.protocol.messages import Tool, ToolCall, ToolResult
from cpuchat.telemetry.units import size
from cpuchat.tools.loop import MAX_TOOLS
from cpuchat.tools.server_process import ServerEnded, ServerInvalid, ToolServerProcess

_LONGEST_DESCRIPTION = 4_000
_LONGEST_NAME = 128  # characters: modelcontextprotocol.io, specification, server/tools
_FIRST_KEY = re.compile(rb'[\xef\xbb\xbf\s]*[\[{][\s{]*"(?:jsonrpc|id|result)"')
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError)

for _name in ("mcp", "client"):  # which would write to the terminal
    logging.getLogger(_name).addHandler(logging.NullHandler())


class McpSession:
    """An open session, as `open` makes one.

    `changed`: the server says that its tools are others than those read. `has_more`: it has some beyond them.
    """

    def __init__(self, process: ToolServerProcess) -> None:
        self.changed = False
        self.has_more = False
        self._process = process
        self._client: Client
        self._task: asyncio.Task[None]
        self._over = False

    @classmethod
    async def open(cls, process: ToolServerProcess, *, legacy: bool) -> McpSession:
        """Agree on a version of the protocol. Cancelling this leaves no task behind. `legacy`: do not ask for its
        versions first, for which some servers end. Raises ServerEnded, ServerInvalid.
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
        """Return the server's tools; `source` is its name, `origin` as in `Tool`. Raises ServerEnded, ServerInvalid."""
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
            raise self._failure(error) from None
        self.has_more = bool(cursor)
        return tuple(found.values())

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
                    if is_message(line):  # others are prints to the standard output by mistake
                        self._process.fail("it sent a message that is no valid JSON-RPC")
                else:
                    await incoming.send(SessionMessage(message))
            self._over = True

    async def _send(self, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async for item in outgoing:
            self._process.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode())


def _parsed(line: bytes) -> types.JSONRPCMessage:
    """Parse a message; half a surrogate pair (of a cut text) becomes "?". Raises ValueError, RecursionError."""
    try:
        return types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        whole = json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace")
        return types.jsonrpc_message_adapter.validate_json(whole, by_name=False)


def is_message(line: bytes) -> bool:
    """Return whether a line that cannot be parsed was meant as a message: who waits for it is not kept waiting."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return _FIRST_KEY.match(line) is not None and (b'"jsonrpc"' in line or b'"result"' in line)
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and ("jsonrpc" in first or {"id", "result"} <= first.keys())


def _tool(tool: types.Tool, source: str, origin: str) -> Tool:
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
    value = result.structured_content
    if value is not None and not _says(texts, value):
        texts.append(json.dumps(value, ensure_ascii=False))
    return "\n".join(texts) or "(no output)"


def _says(texts: list[str], value: Any) -> bool:
    """Return whether texts are a structured value, as they should be: JSON of it, or of what the package `mcp` wraps in
    `result`. Many servers give a summary only."""
    inner = value["result"] if isinstance(value, dict) and value.keys() == {"result"} else value
    said: list[Any] = [*texts, "\n".join(texts), texts]
    with contextlib.suppress(ValueError, RecursionError):
        values = [json.loads(text) for text in texts]
        said += [*values, values]
    return inner in said


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
