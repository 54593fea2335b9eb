"""A loaded model, and the chat whose KV is in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cpuchat.engine.decoding.prefill_chunking import PrefillChunking
from cpuchat.engine.drafting.speculator import Speculator
from cpuchat.engine.llama.model import Model
from cpuchat.engine.prompt.chat_template import ChatTemplate
from cpuchat.engine.prompt.disk_writer import WriteBudget
from cpuchat.engine.prompt.prefix_cache import PrefixCache, SavedChat
from cpuchat.engine.prompt.state_pool import StatePool
from cpuchat.engine.prompt.token_history import TokenHistory
from cpuchat.prefix import common_prefix

_OTHER_CHATS: Final = 1 << 16
"""Tokens of other chats that suffix decoding looks into."""
_SAVE_SHARE: Final = 4
"""A chat is saved again when the new part of it is this fraction of the whole."""
_RESTORE_GAIN: Final = 32
"""A saved state is loaded only if it spares the evaluation of at least this many tokens."""


@dataclass
class LoadedModel:
    """A model with everything that answers need, and what is known about the chat in its KV cache.

    Attributes:
        template: None: the model has none.
        history: the text and the tokens of the chat in memory.
        chat_id: "": the chat has no name and is not saved.
        saved_tokens: the tokens of this chat whose KV is saved.
        knows_others: the speculator has the texts of other chats.
        owner: of what is in the KV cache.
        pool: conversations that requests do not name; None: only that in the KV cache is known.
    """

    model: Model
    template: ChatTemplate | None
    cache: PrefixCache | None
    speculator: Speculator
    chunking: PrefillChunking
    budget: WriteBudget
    history: TokenHistory = field(default_factory=TokenHistory)
    chat_id: str = ""
    saved_tokens: list[int] = field(default_factory=list)
    knows_others: bool = False
    pool: StatePool | None = None
    owner: str = ""

    def change_owner(self, owner: str) -> None:
        """Leave the KV cache to its owner: neither figures nor times tell others what is in a prompt."""
        if self.pool is not None:
            self.pool.change_owner(self.model.sequence, self.history, owner)
        self.model.sequence.clear()
        self.history, self.owner = TokenHistory(), owner

    def save(self, *, at_end: bool = False) -> None:
        """Save the KV of the chat in memory if enough of it would be lost.

        A state is written whole, so a long chat is written again only when it has grown by a third: in all, at most
        four times what was added, whatever its length. What is lost meanwhile costs its prefill.

        Args:
            at_end: this is the last opportunity; the chat is saved if it is worth restoring.
        """
        if self.cache is None or not self.chat_id:
            return
        sequence = self.model.sequence
        held = common_prefix(sequence.tokens, self.saved_tokens)
        if held < len(self.saved_tokens) and not sequence.can_roll_back:
            held = 0  # what is saved continues differently
        new = len(sequence) - held
        if new >= _RESTORE_GAIN if at_end else new * _SAVE_SHARE >= len(sequence) and self.budget.allows():
            n_bytes = self.cache.save(self.chat_id, sequence, self.history)
            if n_bytes:
                self.saved_tokens = list(sequence.tokens)
                self.budget.spend(n_bytes)

    def switch_chat(self, chat_id: str, *, across_chats: bool) -> SavedChat | None:
        """Leave the chat in memory for another one; returns what is saved of that, if anything."""
        self.save()
        if across_chats:
            self._remember_chats(chat_id)
        self.chat_id = ""  # until the new chat's text is in the KV cache, what is there belongs to no chat
        saved = self.cache.find(chat_id) if self.cache is not None and chat_id else None
        self.saved_tokens = saved.tokens if saved is not None else []
        return saved

    def _remember_chats(self, next_id: str) -> None:
        """Give the speculator the texts of other chats: those on disk at first, then each one that is left."""
        if not self.knows_others and self.cache is not None:
            for text in reversed(self.cache.recent_texts(_OTHER_CHATS, without=next_id)):
                self.speculator.remember(text)
        self.speculator.remember(self.history.tokens)
        self.knows_others = True

    def restore(self, chat_id: str, saved: SavedChat, text: bytes, prompt: list[int]) -> None:
        """Load the saved KV of a chat if it holds more of the prompt than the memory does.

        Args:
            text: the rendered prompt, whose tokens are `prompt`.
        """
        sequence = self.model.sequence
        if saved.history.shared(text) > self.history.shared(text):
            self.history = saved.history
        from_disk = common_prefix(saved.tokens, prompt)
        if not sequence.can_roll_back and from_disk < len(saved.tokens):
            return
        if self.cache is not None and from_disk - common_prefix(sequence.tokens, prompt) >= _RESTORE_GAIN:
            self.cache.restore(chat_id, saved, sequence)

    def forget(self, chat_id: str) -> None:
        """Drop a chat, in memory and on disk, and draft from it no more; those of others are read again."""
        current = self.chat_id in (chat_id, "")  # without a name it may be what is left of that one
        if current:
            self.model.sequence.clear()
            self.history = TokenHistory()
            self.chat_id, self.saved_tokens = "", []
        self.speculator.forget(current=current)  # it may be among the texts that it knows
        self.knows_others = False
        if self.cache is not None:
            self.cache.forget(chat_id)
