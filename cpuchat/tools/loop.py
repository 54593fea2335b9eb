"""From a question to its answer with calls of tools in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from cpuchat.protocol import (
    AnyEvent,
    CallDone,
    CallsMade,
    Generate,
    GenerationFinished,
    Message,
    TextDelta,
)
from cpuchat.timings import Timings
from cpuchat.tool_calls import Tool, ToolCall, ToolResult
from cpuchat.tools.approval import Approvals, Choice
from cpuchat.tools.limits import CallLimits, Count, shortened
from cpuchat.tools.toolbox import Toolbox

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
    """Answers with tools of `toolbox`, which it owns. `ask` is called before a call that is not approved yet."""

    def __init__(self, toolbox: Toolbox, approvals: Approvals, ask: Ask) -> None:
        self.toolbox = toolbox
        self._approvals = approvals
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
        """Stream the events of all answers to a request, and of the calls between them.

        `GenerationFinished` of an answer with calls comes before `CallsMade`. Ends with that of an answer without
        calls, one that was stopped, `Failed`, or `CallDone` of a call that was stopped. A model that gets no further
        with calls, or writes nothing after them, answers once more without; the note of that answer says why. `guided`
        tells the model after each round what to do next.
        """
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
                        if made and not why and not self._stopped and _is_empty(event, said):
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
            free = max(last.timings.n_ctx - last.timings.n_past, 0) if last.timings.n_ctx else None
            results = list[ToolResult]()
            for call in calls:
                result = await self._run(call, request.chat_id, limits)
                text, n_tokens = await shortened(result.text, free, count)
                result = msgspec.structs.replace(result, text=text)
                free = max(free - n_tokens, 0) if free is not None else None
                content = (
                    f"{result.text}\n\n{_NEXT}" if guided and call is calls[-1] and not result.failed else result.text
                )
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

    async def _run(self, call: ToolCall, chat_id: str, limits: CallLimits) -> ToolResult:
        """Return the result of a call as the model reads it."""
        tool = await self._until_stopped(self.toolbox.find(call))
        if not isinstance(tool, Tool):
            return tool or _STOPPED
        if (refusal := limits.refusal(call)) is not None:
            return refusal
        if not self._approvals.is_approved(tool, chat_id):
            choice = await self._until_stopped(self._ask(tool, call))
            if choice is None or choice == "refuse":
                return _STOPPED if choice is None else _REFUSED
            if not self.toolbox.has(call, tool):
                return _CHANGED
            self._approvals.remember(tool, chat_id, choice)
        return await self._until_stopped(self.toolbox.run(call)) or _STOPPED

    async def _until_stopped(self, work: Awaitable[T]) -> T | None:
        """Return what `work` returns; None if it is stopped."""
        running = self._running = asyncio.ensure_future(work)
        if self._stopped:  # before it was running
            running.cancel()
        try:
            await asyncio.wait({running})
        finally:
            self._running = None
            running.cancel()  # if the answer is
        return None if running.cancelled() else running.result()


def _is_empty(event: GenerationFinished, said: str) -> bool:
    return event.stop_reason == "end" and not event.calls and not said.strip()


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
    """Return a request to answer from the results so far. They stand in the question: small models imitate calls that
    they see, whether they may call or not.
    """
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
