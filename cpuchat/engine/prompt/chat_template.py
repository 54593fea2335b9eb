"""From messages to the text that a model was trained on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from cpuchat.engine.prompt.template_helper import TemplateHelper, TemplateRejection
from cpuchat.protocol import Message
from cpuchat.tool_calls import Tool
from cpuchat.tools.call_format import CallFormat
from cpuchat.tools.generic import GENERIC, as_text
from cpuchat.tools.learning import learn_format

PLAIN_STOPS = ("\nUser:", "\nAssistant:", "\nSystem:")
"""Stop strings for `plain_completion`."""

_SENTINEL = "cpuchat-probe-5f1c"


def plain_completion(messages: Sequence[Message]) -> str:
    """Render a transcript for models without a chat template. Use `PLAIN_STOPS` with it."""
    names = {"user": "User: ", "assistant": "Assistant: ", "system": ""}
    return "".join(f"{names[m.role]}{m.content.strip()}\n" for m in messages) + "Assistant:"


class _Style(NamedTuple):
    """How a template wants its variables."""

    content_in_parts: bool = False
    tool_list: bool = False


_STYLES = (_Style(), _Style(tool_list=True), _Style(content_in_parts=True))


class ChatTemplate:
    """A model's own Jinja chat template, rendered in a helper process.

    What templates disagree about is found out with a probe: some render no system message (it is then prepended to the
    first user message), some want the content as a list of parts, some a list of tools even when there are none. When
    a template rejects the order of the roles, neighbors of the same role are merged and it is tried again.

    Args:
        helper: renders the template; its owner closes it.
        bos_token, eos_token: texts that the template may place. After a template that writes the BOS token itself,
            tokenizing must not add another one.
    """

    def __init__(self, helper: TemplateHelper, bos_token: str, eos_token: str) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._helper = helper
        self._style: _Style | None = None
        self._renders_system: bool | None = None
        self._call_format: CallFormat | None = None

    def render(self, messages: Sequence[Message], reasoning: bool | None = None, tools: Sequence[Tool] = ()) -> str:
        """Return the prompt for `messages`, ending where the model continues.

        Args:
            reasoning: whether the model shall reason first, for templates that offer the choice; None: their default.
            tools: what the model may call. For a template that knows no calls they are described in the system prompt.

        Raises:
            TemplateError: the template is invalid, rejected the messages, or exceeded a limit (time, memory, output of
                8 MB, recursion, access to internals). The next call is safe.
        """
        style = self._chosen_style()
        plain = list(messages)
        if (tools or any(message.calls for message in plain)) and self.call_format is GENERIC:
            plain, tools = as_text(plain, tools), ()
        if any(m.role == "system" for m in plain):
            if self._renders_system is None:
                self._renders_system = self._renders("system", style)
            if not self._renders_system:
                plain = _system_into_user(plain)
        try:
            return self._render(plain, style, reasoning, tools)
        except TemplateRejection:
            merged = _merge_neighbors(plain)
            if len(merged) == len(plain):
                raise
        return self._render(merged, style, reasoning, tools)

    @property
    def call_format(self) -> CallFormat:
        """Return how the model writes calls of tools. Raises TemplateError if the template is invalid."""
        if self._call_format is None:
            style = self._chosen_style()
            learned = learn_format(lambda messages, more: self._render_dicts(messages, style, more))
            self._call_format = learned or GENERIC
        return self._call_format

    def _chosen_style(self) -> _Style:
        if self._style is None:
            self._style = next((style for style in _STYLES if self._renders("user", style)), _STYLES[0])
        return self._style

    def _render(
        self,
        messages: Sequence[Message],
        style: _Style,
        reasoning: bool | None = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        # One thing, two names: Qwen, GLM, Hunyuan, ... / DeepSeek, Granite.
        choice = {} if reasoning is None else dict.fromkeys(("enable_thinking", "thinking"), reasoning)
        in_text = self._call_format is not None and self._call_format.arguments_as_text
        dicts = [_as_dict(m, in_text) for m in messages]
        return self._render_dicts(dicts, style, True, {**choice, "tools": [tool.declaration() for tool in tools]})

    def _render_dicts(
        self,
        messages: list[dict[str, Any]],
        style: _Style,
        add_generation_prompt: bool,
        more: dict[str, Any] | None = None,
    ) -> str:
        variables: dict[str, Any] = {"documents": None, "tools": [], **(more or {}), **self._tokens}
        # Firefunction wants its tools as text, and the day.
        functions = json.dumps(variables["tools"], ensure_ascii=False) if variables["tools"] else "[]"
        variables |= {"functions": functions, "datetime": f"{datetime.date.today():%b %d %Y}"}
        if not variables["tools"] and not style.tool_list:
            variables["tools"] = None
        if style.content_in_parts:
            messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
        return self._helper.render({"messages": messages, "add_generation_prompt": add_generation_prompt, **variables})

    def _renders(self, role: str, style: _Style) -> bool:
        """Return whether the text of a message of this role gets into the prompt."""
        messages = [Message(role="user", content=_SENTINEL)]
        if role == "system":
            messages = [Message(role="system", content=_SENTINEL), Message(role="user", content="Hello")]
        try:
            return _SENTINEL in self._render(messages, style)
        except TemplateRejection:
            return False


def _as_dict(message: Message, arguments_as_text: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        fields |= {"tool_call_id": message.call_id, "name": message.tool}
    if message.calls:
        fields["tool_calls"] = [call.declaration(as_text=arguments_as_text) for call in message.calls]
    if message.role == "assistant" and message.reasoning:
        # One thing, three names: Qwen, GLM, Kimi, ... / gpt-oss, LFM, Command / Solar, Bielik.
        fields |= dict.fromkeys(("reasoning_content", "thinking", "reasoning"), message.reasoning)
    return fields


def _system_into_user(messages: Sequence[Message]) -> list[Message]:
    system = "\n\n".join(m.content for m in messages if m.role == "system")
    rest = [m for m in messages if m.role != "system"]
    for i, message in enumerate(rest):
        if message.role == "user":
            rest[i] = Message(role="user", content=f"{system}\n\n{message.content}")
            return rest
    return [Message(role="user", content=system), *rest]


def _merge_neighbors(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].role == message.role != "tool" and not (merged[-1].calls or message.calls):
            last = merged.pop()
            message = Message(
                role=message.role,
                content=f"{last.content}\n\n{message.content}",
                reasoning="\n\n".join(filter(None, (last.reasoning, message.reasoning))),
            )
        merged.append(message)
    return merged
