"""From a question to its answer with calls of tools in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from cpuchat.errors import UsageError
from cpuchat.protocol import (
    AnyEvent,
    CallDone,
    CallsMade,
    Failed,
    Generate,
    GenerationFinished,
    Message,
    TextDelta,
)
from cpuchat.tool_calls import Tool, ToolCall, ToolResult
from cpuchat.tools.approval import Approvals, Choice
from cpuchat.tools.limits import CallLimits, Count, shortened
from cpuchat.tools.toolbox import Toolbox

T = TypeVar("T")
Ask = Callable[[Tool, ToolCall], Awaitable[Choice]]
"""Shows a call with its arguments to the user and returns what they choose."""
_REFUSED = ToolResult(text="The user refused this call. Go on without it, or ask.", failed=True, ended="refused")
_STOPPED = ToolResult(text="The user stopped this call.", failed=True, ended="stopped")
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
        self, generate: Callable[[Generate], AsyncGenerator[AnyEvent, None]], request: Generate, count: Count
    ) -> AsyncGenerator[AnyEvent, None]:
        """Stream the events of all answers to a request, and of the calls between them.

        `GenerationFinished` of an answer with calls comes before `CallsMade`. Ends with that of an answer without
        calls, one that was stopped, `Failed`, or `CallDone` of a call that was stopped.
        """
        limits, self._stopped = CallLimits(), False
        self.toolbox.collect()
        request = msgspec.structs.replace(request, tools=self.toolbox.tools)
        while True:
            said, reasoning, last = "", "", None
            async with contextlib.aclosing(generate(request)) as events:
                async for event in events:
                    if isinstance(event, TextDelta):
                        said += event.text if event.channel == "answer" else ""
                        reasoning += event.text if event.channel == "reasoning" else ""
                    last = event
                    yield event
            if not isinstance(last, GenerationFinished) or not last.calls or last.stop_reason == "cancelled":
                return
            try:
                limits.next_round()
            except UsageError as error:
                yield Failed(code=error.code, message=error.message, hint=error.hint, request_id=last.request_id)
                return
            calls = tuple(_with_id(call, index, len(request.messages)) for index, call in enumerate(last.calls))
            yield CallsMade(request_id=last.request_id, said=said, reasoning=reasoning, calls=calls)
            messages = [*request.messages, Message(role="assistant", content=said, reasoning=reasoning, calls=calls)]
            free = max(last.timings.n_ctx - last.timings.n_past, 0) if last.timings.n_ctx else None
            for call in calls:
                result = await self._run(call, request.chat_id, limits)
                text, n_tokens = await shortened(result.text, free, count)
                result = msgspec.structs.replace(result, text=text)
                free = max(free - n_tokens, 0) if free is not None else None
                messages.append(Message(role="tool", content=result.text, call_id=call.id, tool=call.name))
                yield CallDone(request_id=last.request_id, call=call, result=result)
                if self._stopped:
                    return
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


def _with_id(call: ToolCall, index: int, n_messages: int) -> ToolCall:
    """Return a call with an id; nine letters and digits, as some templates insist."""
    is_one = call.id.isalnum() and len(call.id) == 9
    return call if is_one or ":" in call.id else msgspec.structs.replace(call, id=f"c{n_messages:05}{index:03}"[:9])
