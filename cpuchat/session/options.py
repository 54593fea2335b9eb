"""What the open chat, or the next one, is answered with beside the settings: its system prompt, and its own values."""

from __future__ import annotations

from typing import Any

from cpuchat.chats.history import ChatHistory
from cpuchat.chats.records import WhenFull, storable
from cpuchat.config.settings import Changes, Settings, with_changes


class ChatOptions:
    """Belongs to a conversation."""

    def __init__(self, history: ChatHistory) -> None:
        self._history = history
        self._next: dict[str, Any] = {}  # options that were chosen for the next chat

    def _option(self, name: str, default: Any) -> Any:
        chat = self._history.chat
        return getattr(chat, name) if chat is not None else self._next.get(name, default)

    async def set(self, **options: Any) -> None:
        """Set `own`, `when_full` or `system_prompt` of the chat, from the next answer on. Raises ChatsError."""
        if "system_prompt" in options:
            options["system_prompt"] = storable(options["system_prompt"])
        if self._history.chat is None:
            self._next |= options
        else:
            await self._history.set_options(**options)

    @property
    def own(self) -> dict[str, Any]:
        """Return the values of settings that hold for this chat alone, by key."""
        return self._option("own", {})

    @property
    def when_full(self) -> WhenFull:
        """Return what is done when the chat no longer fits into the context; "" is to ask."""
        return self._option("when_full", "")

    @property
    def has_next_system_prompt(self) -> bool:
        """Return whether the next chat begins with a system prompt of its own."""
        return self._history.chat is None and bool(self._next.get("system_prompt"))

    def applied_to(self, chosen: Settings) -> Settings:
        """Return the settings for the next answer."""
        changes: Changes = {"chat": {}, "sampling": {}, "engine": {}}
        for key, value in self.own.items():
            section, _, name = key.partition(".")
            changes[section][name] = value
        if self._history.chat is None and "system_prompt" in self._next:
            changes["chat"]["system_prompt"] = self._next["system_prompt"]
        return with_changes(chosen, changes)

    def forget_choice(self) -> None:
        """Begin a new chat with nothing of its own."""
        self._next = {}

    def of_chat(self, settings: Settings) -> dict[str, Any]:
        """Return what a chat that begins now keeps."""
        return {"system_prompt": settings.chat.system_prompt, **self._next}
