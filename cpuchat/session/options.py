"""What the open chat, or the next one, is answered with beside the settings: its system prompt, and how it reasons."""

from __future__ import annotations

from typing import Any

from cpuchat.base.errors import UsageError
from cpuchat.chats.history import ChatHistory
from cpuchat.chats.records import Reasoning, storable
from cpuchat.config.settings import Settings, with_changes

_DIGITS = 9


def reasoning_of(text: str) -> tuple[Reasoning, int | None]:
    """Return what `on`, `off`, `default` or a number of tokens (0: no limit) sets for a chat. Raises UsageError."""
    match text.strip().lower():
        case "on":
            return "on", None
        case "off":
            return "off", None
        case "default":
            return "", None
        case number if number.isdecimal() and len(number) < _DIGITS:
            return "on", int(number)
    raise UsageError(f"Not a choice of reasoning: {text.strip()!r}.", "Use on, off, default or a number of tokens.")


class ChatOptions:
    """Belongs to a conversation."""

    def __init__(self, history: ChatHistory) -> None:
        self._history = history
        self._next: dict[str, Any] = {}  # options that were chosen for the next chat

    def _option(self, name: str, default: Any = None) -> Any:
        chat = self._history.chat
        return getattr(chat, name) if chat is not None else self._next.get(name, default)

    async def _set(self, **options: Any) -> None:
        if self._history.chat is None:
            self._next |= options
        else:
            await self._history.set_options(**options)

    @property
    def has_next_system_prompt(self) -> bool:
        """Return whether the next chat begins with a system prompt of its own."""
        return self._history.chat is None and bool(self._next.get("system_prompt"))

    @property
    def reasoning(self) -> tuple[Reasoning, int | None]:
        """Return whether the chat's model reasons and for how many tokens; "" and None: as the settings say."""
        return self._option("reasoning", ""), self._option("reasoning_budget")

    def applied_to(self, chosen: Settings) -> Settings:
        """Return the settings for the next answer."""
        own = {"reasoning": self.reasoning[0] or None, "reasoning_budget": self.reasoning[1]}
        own = {name: value for name, value in own.items() if value is not None}
        if self._history.chat is None and "system_prompt" in self._next:
            own["system_prompt"] = self._next["system_prompt"]
        return with_changes(chosen, {"chat": own}) if own else chosen

    def forget_choice(self) -> None:
        """Begin a new chat with nothing of its own."""
        self._next = {}

    async def set_reasoning(self, reasoning: Reasoning, budget: int | None) -> None:
        """Set whether the model reasons in the chat and for how many tokens (0: no limit). Raises ChatsError."""
        await self._set(reasoning=reasoning, reasoning_budget=budget)

    async def set_system_prompt(self, text: str) -> None:
        """Set the system prompt of the chat. Raises ChatsError."""
        await self._set(system_prompt=storable(text))

    def of_chat(self, settings: Settings) -> dict[str, Any]:
        """Return what a chat that begins now keeps."""
        return {"system_prompt": settings.chat.system_prompt, **self._next}
