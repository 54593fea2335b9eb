"""Two models answer the same prompts, one after the other: each has a worker process and a history of its own, and the
whole machine while the other waits in memory, or on disk where memory is not enough for both. In the chat database a
comparison is a chat with two answers to each prompt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cpuchat.backend.base import Backend
from cpuchat.backend.local import LocalBackend
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import ChatsError, CpuchatError, MeasureFailed, UsageError
from cpuchat.chats.records import Chat, StoredMessage, column, title_of
from cpuchat.compare.agreement import Agreement, AnswerAgreement, score_answers
from cpuchat.compare.choice import FilePair, read_pair
from cpuchat.compare.runner import KeptTokens, Round, Runner, Side, TokenText, Turn, fit_together, short_names
from cpuchat.config.settings import Settings
from cpuchat.hardware.process import process_memory
from cpuchat.measure.turns import in_order
from cpuchat.models.gguf.header import read_model
from cpuchat.models.library.library import Library
from cpuchat.protocol.messages import AnyEvent, Score, TokensScored
from cpuchat.quality.measure import require_same_vocabulary

if TYPE_CHECKING:
    from cpuchat.chats.store import ChatStore


Tell = Callable[[int, AnyEvent], None]


class Comparison:
    """Use from one event loop; `close` it.

    `names` tell the sides apart in a few words. `in_turn` is why the sides are loaded in turn, "" when both stay in
    memory. `stopped`: the last round was; `running`: the one that is being answered. `tell` is called with every event
    of a side. `backend` makes the backend of a side; `library` is where draft models are looked for (None: the folders
    of the settings). Raises UsageError: a side has settings that are not acceptable."""

    def __init__(
        self,
        sides: tuple[Side, Side],
        settings: Settings,
        *,
        backend: Callable[[], Backend] = LocalBackend,
        library: Library | None = None,
    ) -> None:
        self.sides = sides
        self.names = short_names(*sides)
        self._library = library or Library(settings.model.folders)
        self.runners = tuple(Runner(side, side.settings(settings), backend(), self._library) for side in sides)
        self.conversations = tuple(runner.conversation for runner in self.runners)
        self.turns: list[Turn] = []
        self.in_turn = ""
        self.files: FilePair | None = None
        """Known after `learn_files`, of two files of one model."""
        self.tell: Tell = lambda side, event: None
        self.busy = False
        self.running: Round | None = None
        self.stopped = False
        self._checked = False
        self.writing: frozenset[int] = frozenset()
        """The sides that are being loaded or answer now."""

    async def ask(self, prompt: str) -> Round:
        """Let both sides answer a new prompt; it continues what was asked before. Raises UsageError: something runs."""
        self._refuse_while_busy()
        self.turns.append(Turn(prompt))
        try:
            return await self._round()
        except UsageError:  # refused
            self.turns.pop()
            raise

    async def repeat(self) -> Round:
        """Let both answer the last prompt again, the other side first. A stopped round is left out of a turn that has a
        complete one. Raises UsageError: nothing was asked; as `ask`."""
        self._refuse_while_busy()
        if not self.turns:
            raise UsageError("There is no prompt to repeat.", "Write one first.")
        return await self._round()

    def agreement_refused(self) -> str:
        """Return why the agreement on the last answers cannot be had, "" when it can. Blocks: use in a thread."""
        last = self.turns[-1].rounds[-1] if self.turns and self.turns[-1].rounds else None
        if last is None or any(one.as_written() is None for one in last.answers):
            return "The tokens of these answers are unknown. Repeat the prompt."
        if self.in_turn:
            return "Both sides have to be in memory for the agreement."
        try:
            if self.sides[0].path != self.sides[1].path:
                require_same_vocabulary(*(read_model(Path(side.path)) for side in self.sides))
        except CpuchatError as error:
            last.agreement_note = f"{error.message} Only the texts are compared."
            return last.agreement_note
        return ""

    async def agree(self, tell: Callable[[float], None] = lambda share: None) -> Agreement | None:
        """Let both sides predict the last answers of both, token by token; the round has the result. None: stopped.
        Raises UsageError: something runs, or it cannot be measured; MeasureFailed: a side failed."""
        self._refuse_while_busy()
        self.busy, self.stopped = True, False

        async def run(side: int, command: Score) -> TokensScored:
            if self.stopped:
                raise MeasureFailed("Stopped.", "")
            return await self.runners[side].score(command)

        try:
            if refused := await asyncio.to_thread(self.agreement_refused):
                raise UsageError(refused, "")
            last = self.turns[-1].rounds[-1]
            a, b = (one.as_written() for one in last.answers)
            assert a is not None and b is not None
            n_vocab = (await asyncio.to_thread(read_model, Path(self.sides[0].path))).n_vocab
            last.agreement = await score_answers((a, b), n_vocab, run, tell=tell)
            return last.agreement
        except MeasureFailed as error:
            if self.stopped:
                return None
            self.turns[-1].rounds[-1].agreement_note = f"No agreement: {error}"
            raise
        finally:
            # One that cannot free what it took has ended.
            await asyncio.gather(*(runner.end_scoring() for runner in self.runners), return_exceptions=True)
            self.busy = False

    async def learn_files(self) -> None:
        """Find out what tells two files of one model apart."""
        self.files = await asyncio.to_thread(read_pair, self.sides, self.runners[0].settings)

    def seconds_left(self, n_rounds: int) -> float | None:
        """Return how long the rest of `n_rounds` of the last prompt takes, by the first of them; None in that."""
        first, *repeats = self.turns[-1].rounds
        seconds = 0.0
        for before, now in zip(first.answers, repeats[-1].answers if repeats else (), strict=False):
            if (took := before.timings) is not None:
                rest = 0.0 if now.timings else max(1 - now.written.n_tokens / max(took.predicted_n, 1), 0.0)
                seconds += (n_rounds - 1 - len(repeats) + rest) * (took.ttft_ms + took.predicted_ms) / 1e3
        return seconds if repeats else None

    async def stop(self) -> None:
        """Stop the running round, which ends with what is written."""
        if self.busy:
            self.stopped = True
            await asyncio.gather(*(runner.stop() for runner in self.runners))

    async def close(self) -> None:
        """End both workers."""
        await self.stop()
        await asyncio.gather(*(one.close() for one in self.conversations))

    def restore(self, turns: Sequence[Turn]) -> None:
        """Continue a comparison that was kept: its answers become the histories of both sides."""
        self.turns[:] = turns
        for index, runner in enumerate(self.runners):
            messages: list[StoredMessage] = []
            for turn in turns:
                said = [("user", turn.prompt)]
                if turn.rounds and (content := turn.counted()[-1].answers[index].content):
                    said.append(("assistant", content))
                for role, text in said:
                    messages.append(StoredMessage(id=len(messages), chat_id="", parent=0, role=role, content=text))  # type: ignore[arg-type]
            runner.conversation.history.restore(messages, runner.settings.chat.system_prompt)
            runner.n_prompts = len(turns)

    def _refuse_while_busy(self) -> None:
        if self.busy:
            raise UsageError("Both sides are still answering.", "Stop them with Esc first.")

    async def _round(self) -> Round:
        self.busy, self.stopped = True, False
        turn = self.turns[-1]
        try:
            if not self._checked:
                settings = [runner.settings for runner in self.runners]
                n_ctx, self.in_turn = await asyncio.to_thread(fit_together, self.sides, settings, self._library)
                for runner in self.runners:
                    runner.settings.engine.n_ctx = runner.settings.engine.n_ctx or n_ctx
                self._checked = True
            order = in_order((0, 1), len(turn.rounds))
            new = self.running = Round(first=order[0])
            turn.rounds.append(new)
            if not self.in_turn:
                for side in order:  # one after the other: they read the same disk
                    await self._load(side, new)
            for side in order:
                await self._answer(side, new)
            await self._read_memory(new)
            if self.stopped:
                for answer in new.answers:
                    answer.stop_reason = answer.stop_reason or "cancelled"  # also one that had not begun
            if self.stopped and not new.complete and any(one.complete for one in turn.rounds):
                turn.rounds.remove(new)  # what is finished stays
                self.restore(self.turns)
            return new
        finally:
            self.busy, self.running = False, None
            self.writing = frozenset()

    async def _load(self, side: int, new: Round) -> bool:
        if self.stopped:
            return False
        runner, self.writing = self.runners[side], frozenset({side})
        loaded = await runner.load(lambda event: self.tell(side, event))
        new.answers[side].failed = runner.failed
        self.writing = frozenset()
        return loaded and not self.stopped

    async def _answer(self, side: int, new: Round) -> None:
        if self.in_turn:
            await self.runners[1 - side].conversation.backend.unload()
        if self.runners[side].failed is not None and not self.in_turn:
            return
        if await self._load(side, new):
            self.writing = frozenset({side})
            await self.runners[side].answer(
                self.turns, new.answers[side], lambda event: self.tell(side, event), lambda: self.stopped
            )
            self.writing = frozenset()
            if self.in_turn:
                await self._read_memory(new)

    async def _read_memory(self, new: Round) -> None:
        for answer, runner in zip(new.answers, self.runners, strict=True):
            pid = runner.conversation.backend.pid
            if pid is not None and answer.model is not None and (found := await asyncio.to_thread(process_memory, pid)):
                answer.memory = found.private + found.shared


Sides = tuple[Side, Side]
Opened = tuple[str, list[Turn], int | None]
"""A comparison that was kept: its chat, its turns, and which of them is shown; None: the last."""


class _Kept(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the database has of a comparison beside its messages."""

    sides: Sides


