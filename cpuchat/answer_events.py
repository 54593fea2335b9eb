"""From the events of an answer to the message that is stored."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from cpuchat.base.errors import CpuchatError
from cpuchat.chats.history import ChatHistory
from cpuchat.chats.saving import UNSAVED
from cpuchat.protocol.messages import AnyEvent, CallDone, CallsMade, Failed, GenerationFinished, TextDelta, ToolStep


async def put_event(history: ChatHistory, event: AnyEvent, model_name: str) -> bool:
    """Extend the answer by `event`; returns False when the chat no longer has it.

    The figures of an answer with calls of tools, or of one that was continued, are those of all its parts.
    """
    answer = history.answer
    match event:
        case TextDelta(channel="reasoning"):
            return await history.put_answer(reasoning=answer.reasoning + event.text)
        case TextDelta():
            return await history.put_answer(content=answer.content + event.text)
        case GenerationFinished():
            timings = answer.timings.followed_by(event.timings) if answer.timings is not None else event.timings
            goes_on = event.calls and event.stop_reason != "cancelled"  # after the calls
            stop_reason = None if goes_on else event.stop_reason
            return await history.put_answer(stop_reason=stop_reason, timings=timings, model=model_name)
        case CallsMade():
            step = ToolStep(said=event.said, reasoning=event.reasoning, calls=event.calls)
            return await history.put_answer(steps=(*answer.steps, step), content="", reasoning="")
        case CallDone() if answer.steps:
            *before, step = answer.steps
            step = msgspec.structs.replace(step, results=(*step.results, event.result))
            return await history.put_answer(steps=(*before, step))
        case Failed():
            if event.alone and not answer.steps:
                await _mark_refused(history, event.code)
            return await history.put_answer(stop_reason=event.code)
    return await history.put_answer()


def advised(event: AnyEvent, history: ChatHistory) -> AnyEvent:
    """Return `event`; how to send less of a file is added to the hint if a message with one is too long."""
    if not isinstance(event, Failed) or not event.alone or (asked := history.question) is None:
        return event
    if not any(attachment.mark.startswith("@") for attachment in asked.attachments):
        return event
    hint = f"{event.hint} Of a file, attach only the lines you need: @file:10-80."
    return msgspec.structs.replace(event, hint=hint.strip())


async def _mark_refused(history: ChatHistory, code: str) -> None:
    """Keep with the question that it is too long, so that `request_messages` does not send it with the next one."""
    asked, chat = history.question, history.chat
    if asked is None or asked.id == UNSAVED or chat is None:
        return
    with contextlib.suppress(CpuchatError):  # no store, or a full disk: it is known until the chat is closed
        version = await asyncio.to_thread(history.store.update_message, asked.id, stop_reason=code)
        if version == chat.version + 1:  # else another instance changed the chat too, which the next change finds
            history.chat = msgspec.structs.replace(chat, version=version)
    history.messages = [
        msgspec.structs.replace(one, stop_reason=code) if one.id == asked.id else one for one in history.messages
    ]
