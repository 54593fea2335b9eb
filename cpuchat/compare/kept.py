"""A comparison in the chat database: a chat with two answers to each prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuchat.chats.records import Chat, StoredMessage
from cpuchat.chats.titles import title_of
from cpuchat.compare.rounds import Round, SideAnswer, Turn
from cpuchat.compare.side import Side, short_names
from cpuchat.errors import ChatsError

if TYPE_CHECKING:
    from cpuchat.chats.store import ChatStore

Sides = tuple[Side, Side]
Opened = tuple[str, list[Turn], int | None]
"""A comparison that was kept: its chat, its turns, and which of them is shown; None: the last."""


class KeptComparison:
    """Keeps a comparison, answer by answer. Blocks: use in threads, one call at a time.

    `chat_id` is "" before the first round was kept.
    """

    def __init__(self, store: ChatStore, sides: Sides, chat_id: str = "", n_turns: int = 0) -> None:
        self.chat_id = chat_id
        self._store = store
        self._sides = sides
        self._n_turns = n_turns
        self._answers: tuple[int, int] | None = None  # ids of the last turn's

    def keep(self, turns: list[Turn]) -> None:
        """Write the last round of the last turn; the answers of a repeated prompt replace those before.

        Raises:
            ChatsError: it cannot be saved; ChatsChanged: it was deleted meanwhile.
        """
        turn, store = turns[-1], self._store
        with store.transaction():
            if not self.chat_id:
                title = f"{' against '.join(short_names(*self._sides))}: {title_of(turn.prompt)}"
                sides = msgspec.json.encode(self._sides).decode()
                self.chat_id = store.create_chat(self._sides[0].name, title=title, sides=sides).id
            answers = turn.rounds[-1].answers
            if self._n_turns == len(turns):
                for row, answer in zip(self._answers or self._stored_answers(), answers, strict=True):
                    store.update_message(row, **_fields(answer))
                return
            store.add_message(self.chat_id, "user", turn.prompt)
            first, second = (
                store.add_message(self.chat_id, "assistant", model=side.label, **_fields(answer)).id
                for side, answer in zip(self._sides, answers, strict=True)
            )
            self._answers, self._n_turns = (first, second), len(turns)

    def _stored_answers(self) -> tuple[int, int]:
        first, second = (message.id for message in self._store.messages(self.chat_id)[-2:])
        return first, second


def _fields(answer: SideAnswer) -> dict:
    ended = answer.stop_reason or (answer.failed.code if answer.failed is not None else "cancelled")
    return {
        "content": answer.content,
        "reasoning": answer.reasoning,
        "stop_reason": ended,
        "timings": answer.timings,
    }


def sides_of(chat: Chat) -> Sides:
    """Return what the comparison `chat` compared. Raises ChatsError when that is unknown."""
    try:
        return msgspec.json.decode(chat.sides, type=Sides)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise ChatsError("This comparison is damaged: its models are unknown.", "Delete it.") from None


def turn_with(messages: list[StoredMessage], message_id: int) -> int | None:
    """Return the index of the turn with this message; None without it."""
    before = [message.role for message in messages if message.id <= message_id]
    return before.count("user") - 1 if any(message.id == message_id for message in messages) else None


def turns_of(messages: list[StoredMessage]) -> list[Turn]:
    """Return the prompts and answers of a comparison, with one round each; figures beyond the timings are not kept."""
    turns: list[Turn] = []
    for message in messages:
        if message.role == "user":
            turns.append(Turn(message.content, [Round()]))
        elif message.role == "assistant" and turns:
            answers = turns[-1].rounds[0].answers
            into = next((one for one in answers if not one.stop_reason), answers[1])
            into.content, into.reasoning, into.timings = message.content, message.reasoning, message.timings
            into.stop_reason = message.stop_reason or "cancelled"
    return turns
