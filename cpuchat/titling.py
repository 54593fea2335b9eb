"""Names a chat after its first answer: the model writes the title."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from cpuchat.chats.history import request_messages
from cpuchat.chats.records import title_of, written_title
from cpuchat.conversation import Conversation
from cpuchat.models.library.places import is_demo
from cpuchat.protocol.messages import Generate, GenerationFinished, Message, Sampling, TextDelta

_TASK = "Write a title for this conversation, of at most six words and in its language. Write only the title."
_LONGEST = 32  # tokens
_MOST_MESSAGES = 6


def wants_title(conversation: Conversation) -> bool:
    """Return whether the open chat has an answer and still the title that its first message gave it, and the loaded
    model can write a better one: not the demo model, and not a server's, which others may be waiting for.
    """
    chat, messages, model = conversation.chat, conversation.messages, conversation.model
    if chat is None or model is None or model.server or not model.has_template:
        return False
    if not 2 <= len(messages) <= _MOST_MESSAGES or messages[-1].role != "assistant" or not messages[-1].content.strip():
        return False
    return chat.title == title_of(messages[0].content, messages[0].attachments) and not is_demo(Path(model.path))


async def title_chat(conversation: Conversation, is_stopped: Callable[[], bool]) -> bool:
    """Give the open chat a title that the model writes; False when it wrote none, was stopped, or somebody named the
    chat meanwhile. `is_stopped` is asked after `Conversation.stop`, which may come before the worker begins.

    The request continues the chat, so that its KV cache serves this and the next message.

    Raises:
        UsageError: something is running.
        ChatsError: the title could not be saved.
    """
    chat = conversation.chat
    assert chat is not None
    task = Message(role="user", content=_TASK)
    request = Generate(
        messages=(*request_messages(chat.effective_system_prompt, conversation.messages), task),
        sampling=Sampling(temperature=0.0),
        max_tokens=_LONGEST,
        trim=False,
        reasoning=False,
        reasoning_budget=0,
        speculation=conversation.speculation,
        tools=conversation.tools.toolbox.tools if conversation.tools is not None else (),  # they are in the KV cache
    )
    written, is_whole = "", False
    async with contextlib.aclosing(conversation.generate_detached(request)) as events:
        async for event in events:
            if is_stopped():
                await conversation.stop()
            if isinstance(event, TextDelta) and event.channel == "answer":
                written += event.text
            is_whole = isinstance(event, GenerationFinished) and event.stop_reason != "cancelled" and not event.calls
    title = written_title(written)
    history = conversation.history
    if not is_whole or not title or (await history.stored_chat(chat.id)).title != chat.title:
        return False
    await history.rename(chat.id, title)
    return True
