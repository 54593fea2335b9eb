"""A loaded model with everything that answers need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cpuchat.engine.decoding.prefill_chunking import PrefillChunking
from cpuchat.engine.drafting.speculator import Speculator
from cpuchat.engine.llama.model import Model
from cpuchat.engine.prompt.chat_template import ChatTemplate
from cpuchat.engine.states.store import StateStore

_OTHER_CHATS: Final = 1 << 16
"""Tokens of other chats that suffix decoding looks into."""


@dataclass
class LoadedModel:
    """A model with everything that answers need.

    Attributes:
        template: None: the model has none.
        knows_others: the speculator has the texts of other chats.
    """

    model: Model
    template: ChatTemplate | None
    states: StateStore
    speculator: Speculator
    chunking: PrefillChunking
    knows_others: bool = False

    def remember_chats(self, next_id: str) -> None:
        """Give the speculator the texts of other chats: those that are kept at first, then each one that is left."""
        if not self.knows_others:
            for text in reversed(self.states.texts(_OTHER_CHATS, next_id)):
                self.speculator.remember(text)
        elif self.states.is_another(next_id) and not self.states.live.owner:
            self.speculator.remember(self.states.live.history.tokens)
        self.knows_others = True

    def forget(self, chat_id: str) -> None:
        """Drop a chat, in memory and on disk, and draft from it no more; those of others are read again."""
        self.speculator.forget(current=self.states.forget(chat_id))  # it may be among the texts that it knows
        self.knows_others = False