class KeptComparison:
    """Keeps a comparison. Blocks: use in threads, one call at a time. `chat_id` is "" before a round was kept."""

    def __init__(self, store: ChatStore, sides: Sides, chat_id: str = "", n_turns: int = 0) -> None:
        self.chat_id = chat_id
        self._store = store
        self._sides = sides
        self._n_turns = n_turns
        self._answers: tuple[int, int] | None = None  # ids of the last turn's

    def keep(self, turns: list[Turn]) -> None:
        """Write the last turn with its last round that counts, in place of an earlier one. Raises ChatsError: it cannot
        be saved; ChatsChanged: it was deleted meanwhile."""
        turn, store = turns[-1], self._store
        sides, answers = column(_Kept(self._sides)), _rows(turn.counted()[-1])
        with store.transaction():
            if self.chat_id:
                store.set_options(self.chat_id, {"sides": sides})
            else:
                title = f"{' against '.join(short_names(*self._sides))}: {title_of(turn.prompt)}"
                self.chat_id = store.create_chat(self._sides[0].name, title=title, sides=sides).id
            if self._n_turns == len(turns):
                rows = self._answers or [message.id for message in store.messages(self.chat_id)[-2:]]
                for row, answer in zip(rows, answers, strict=True):
                    store.update_message(row, **answer)
                return
            store.add_message(self.chat_id, "user", turn.prompt)
            first, second = (
                store.add_message(self.chat_id, "assistant", model=side.label, **answer).id
                for side, answer in zip(self._sides, answers, strict=True)
            )
            self._answers, self._n_turns = (first, second), len(turns)


