"""Summaries of a chat, so that it fits into the context again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from cpuchat.base.errors import UsageError
from cpuchat.chats.history import request_messages
from cpuchat.protocol.messages import AnyEvent, Failed, Generate, GenerationFinished, Message, TextDelta
from cpuchat.session.conversation import Conversation

# Asked for "our conversation", Qwen2.5 Coder 1.5B answered 2 of 6 times that there was none to summarize.
_SUMMARIZE = (
    "Summarize the messages above, so that the conversation can continue from the summary alone. Keep facts, names, "
    "numbers, decisions, code and open questions; leave out greetings and repetitions. Write only the summary."
)
_LONGEST_SUMMARY = 1024  # tokens
_SHARE = 8  # of the context, which a summary has at most


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
    request = Generate(  # which continues the chat, so that its KV cache serves it
        messages=(*request_messages(chat.effective_system_prompt, covered), Message(role="user", content=_SUMMARIZE)),
        reasoning=False,
        reasoning_budget=0,
        speculation=conversation.speculation,
        tools=conversation.tools.toolbox.tools if conversation.tools is not None else (),  # they are in the KV cache
        max_tokens=longest,
        when_full="drop_least",
        **sampling,
    )
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
