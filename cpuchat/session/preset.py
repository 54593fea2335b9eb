"""Overrides of the open chat, or of the next one: its preset, and how it reasons."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from cpuchat.base.errors import UsageError
from cpuchat.chats.history import ChatHistory
from cpuchat.chats.records import Reasoning, storable
from cpuchat.config.presets import Preset, find_preset
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


class ChatPreset:
    """Belongs to a conversation. `of_new_chats` returns the name of the preset for new chats, "" for none."""

    def __init__(self, history: ChatHistory) -> None:
        self._history = history
        self._next: dict[str, Any] = {}  # options that were chosen for the next chat
        self.of_new_chats: Callable[[], str] = lambda: ""

    def _option(self, name: str, default: Any = None) -> Any:
        chat = self._history.chat
        return getattr(chat, name) if chat is not None else self._next.get(name, default)

    async def _set(self, **options: Any) -> None:
        if self._history.chat is None:
            self._next |= options
        else:
            await self._history.set_options(**options)

    @property
    def current(self) -> Preset | None:
        """Return that of the open chat; before its first message what was chosen for it."""
        return self._option("preset")

    @property
    def name(self) -> str:
        """Return its name, "" for none."""
        if self._history.chat is None and "preset" not in self._next:
            return self.of_new_chats()
        return self.current.name if self.current is not None else ""

    @property
    def has_next_system_prompt(self) -> bool:
        """Return whether the next chat begins with a system prompt of its own."""
        return self._history.chat is None and bool(self._next.get("system_prompt"))

    @property
    def reasoning(self) -> tuple[Reasoning, int | None]:
        """Return whether the chat's model reasons and for how many tokens; "" and None: as preset and settings say."""
        return self._option("reasoning", ""), self._option("reasoning_budget")

    def applied_to(self, chosen: Settings) -> Settings:
        """Return the settings for the next answer."""
        if self._history.chat is None and "system_prompt" in self._next:
            chosen = with_changes(chosen, {"chat": {"system_prompt": self._next["system_prompt"]}})
        found = self.current.applied_to(chosen) if self.current is not None else chosen
        own = {"reasoning": self.reasoning[0] or None, "reasoning_budget": self.reasoning[1]}
        own = {name: value for name, value in own.items() if value is not None}
        return with_changes(found, {"chat": own}) if own else found

    def forget_choice(self) -> None:
        """Begin a new chat with the preset of new chats, and with nothing of its own."""
        self._next = {}

    async def choose(self, preset: Preset | None) -> None:
        """Set the preset of the open chat, or of the next one, from the next answer on. Raises ChatsError."""
        await self._set(preset=preset)

    async def set_reasoning(self, reasoning: Reasoning, budget: int | None) -> None:
        """Set whether the model reasons in the chat and for how many tokens (0: no limit). Raises ChatsError."""
        await self._set(reasoning=reasoning, reasoning_budget=budget)

    async def set_system_prompt(self, text: str) -> None:
        """Set the system prompt of the chat, in place of that of its preset. Raises as `find`, and ChatsError."""
        await self.find()
        if self.current is not None and self.current.system_prompt:
            await self.choose(msgspec.structs.replace(self.current, system_prompt=None))
        await self._set(system_prompt=storable(text))

    async def find(self) -> None:
        """Read the preset of new chats if it is needed. Raises UsageError, SettingsError: there is no valid one."""
        if self._history.chat is None and "preset" not in self._next and (name := self.of_new_chats()):
            try:
                self._next["preset"] = await asyncio.to_thread(find_preset, name)
            except UsageError as error:
                where = "Preset in the settings (F2), which is preset under [chat] in config.toml"
                raise UsageError(error.message, f"{error.hint} Or clear {where}.") from None

    async def of_chat(self, settings: Settings) -> dict[str, Any]:
        """Return what a chat that begins now keeps. Raises as `find`."""
        await self.find()
        return {"system_prompt": settings.chat.system_prompt, **self._next}
