"""Lets the model name a chat after its first answer, while the app is idle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.screen import Screen

from cpuchat.base.errors import CpuchatError
from cpuchat.titling import title_chat, wants_title
from cpuchat.tui.chat.idle import IdleProbe
from cpuchat.tui.services import Services

CHECK_SECONDS = 5.0
IDLE_CHECKS = 2
"""Consecutive checks that must find the app and the cores idle."""


class ChatTitler(IdleProbe):
    """Names chats that were answered in this run; one that was stopped is named when the app is idle again.

    Args:
        is_idle: a model is loaded and nothing runs.
        on_title: called when the open chat has a new title.
    """

    name = "titles"

    def __init__(
        self, screen: Screen[Any], services: Services, is_idle: Callable[[], bool], on_title: Callable[[], None]
    ) -> None:
        super().__init__(screen, services, is_idle, CHECK_SECONDS, IDLE_CHECKS)
        self._on_title = on_title
        self._chat_id = ""  # to be named

    def answered(self) -> None:
        """Name the open chat, if it should be, when the app is idle."""
        conversation = self._services.conversation
        if conversation.chat is not None and wants_title(conversation):
            self._chat_id = conversation.chat.id

    def _is_wanted(self) -> bool:
        conversation = self._services.conversation
        open_chat = conversation.chat.id if conversation.chat is not None else ""
        return bool(self._chat_id) and open_chat == self._chat_id and wants_title(conversation)

    async def _cancel(self) -> None:
        await self._services.conversation.stop()

    async def _measure(self) -> None:
        named = False
        try:
            if not self._stopped and self._is_wanted():
                named = await title_chat(self._services.conversation, lambda: self._stopped)
        except CpuchatError:  # the first message is title enough
            pass
        if not self._stopped:
            self._chat_id = ""
        if named and self._screen.is_running:
            self._on_title()
