"""From a question to its answer with calls of tools in between.

Here are the tools that are offered to a model, whoever has them, and the limits on what they return and how often they
are called.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from cpuchat.base.errors import CpuchatError
from cpuchat.base.text import clean, clean_line
from cpuchat.protocol.messages import (
    AnyEvent,
    CallDone,
    CallsMade,
    Generate,
    GenerationFinished,
    Message,
    TextDelta,
    Tool,
    ToolCall,
    ToolResult,
)
from cpuchat.protocol.timings import Timings
from cpuchat.tools.config import MAX_TOOLS

if TYPE_CHECKING:
    from cpuchat.tools.servers import ToolServer

Choice = Literal["once", "chat", "refuse"]
Count = Callable[[str], Awaitable[int | None]]
"""Counts the tokens of a text; None: it cannot."""
MAX_ROUNDS = 20
"""Answers with calls to one question."""
_MAX_REPEATS = 2
_MIN_TOKENS = 1_000  # where there is room for them
_ROOM_SHARE = 2  # of a free context that is nearly full: the answer needs some of it, too
_SHORT = 1_000  # bytes
_MIN_KEPT = 100  # characters: about as long as the note of what is missing
_USUAL_TOKENS = 8_000  # of a free context that is not known
_CONTEXT_SHARE = 4  # a result takes at most this fraction of the free context
_CHARACTERS_PER_TOKEN = 3.0  # where they cannot be counted
_LONGEST_TOKEN = 20  # characters; longer ones are spaces


async def shortened(text: str, free_tokens: int | None, count: Count) -> tuple[str, int]:
    """Return a tool's result so that it takes a part of the context only, and its tokens: its beginning and end, with a
    note between. `free_tokens`: of the context; None: not known."""
    free = _USUAL_TOKENS if free_tokens is None else free_tokens
    max_tokens = max(free // _CONTEXT_SHARE, min(_MIN_TOKENS, free // _ROOM_SHARE))
    text = clean(text)
    kept = min(len(text), max(max_tokens * _LONGEST_TOKEN, _MIN_KEPT))
    while True:
        shown = text
        if kept < len(text):
            note = f"\n[… {len(text) - kept:,} of {len(text):,} characters left out …]\n"
            shown = text[: kept - kept // 4] + note + text[-(kept // 4) :]
        if (n_bytes := len(shown.encode())) <= min(_SHORT, max_tokens):  # a token has one at least
            return shown, n_bytes // 3  # not worth asking
        counted = await count(shown)
        tokens = counted if counted is not None else round(len(shown) / _CHARACTERS_PER_TOKEN)
        if tokens <= max_tokens or kept <= _MIN_KEPT:
            return shown, tokens
        kept = max(_MIN_KEPT, min(int(0.95 * kept * max_tokens / tokens), kept - 100))


class CallLimits:
    """Counts the calls of the answers to one question."""

    def __init__(self) -> None:
        self._rounds = 0
        self._made: Counter[tuple[str, str]] = Counter()
        self._last: list[tuple[tuple[str, str], str]] = []

    def reached(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> str:
        """Count an answer with calls. Returns why the next one must do without, in a few words; "": it may call."""
        self._rounds += 1
        before, self._last = self._last, [(_made(call), one.text) for call, one in zip(calls, results, strict=True)]
        if self._last == before or all(self._made[_made(call)] > _MAX_REPEATS for call in calls):
            return "it repeated a call"
        return f"it had called tools {MAX_ROUNDS} times" if self._rounds >= MAX_ROUNDS else ""

    def refusal(self, call: ToolCall) -> ToolResult | None:
        """Return what the model is told in place of a call that it repeats; None: the call may be made."""
        self._made[_made(call)] += 1
        if self._made[_made(call)] <= _MAX_REPEATS:
            return None
        text = f"Not run: {call.name} was called {_MAX_REPEATS} times with these arguments. Use those results."
        return ToolResult(text=text, failed=True)


def _made(call: ToolCall) -> tuple[str, str]:
    return call.name, json.dumps(call.arguments, sort_keys=True)


_LONGEST_NAME = 64
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")


class Toolbox:
    """Offers the tools of several servers under names that are unique and that every template and engine takes."""

    def __init__(self, sources: Sequence[ToolServer]) -> None:
        self.sources = tuple(sources)
        self._owners: dict[str, tuple[ToolServer, Tool]] = {}
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
                if len(offered) >= MAX_TOOLS:
                    break
                name = _NOT_IN_NAMES.sub("_", tool.name).strip("_")[:_LONGEST_NAME] or "tool"
                if name in self._owners:
                    name = f"{_NOT_IN_NAMES.sub('_', tool.source) or 'other'}_{name}"[:_LONGEST_NAME]
                number, first = 1, name
                while name in self._owners:
                    number += 1
                    name = f"{first[: _LONGEST_NAME - 4]}_{number}"
                self._owners[name] = source, tool
                offered.append(msgspec.structs.replace(tool, name=name))
        self.tools = tuple(offered)

    def offered(self, source: ToolServer) -> list[Tool]:
        """Return those tools of a source that are offered: no more than MAX_TOOLS of all sources are."""
        return [tool for owner, tool in self._owners.values() if owner is source]

    async def find(self, call: ToolCall) -> Tool | ToolResult:
        """Return the tool of a call, its source ready; of a call that cannot be made, what the model is told."""
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

    def fingerprint(self, call: ToolCall) -> str:
        return self._owners[call.name][1].fingerprint if call.name in self._owners else ""

    async def run(self, call: ToolCall) -> ToolResult:
        """Run a call whose tool `find` returned; what goes wrong is what the model is told."""
        source, tool = self._owners[call.name]
        try:
            async with asyncio.timeout(source.timeout):
                return await source.run(msgspec.structs.replace(call, name=tool.name))
        except TimeoutError:
            return ToolResult(text=f"The tool was stopped: no result after {source.timeout:.0f} s.", failed=True)


T = TypeVar("T")
Ask = Callable[[Tool, ToolCall], Awaitable[Choice]]
"""Shows a call with its arguments to the user and returns what they choose."""
_REFUSED = ToolResult(text="The user refused this call. Go on without it, or ask.", failed=True, ended="refused")
_STOPPED = ToolResult(text="The user stopped this call.", failed=True, ended="stopped")
_NEXT = "[If this answers the question, answer it now, in words. If not, call another tool.]"
"""Follows a result in the request to a small model: without it, Qwen2.5 Coder 1.5B repeats its call."""
_ANSWER = "Answer the question from this."
_CHANGED = ToolResult(text="Not run: the tool changed after the user was asked. Call it again.", failed=True)


class ToolLoop:
    """Answers with tools of `toolbox`, which it owns. `ask` is called before a call that is not `approved`: for a chat,
    and a tool as it is; one that changes in any way is another one."""

    def __init__(self, toolbox: Toolbox, ask: Ask) -> None:
        self.toolbox = toolbox
        self.approved: set[tuple[str, str]] = set()
        self._ask = ask
        self._running: asyncio.Future[Any] | None = None
        self._stopped = False

    def stop(self) -> None:
        """End the answers with the call that is running, asked about or next."""
        self._stopped = True
        if self._running is not None:
            self._running.cancel()

    async def answer(
        self,
        generate: Callable[[Generate], AsyncGenerator[AnyEvent, None]],
        request: Generate,
        count: Count,
        *,
        guided: bool = False,
    ) -> AsyncGenerator[AnyEvent, None]:
        """Stream the events of all answers to a request, and of the calls between them: `GenerationFinished` of an
        answer with calls, `CallsMade`, `CallDone`. Ends with that of an answer without calls, one that was stopped,
        `Failed`, or `CallDone` of a stopped call. A model that gets no further with calls, or writes nothing after
        them, answers once more without; the note of that answer says why. `guided` tells the model after each round
        what to do next."""
        limits, self._stopped = CallLimits(), False
        self.toolbox.collect()
        asked = request.messages
        request = msgspec.structs.replace(request, tools=self.toolbox.tools)
        made = list[tuple[ToolCall, ToolResult]]()
        why, empty = "", None
        while True:
            said, reasoning, last = "", "", None
            async with contextlib.aclosing(generate(request)) as events:
                async for event in events:
                    if isinstance(event, TextDelta):
                        said += event.text if event.channel == "answer" else ""
                        reasoning += event.text if event.channel == "reasoning" else ""
                    last = event
                    if isinstance(event, GenerationFinished):
                        is_empty = event.stop_reason == "end" and not event.calls and not said.strip()
                        if is_empty and made and not why and not self._stopped:
                            empty = event.timings
                            continue
                        last = event = _after(event, why, empty)
                    yield event
            if empty is not None and not why:
                why = "it wrote nothing after its calls"
                request = _without_tools(request, asked, made)
                continue
            if not isinstance(last, GenerationFinished) or not last.calls or last.stop_reason == "cancelled":
                return
            calls = tuple(_with_id(call, index, len(request.messages)) for index, call in enumerate(last.calls))
            yield CallsMade(request_id=last.request_id, said=said, reasoning=reasoning, calls=calls)
            messages = [*request.messages, Message(role="assistant", content=said, reasoning=reasoning, calls=calls)]
            results = list[ToolResult]()
            async for call, result in self._run_all(calls, request.state.chat, limits, last.timings, count):
                guides = guided and call is calls[-1] and not result.failed
                content = f"{result.text}\n\n{_NEXT}" if guides else result.text
                messages.append(Message(role="tool", content=content, call_id=call.id, tool=call.name))
                results.append(result)
                yield CallDone(request_id=last.request_id, call=call, result=result)
            if self._stopped:
                return
            made += zip(calls, results, strict=True)
            if why := limits.reached(calls, results):
                request = _without_tools(request, asked, made)
            else:
                request = msgspec.structs.replace(request, messages=tuple(messages), tools=self.toolbox.tools)

    async def _run_all(
        self, calls: Sequence[ToolCall], chat_id: str, limits: CallLimits, timings: Timings, count: Count
    ) -> AsyncGenerator[tuple[ToolCall, ToolResult], None]:
        """Yield each call and what it returned, as much as the context has room for; ends with one that was stopped."""
        free = max(timings.n_ctx - timings.n_past, 0) if timings.n_ctx else None
        for call in calls:
            result = await self._run(call, chat_id, limits)
            text, n_tokens = await shortened(result.text, free, count)
            free = max(free - n_tokens, 0) if free is not None else None
            yield call, msgspec.structs.replace(result, text=text)
            if self._stopped:
                return

    async def _run(self, call: ToolCall, chat_id: str, limits: CallLimits) -> ToolResult:
        tool = await self._until_stopped(self.toolbox.find(call))
        if not isinstance(tool, Tool):
            return tool or _STOPPED
        if (refusal := limits.refusal(call)) is not None:
            return refusal
        if (chat_id, tool.fingerprint) not in self.approved:
            choice = await self._until_stopped(self._ask(tool, call))
            if choice is None or choice == "refuse":
                return _STOPPED if choice is None else _REFUSED
            if tool.fingerprint != self.toolbox.fingerprint(call):
                return _CHANGED
            if choice == "chat":
                self.approved.add((chat_id, tool.fingerprint))
        return await self._until_stopped(self.toolbox.run(call)) or _STOPPED

    async def _until_stopped(self, work: Awaitable[T]) -> T | None:
        running = self._running = asyncio.ensure_future(work)
        if self._stopped:  # before it was running
            running.cancel()
        try:
            await asyncio.wait({running})
        finally:
            self._running = None
            running.cancel()  # if the answer is
        return None if running.cancelled() else running.result()


def _after(event: GenerationFinished, why: str, empty: Timings | None) -> GenerationFinished:
    """Return the end of an answer with why it had no tools, and with the figures of an empty one before it."""
    if not why:
        return event
    note = " · ".join(filter(None, (f"answered without tools: {why}", event.note)))
    timings = empty.followed_by(event.timings) if empty is not None else event.timings
    return msgspec.structs.replace(event, note=note, timings=timings, calls=())


def _without_tools(
    request: Generate, asked: Sequence[Message], made: Sequence[tuple[ToolCall, ToolResult]]
) -> Generate:
    """Return a request to answer from the results, which stand in the question: small models imitate calls they see."""
    *before, question = asked
    results = dict.fromkeys((call.name, json.dumps(call.arguments, ensure_ascii=False), one.text) for call, one in made)
    told = (f"{name} {arguments} returned:\n\n{text}" for name, arguments, text in results)
    content = "\n\n".join((question.content, *told, _ANSWER))
    return msgspec.structs.replace(
        request, messages=(*before, msgspec.structs.replace(question, content=content)), tools=()
    )


def _with_id(call: ToolCall, index: int, n_messages: int) -> ToolCall:
    """Return a call with an id; nine letters and digits, as some templates insist."""
    is_one = call.id.isalnum() and len(call.id) == 9
    return call if is_one or ":" in call.id else msgspec.structs.replace(call, id=f"c{n_messages:05}{index:03}"[:9])
