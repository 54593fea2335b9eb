"""Requests about a chat that are no part of it: a summary, so that it fits into the context again, and a title."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

from cpuchat.base.errors import UsageError
from cpuchat.chats.history import request_messages
from cpuchat.chats.records import StoredMessage, title_of, written_title
from cpuchat.models.library.places import is_demo
from cpuchat.protocol.messages import AnyEvent, Failed, Generate, GenerationFinished, Message, Sampling, TextDelta
from cpuchat.session.conversation import Conversation

# Asked for "our conversation", Qwen2.5 Coder 1.5B answered 2 of 6 times that there was none to summarize.
_SUMMARIZE = (
    "Summarize the messages above, so that the conversation can continue from the summary alone. Keep facts, names, "
    "numbers, decisions, code and open questions; leave out greetings and repetitions. Write only the summary."
)
_LONGEST_SUMMARY = 1024  # tokens
_SHARE = 8  # of the context, which a summary has at most
_NAME = "Write a title for this conversation, of at most six words and in its language. Write only the title."
_LONGEST_TITLE = 32  # tokens
_MAX_MESSAGES = 6  # of a chat that is named


def _request(conversation: Conversation, messages: Sequence[StoredMessage], task: str, **more: Any) -> Generate:
    """Return a request that continues the chat with a task, so that the KV cache of the chat serves it."""
    assert conversation.chat is not None
    before = request_messages(conversation.chat.effective_system_prompt, messages)
    tools = conversation.tools
    return Generate(
        messages=(*before, Message(role="user", content=task)),
        reasoning=False,
        reasoning_budget=0,
        speculation=conversation.speculation,
        tools=tools.toolbox.tools if tools is not None else (),  # they are in the KV cache
        **more,
    )


async def compact(conversation: Conversation) -> AsyncGenerator[AnyEvent, None]:
    """Stream a summary of the open chat and add it to the chat unless it was stopped; see `request_messages`.

    It covers everything but a question at the end that has no answer. What of the chat does not fit beside the task is
    left out of the summary and told (`ContextTrimmed`). Ends with `GenerationFinished` or `Failed`. Raises UsageError:
    there is nothing to summarize, or an answer is running; ChatsError, ChatsChanged: the summary could not be saved.
    """
    chat, model = conversation.chat, conversation.model
    covered = conversation.messages
    if covered and covered[-1].role == "user":
        covered = covered[:-1]
    if covered and covered[-1].is_summary:
        raise UsageError("The chat is summarized already.", "Shorten the summary (F4 on it), or raise the context.")
    if chat is None or not covered:
        raise UsageError("There is nothing to summarize.", "Send a message first.")
    longest = _LONGEST_SUMMARY
    if model is not None and model.n_ctx:
        longest = min(longest, max(model.n_ctx // _SHARE, 64))
    sampling = conversation.in_effect.sampling.request_options()
    request = _request(conversation, covered, _SUMMARIZE, max_tokens=longest, when_full="drop_least", **sampling)
    written = ""
    async with contextlib.aclosing(conversation.generate_detached(request)) as events:
        async for event in events:
            if isinstance(event, TextDelta) and event.channel == "answer":
                written += event.text
            elif isinstance(event, GenerationFinished) and event.calls and event.stop_reason != "cancelled":
                event = Failed(
                    code="generation_failed",
                    message="The model called a tool in place of writing a summary.",
                    hint="Turn the tools off, and summarize again.",
                )
            elif isinstance(event, GenerationFinished) and event.stop_reason != "cancelled":
                is_open = conversation.chat is not None and conversation.chat.id == chat.id
                if is_open and (text := written.strip()):
                    name = conversation.model_name or "Model"
                    await conversation.history.add_summary(text, name, event.stop_reason, event.timings)
                    conversation.meter.chat_changed(conversation.history.n_past)
            yield event


def wants_title(conversation: Conversation) -> bool:
    """Return whether the open chat has an answer and still the title that its first message gave it, and the loaded
    model can write a better one: not the demo model, and not a server's, which others may be waiting for.
    """
    chat, messages, model = conversation.chat, conversation.messages, conversation.model
    if chat is None or model is None or model.server or not model.has_template:
        return False
    if not 2 <= len(messages) <= _MAX_MESSAGES or messages[-1].role != "assistant" or not messages[-1].content.strip():
        return False
    return chat.title == title_of(messages[0].content, messages[0].attachments) and not is_demo(Path(model.path))


async def title_chat(conversation: Conversation, is_stopped: Callable[[], bool]) -> bool:
    """Give the open chat a title that the model writes; False when it wrote none, was stopped, or somebody named the
    chat meanwhile. Raises UsageError: something is running; ChatsError: the title could not be saved.
    """
    chat, history = conversation.chat, conversation.history
    assert chat is not None
    sampling = Sampling(temperature=0.0)
    request = _request(
        conversation, conversation.messages, _NAME, sampling=sampling, max_tokens=_LONGEST_TITLE, when_full="refuse"
    )
    written, is_whole = "", False
    async with contextlib.aclosing(conversation.generate_detached(request, is_stopped)) as events:
        async for event in events:
            if isinstance(event, TextDelta) and event.channel == "answer":
                written += event.text
            is_whole = isinstance(event, GenerationFinished) and event.stop_reason != "cancelled" and not event.calls
    title = written_title(written)
    if not is_whole or not title or (await history.stored_chat(chat.id)).title != chat.title:
        return False
    await history.rename(chat.id, title)
    return True
