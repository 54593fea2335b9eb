"""From messages to the text that a model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cpuchat.engine.prompt.template_helper import TemplateHelper, TemplateRejection
from cpuchat.protocol import Message

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

    def render(self, messages: Sequence[Message], reasoning: bool | None = None) -> str:
        """Return the prompt for `messages`, ending where the model continues.

        Args:
            reasoning: whether the model shall reason first, for templates that offer the choice; None: their default.

        Raises:
            TemplateError: the template is invalid, rejected the messages, or exceeded a limit (time, memory, output of
                8 MB, recursion, access to internals). The next call is safe.
        """
        if self._style is None:
            self._style = next((style for style in _STYLES if self._renders("user", style)), _STYLES[0])
        plain = list(messages)
        if any(m.role == "system" for m in plain):
            if self._renders_system is None:
                self._renders_system = self._renders("system", self._style)
            if not self._renders_system:
                plain = _system_into_user(plain)
        try:
            return self._render(plain, self._style, reasoning)
        except TemplateRejection:
            merged = _merge_neighbors(plain)
            if len(merged) == len(plain):
                raise
        return self._render(merged, self._style, reasoning)

    def _render(self, messages: Sequence[Message], style: _Style, reasoning: bool | None = None) -> str:
        # One thing, two names: Qwen, GLM, Hunyuan, ... / DeepSeek, Granite.
        choice = {} if reasoning is None else dict.fromkeys(("enable_thinking", "thinking"), reasoning)
        return self._helper.render(
            {
                "messages": [_as_dict(m, style.content_in_parts) for m in messages],
                "tools": [] if style.tool_list else None,
                "documents": None,
                "add_generation_prompt": True,
                **choice,
                **self._tokens,
            }
        )

    def _renders(self, role: str, style: _Style) -> bool:
        """Return whether the text of a message of this role gets into the prompt."""
        messages = [Message(role="user", content=_SENTINEL)]
        if role == "system":
            messages = [Message(role="system", content=_SENTINEL), Message(role="user", content="Hello")]
        try:
            return _SENTINEL in self._render(messages, style)
        except TemplateRejection:
            return False


def _as_dict(message: Message, in_parts: bool) -> dict[str, Any]:
    content = [{"type": "text", "text": message.content}] if in_parts else message.content
    fields: dict[str, Any] = {"role": message.role, "content": content}
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
        if merged and merged[-1].role == message.role:
            last = merged.pop()
            message = Message(
                role=message.role,
                content=f"{last.content}\n\n{message.content}",
                reasoning="\n\n".join(filter(None, (last.reasoning, message.reasoning))),
            )
        merged.append(message)
    return merged
