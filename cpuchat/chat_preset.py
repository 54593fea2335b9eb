"""The preset of the open chat: chosen for it, or for new chats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cpuchat.chats.history import ChatHistory
from cpuchat.chats.records import StoredMessage
from cpuchat.chats.request import Attach
from cpuchat.presets import Preset, find_preset
from cpuchat.settings import Settings


class ChatPreset:
    """Belongs to a conversation. `of_new_chats` returns the name of the preset for new chats, "" for none."""

    def __init__(self, history: ChatHistory) -> None:
        self._history = history
        self._chosen: tuple[Preset | None] | None = None  # for the next chat, whatever that of new chats is
        self.of_new_chats: Callable[[], str] = lambda: ""

    @property
    def current(self) -> Preset | None:
        """Return that of the open chat; before its first message what was chosen for it."""
        if self._history.chat is not None:
            return self._history.chat.preset
        return self._chosen[0] if self._chosen is not None else None

    @property
    def name(self) -> str:
        """Return its name, "" for none."""
        if self._history.chat is None and self._chosen is None:
            return self.of_new_chats()
        return self.current.name if self.current is not None else ""

    def applied_to(self, chosen: Settings) -> Settings:
        """Return the settings for the next answer."""
        return self.current.applied_to(chosen) if self.current is not None else chosen

    def forget_choice(self) -> None:
        """Begin a new chat with the preset of new chats."""
        self._chosen = None

    async def choose(self, preset: Preset | None, settings: Settings) -> None:
        """Set the preset of the open chat, or of the next one, from the next answer on. Raises ChatsError.

        Its system prompt becomes the chat's; without a preset, that of the settings returns.
        """
        if (chat := self._history.chat) is None:
            self._chosen = (preset,)
            return
        before = chat.preset.system_prompt if chat.preset is not None else None
        is_own = before is None or chat.system_prompt != before  # not from a preset
        prompt = chat.system_prompt if is_own else settings.chat.system_prompt
        if preset is not None and preset.system_prompt is not None:
            prompt = preset.system_prompt
        await self._history.set_options(preset=preset, system_prompt=prompt)

    async def find(self) -> None:
        """Read the preset of new chats if it is needed. Raises as `add_question`."""
        if self._history.chat is None and self._chosen is None and (name := self.of_new_chats()):
            self._chosen = (await asyncio.to_thread(find_preset, name),)

    async def add_question(
        self, text: str, model: str, settings: Settings, attach: Attach | None = None
    ) -> list[StoredMessage]:
        """Add a user message as `ChatHistory.add_question`; a chat that begins with it has the preset.

        Raises:
            UsageError, SettingsError: the preset of new chats does not exist or is not valid.
        """
        await self.find()
        prompt = self.applied_to(settings).chat.system_prompt
        return await self._history.add_question(text, model, attach, system_prompt=prompt, preset=self.current)
