"""All tools that are offered to a model, whoever has them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from cpuchat.errors import CpuchatError
from cpuchat.text import clean_line
from cpuchat.tool_calls import Tool, ToolCall, ToolResult
from cpuchat.tools.folder import TOOLS, Folder
from cpuchat.tools.limits import CALL_SECONDS, MOST_TOOLS, timed_out

_LONGEST_NAME = 64
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")


class Source(Protocol):
    """Has tools, and runs them. `timeout` is in seconds, for one call."""

    @property
    def tools(self) -> Sequence[Tool]: ...

    @property
    def timeout(self) -> float: ...

    async def ready(self) -> None:
        """Make sure that calls can be run; `tools` may be others afterwards. Raises CpuchatError."""
        ...

    async def run(self, call: ToolCall) -> ToolResult:
        """Run a call of one of `tools`. When it is cancelled, what it started is stopped, or ends soon by itself."""
        ...

    async def close(self) -> None:
        """Give up what it holds; it is not used again."""
        ...


class FolderSource:
    """The built-in tools in a folder; see `Source`.

    A call that is cancelled goes on in its thread, a search for 10 s at most; its result is dropped.
    """

    timeout = CALL_SECONDS

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.tools: Sequence[Tool] = [msgspec.structs.replace(tool, origin=str(folder.path)) for tool in TOOLS]
        """An approval holds for this folder only."""

    async def ready(self) -> None: ...

    async def run(self, call: ToolCall) -> ToolResult:
        return await asyncio.to_thread(self._folder.run, call)

    async def close(self) -> None:
        self._folder.close()


class Toolbox:
    """Offers the tools of several sources under names that are unique and that every template and server takes."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self._owners: dict[str, tuple[Source, Tool]] = {}
        self.tools: tuple[Tool, ...] = ()
        """As they are offered: their names may differ from those of their sources."""
        self.collect()

    async def start(self) -> list[CpuchatError]:
        """Make all sources ready, so that their tools are known; returns why some are not. Can be cancelled."""
        done = await asyncio.gather(*(source.ready() for source in self.sources), return_exceptions=True)
        self.collect()
        for error in done:
            if isinstance(error, BaseException) and not isinstance(error, CpuchatError):
                raise error
        return [error for error in done if isinstance(error, CpuchatError)]

    async def close(self) -> None:
        """Give up the sources."""
        await asyncio.gather(*(source.close() for source in self.sources))

    def collect(self) -> None:
        """Offer what the sources have now."""
        self._owners.clear()
        offered = list[Tool]()
        for source in self.sources:
            for tool in source.tools:
                if len(offered) < MOST_TOOLS:
                    name = self._unique(tool)
                    self._owners[name] = source, tool
                    offered.append(msgspec.structs.replace(tool, name=name))
        self.tools = tuple(offered)

    def offered(self, source: Source) -> list[Tool]:
        """Return those tools of a source that are offered: no more than MOST_TOOLS of all sources are."""
        return [tool for owner, tool in self._owners.values() if owner is source]

    async def find(self, call: ToolCall) -> Tool | ToolResult:
        """Return the tool that a call names, whose source is ready for it; or, of a call that cannot be made, what the
        model is told.
        """
        if (owner := self._owners.get(call.name)) is not None:
            try:
                await owner[0].ready()
            except CpuchatError as error:
                return ToolResult(text=error.message, failed=True)
            self.collect()
        tool = self._owners[call.name][1] if call.name in self._owners else None
        if tool is None:
            known = ", ".join(self._owners)
            return ToolResult(text=f"There is no tool {clean_line(call.name)}, only {known}.", failed=True)
        required = tool.parameters.get("required")
        keys = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
        missing = [key for key in keys if key not in call.arguments]
        if call.problem or missing:
            return ToolResult(text=call.problem or f"Missing arguments: {', '.join(missing)}.", failed=True)
        return tool

    def has(self, call: ToolCall, tool: Tool) -> bool:
        """Return whether a call still means the tool that `find` returned."""
        owner = self._owners.get(call.name)
        return owner is not None and owner[1].fingerprint == tool.fingerprint

    async def run(self, call: ToolCall) -> ToolResult:
        """Run a call whose tool `find` returned; what goes wrong is what the model is told."""
        source, tool = self._owners[call.name]
        try:
            async with asyncio.timeout(source.timeout):
                return await source.run(msgspec.structs.replace(call, name=tool.name))
        except TimeoutError:
            return timed_out(source.timeout)

    def _unique(self, tool: Tool) -> str:
        name = _NOT_IN_NAMES.sub("_", tool.name).strip("_")[:_LONGEST_NAME] or "tool"
        if name in self._owners:
            name = f"{_NOT_IN_NAMES.sub('_', tool.source) or 'other'}_{name}"[:_LONGEST_NAME]
        number, chosen = 1, name
        while chosen in self._owners:
            number += 1
            chosen = f"{name[: _LONGEST_NAME - 4]}_{number}"
        return chosen
