"""Opens the compare screen from the chat screen, and returns to the chat."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from textual import work

from cpuchat.base import paths
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.chats.history import sent_text
from cpuchat.chats.records import Chat
from cpuchat.config.servers import ServerModel, Source
from cpuchat.tui.chat.attaching import Attaching
from cpuchat.tui.chat.speaking import SpeakingScreen
from cpuchat.tui.chat.welcome import COMPARE
from cpuchat.tui.widgets.prompt import Prompt

if TYPE_CHECKING:
    from cpuchat.compare.comparison import Opened, Sides

FIRST_PROMPT = "Tell me a story about a dragon and a baker"
"""Default prompt for the demo pair: its two quantizations answer it differently."""


class ComparingScreen(SpeakingScreen):
    """Base of the chat screen, which defines what only raises here: the metaclass of Textual leaves no room for ABC."""

    _attaching: Attaching

    def load_model(self, path: Source) -> None:
        """Load in the background; refuses while something runs."""
        raise NotImplementedError

    @work(exclusive=True, group="compare")
    async def action_compare(self) -> None:
        """Compare the loaded model: the demo model with its Q4_K_M at once, any other with what the user chooses."""
        from cpuchat.models.library.places import DEMO_FILES

        if self._is_served():
            return
        path = self.services.loaded_path
        demo = {paths.demo_dir() / DEMO_FILES[name] for name in ("demo", "demo-q4")}
        if path is not None and path not in demo:
            self.action_compare_with()
            return
        if not self.refuse_while_busy("compare"):
            with self._telling():
                sides = await run_in_daemon_thread(self._demo_pair)
                self.compare(sides, await self._question() or FIRST_PROMPT)

    def _is_served(self) -> bool:
        """Say that models on servers are not compared, and return True, while one is loaded."""
        served = isinstance(self.services.loaded, ServerModel)
        if served:
            self.tell("Only models on this machine can be compared. Ctrl+O chooses one.")
        return served

    def _demo_pair(self) -> Sides:
        from cpuchat.compare.runner import Side

        resolve = self.services.library.resolve
        return Side.of(resolve("demo")), Side.of(resolve("demo-q4"))

    @work(exclusive=True, group="compare")
    async def action_compare_with(self) -> None:
        from cpuchat.compare.runner import Side

        if self.refuse_while_busy("compare") or self._is_served():
            return
        if (path := self.services.loaded_path) is None:
            self.tell("Load a model first. Ctrl+O chooses one.")
            return
        other = await self.services.navigation.compare_with(path)
        if other is not None:
            with self._telling():
                self.compare((await run_in_daemon_thread(lambda: Side.of(path)), other), await self._question())

    async def _question(self) -> str:
        """Return what to ask both, with its attachments: the text in the prompt, else the last question of the chat.
        Raises CpuchatError if a file cannot be read.
        """
        prompt = self.query_one(Prompt)
        if prompt.text.strip() == COMPARE:
            prompt.clear()
        if text := prompt.text.strip():
            return await self._attaching.read(text)
        asked = next((one for one in reversed(self.conversation.messages) if one.role == "user"), None)
        return sent_text(asked.content, asked.attachments) if asked is not None else ""

    def last_sent(self) -> str | None:
        """Return the last question of the chat."""
        return (self.questions() or [None])[-1]

    def questions(self) -> list[str]:
        """Return the questions of the open branch."""
        return [message.content for message in self.conversation.messages if message.role == "user"]

    @work(exclusive=True, group="open-chat")
    async def open_comparison(self, chat: Chat, message_id: int = 0) -> None:
        from cpuchat.compare.comparison import sides_of, turn_with, turns_of

        with self._telling():
            with self.services.keys_held():
                messages = await asyncio.to_thread(self.conversation.history.store.messages, chat.id)
            self.compare(sides_of(chat), kept=(chat.id, turns_of(messages), turn_with(messages, message_id)))

    @work
    async def compare(
        self,
        sides: Sides,
        prompt: str = "",
        kept: Opened | None = None,
        then: Source | None = None,
    ) -> None:
        """Open the compare screen; afterwards the model that was loaded, or `then`, is loaded again.

        Meanwhile the chat's worker is not in memory: the two sides have the machine.
        """
        if self.refuse_while_busy("compare"):
            return
        self.silence()
        loaded = self.services.loaded or then
        await self.conversation.backend.unload()
        try:
            with self._telling():
                await self.services.navigation.compare(sides, prompt, kept)
        finally:
            if self.is_running and not self.services.leaving:
                self.list_chats()
                if loaded is not None:
                    self.load_model(loaded)