def _rows(done: Round) -> list[dict[str, Any]]:
    """Return what the database has of both answers."""
    found: list[dict[str, Any]] = []
    for index, answer in enumerate(done.answers):
        agreement = done.agreement.answers[index] if done.agreement is not None else None
        found.append({
            "content": answer.content,
            "reasoning": answer.reasoning,
            "stop_reason": answer.stop_reason or (answer.failed.code if answer.failed is not None else "cancelled"),
            "timings": answer.timings,
            "recording": msgspec.json.encode(answer.kept_tokens(agreement)).decode(),
        })  # fmt: skip
    return found


def sides_of(chat: Chat) -> Sides:
    """Return what the comparison `chat` compared. Raises ChatsError when that is unknown."""
    try:
        return msgspec.json.decode(chat.sides, type=prepared(_Kept)).sides
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise ChatsError("This comparison is damaged: its models are unknown.", "Delete it.") from None


def turn_with(messages: list[StoredMessage], message_id: int) -> int | None:
    """Return the index of the turn with this message; None without it."""
    before = [message.role for message in messages if message.id <= message_id]
    return before.count("user") - 1 if any(message.id == message_id for message in messages) else None


def turns_of(chat: Chat, messages: list[StoredMessage]) -> list[Turn]:
    """Return the prompts of a comparison with one round each: answers, timings and agreement."""
    turns: list[Turn] = []
    agreed: list[AnswerAgreement | None] = []
    for message in messages:
        if message.role == "user":
            turns.append(Turn(message.content, [Round()]))
        elif message.role == "assistant" and turns:
            answers = turns[-1].rounds[0].answers
            into = next((one for one in answers if not one.stop_reason), answers[1])
            into.content, into.reasoning, into.timings = message.content, message.reasoning, message.timings
            into.stop_reason = message.stop_reason or "cancelled"
            tokens = KeptTokens()
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):  # damaged
                tokens = msgspec.json.decode(message.recording or "{}", type=prepared(KeptTokens))
            into.written = TokenText.of(message.reasoning + message.content, tokens)
            agreed.append(tokens.agreement if into.written.n_tokens else None)
            if into is answers[1] and (a := agreed[-2]) is not None and (b := agreed[-1]) is not None:
                turns[-1].rounds[0].agreement = Agreement(answers=(a, b))
    return turns
