"""The one store of states: what was evaluated before is not evaluated again.

A state is what the model's memory held after some tokens. It is kept where going back is likely: at a user's message,
before the answer, every so many tokens of a long prompt, and where a conversation is left for another one. Attention
keeps its tokens apart, so there going back is cutting. A recurrent state and a window-sized cache cannot be cut: what
they hold is copied (the partial state of `Sequence`), and set again over the attention that still holds the tokens
before. There is a memory tier and a disk tier (`StateFiles`), each within one limit.

A prompt asks once (`begin`): from where is it evaluated soonest?

An example, with window-sized caches: some layers see the last 1,024 tokens, and hold those and a batch of 512. After
5,000 tokens they hold positions 3,464 on; the other layers hold all.

- A prompt shares 4,900 tokens. The token after them sees positions 3,877 on, which are there: everything after 4,900
  is cut.
- A prompt shares 4,000 tokens. Positions 2,977 on are needed, and gone. The newest checkpoint before is at the user's
  message at 3,900: its partial state, the windows of positions 2,876 to 3,899, is set over the memory, which is cut to
  3,900. The 100 tokens up to 4,000 are evaluated again (`Reuse.again`), and what is new.
- A prompt shares 40 tokens with the memory, but 3,000 with another conversation that is kept whole: that one replaces
  the memory, which is kept before.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Final, Literal

import numpy as np

from cpuchat.base.paths import kv_stem
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.states.files import Index, StateFiles, WriteBudget
from cpuchat.engine.states.prompt import (
    SPACING,
    TOKEN_BYTES,
    Prompt,
    SavedPart,
    State,
    TokenHistory,
    shared_tokens,
    token_bytes,
)
from cpuchat.hardware.memory import available_bytes
from cpuchat.protocol.timings import Reuse

_LEAST_TOKENS: Final = 32
"""Tokens that keeping or restoring a whole state must spare."""
_KEEP_SHARE: Final = 16
"""A whole state is kept if at least one part in so many would be lost: copying a token costs some 10 µs, evaluating it
again some milliseconds."""
_SAVE_SHARE: Final = 4
"""A conversation is saved again when the new part of it is this fraction of the whole."""
_SAVED_PARTIALS: Final = 3
_UNSAVED: Final = "~"
"""Before the name of a conversation that is kept in memory only."""
_AGENT: Final = "@"
"""Before the name of what the prompts of an agent begin with."""
_LEAST_AGENT: Final = 256
"""Tokens of that: fewer are soon evaluated."""
_COPY_SHARE: Final = 0.01
"""Of the time of a long prompt, for copying checkpoints."""
_QUICK_SECONDS: Final = 0.25
"""Of a batch that a stop waits for."""
_MOST_STATES: Final = 128
"""Each one is compared with every prompt."""
_MEMORY_SPEED, _DISK_SPEED = 4e9, 8e8
"""Bytes per second of restoring; the order of magnitude decides."""


@dataclass
class Live:
    """What the memory holds: whose it is, the conversation that it is saved as, and its text."""

    owner: str = ""
    stem: str = ""
    history: TokenHistory = field(default_factory=TokenHistory)


@dataclass(frozen=True)
class Start:
    """From where a prompt is evaluated: the memory holds its first `n` tokens. `row` are the logits after the last one,
    only when that are all."""

    n: int
    row: np.ndarray | None
    reuse: Reuse


@dataclass(frozen=True)
class _Plan:
    """A way to the first `n` tokens of a prompt: from `base` (None: what the memory holds), going back by `partial`.
    `shared` tokens are common to both; `cost` is in seconds, with the evaluation of the rest."""

    base: State | None
    partial: State | None
    n: int
    shared: int
    cost: float


class StateStore:
    """Keeps states of one loaded model. All methods belong to the engine's thread.

    Args:
        piece: returns the text of one token, control tokens included.
        limit: bytes of the memory tier.
        files: the disk tier; None: nothing gets to the disk.
        budget: what may be written to disk.
        draft: the draft model's sequence; `draft_key` is for it what the key of `files` is for the target.
    """

    def __init__(
        self,
        sequence: Sequence,
        piece: Callable[[int], bytes],
        limit: int,
        files: StateFiles | None,
        budget: WriteBudget,
        draft: Sequence | None = None,
        draft_key: str = "",
    ) -> None:
        self.sequence = sequence
        self.piece = piece
        self.limit = limit
        self._files = files
        self._budget = budget
        self._draft, self._draft_key = draft, draft_key
        self._states: list[State] = []
        self._requests = 0
        self._token_seconds = 1e-3  # to evaluate one, followed
        self._prompt = b""
        self._at, self._seconds = 0, 0.0  # tokens at the last checkpoint, and the time of evaluating since
        self._copying = 0.0  # seconds of the last checkpoint
        self._note: str | None = None  # "" once it was taken
        self._unwritten: list[State] = []  # of agents
        self.live = Live()

    def histories(self, owner: str) -> tuple[TokenHistory, ...]:
        """Return the texts whose tokens are known."""
        owner = _hashed(owner)
        live = self.live.history if owner == self.live.owner else TokenHistory()
        self._find_saved()
        return (live, *(one.history for one in self._states if one.owner == owner and one.history is not None))

    def _find_saved(self) -> None:
        """Bring the list of what is on disk up to date."""
        if self._files is None:
            return
        known = {(one.file, one.part): one for one in self._states if one.file is not None}
        for file, index in self._files.indexes():
            for part in index.parts:
                if known.pop((file, part), None) is None:
                    state = _saved(file, index, part)
                    if part.is_whole:
                        state.history = index.history
                        if index.draft is not None and index.draft_key == self._draft_key:
                            state.draft = _saved(file, index, index.draft)
                    self._states.append(state)
        for gone in known.values():  # written anew, or deleted
            gone.file = gone.part = None
            if gone.data is None:
                self._states.remove(gone)

    def begin(self, prompt: Prompt, owner: str, chat_id: str, *, keeps: bool = False) -> Start:
        """Go to where `prompt` is evaluated soonest. What the memory loses of another conversation by that is kept.

        Args:
            keeps: a conversation without a name is saved on disk too; by default nobody could delete it.

        Raises:
            Aborted: stopped while a state was read from disk; nothing has changed.
        """
        self._requests += 1
        owner, stem = _hashed(owner), kv_stem(chat_id) if chat_id else ""
        if owner != self.live.owner:  # neither figures nor times tell others what is in a prompt
            self.leave()
            self.sequence.clear()
            self.live = Live(owner)
        self._mend()
        start, self._prompt = perf_counter(), token_bytes(prompt.tokens)
        row = next((one.row for one in self._own() if one.row is not None and one.tokens == self._prompt), None)
        most = len(prompt.tokens) - (row is None)
        plan = self._best(most)
        base = self.live if plan.base is None or plan.base.stem == self.live.stem else plan.base
        is_same = 0 < len(plan.base if plan.base is not None else self.sequence) <= 2 * plan.shared
        is_same = is_same and base.stem[:1] != _AGENT
        unnamed = f"{'' if keeps else _UNSAVED}{uuid.uuid4().hex[:20]}"
        name = stem or (base.stem if is_same else "") or unnamed
        self._keep_lost(plan, name)
        while (source := self._go(plan)) is None:
            plan = self._best(most)
        changed, message = "", 0
        if base.history is not None and (is_same or stem == base.stem):
            changed, message = prompt.changed(base.history.text)
        histories = (self.live.history, *(one.history for one in self._own() if one.history is not None))
        known = max(histories, key=lambda one: one.shared(prompt.text)).copy()
        known.record(prompt.text, prompt.tokens, (), self.piece)  # and nothing of another conversation
        self.live = Live(owner, name, known)
        again = plan.shared - plan.n if plan.n < len(prompt.tokens) - 1 else 0
        reuse = Reuse(
            source=source,
            ms=1e3 * (perf_counter() - start) if source else 0.0,
            changed=changed if len(prompt.tokens) - plan.n > 1 else "",
            message=message,
            again=again,
        )
        self._at, self._seconds = plan.n, 0.0
        return Start(plan.n, row if plan.n == len(prompt.tokens) else None, reuse)

    def resume(self) -> None:
        """Bring back what a client used last before a restart, so that its next request finds it in the memory."""
        self._find_saved()
        last = next((one for one in self._states if one.is_whole and one.owner and one.file is not None), None)
        if last is None or self.sequence.tokens or len(last) > self.sequence.n_ctx:
            return
        data = self._loaded(last)
        if data is None or not self.sequence.set_state(last.list(), data):
            self._drop(last)
            return
        drafted = self._loaded(last.draft) if last.draft is not None and self._draft is not None else None
        if drafted is not None and last.draft is not None and self._draft is not None:
            self._draft.set_state(last.draft.list(), drafted)
        self.live = Live(last.owner, last.stem, last.history.copy() if last.history is not None else TokenHistory())

    def agent_length(self, prompt: Prompt) -> int:
        """Return how many tokens of the prompt are the agent's; 0: too few to keep, or they are kept. Those that are
        kept count as used."""
        n, _ = prompt.head(self.piece)
        tokens = self._prompt[: n * TOKEN_BYTES]
        for one in self._own():
            if one.stem[:1] == _AGENT and one.is_whole and one.tokens == tokens and one.file is not None:
                if self._files is not None:
                    self._files.touch(one.file)
                return 0
        return n if n >= _LEAST_AGENT and self._files is not None else 0

    def keep_agent(self, prompt: Prompt, agent: str) -> None:
        """Keep what the memory holds, an agent's part of the prompt, and write it to the disk once that is idle."""
        tokens, size = token_bytes(self.sequence.tokens), self.sequence.state_size()
        if self._files is None or size > self._files.limit or not self._make_room(size, ()):
            return
        state = State(self.live.owner, _AGENT + kv_stem(agent), tokens, True, self.sequence.state())
        state.first, state.used, state.history = self.sequence.first_saved(), self._requests, TokenHistory()
        state.history.record(prompt.head(self.piece)[1], list(self.sequence.tokens), (), self.piece)
        self._states = [one for one in self._states if one.stem != state.stem or one.file is not None] + [state]
        self._unwritten.append(state)
        self._write_agents()

    def _write_agents(self) -> None:
        """Begin to write the next state of an agent, if nothing else is written and it may be."""
        files = self._files
        self._unwritten = [one for one in self._unwritten if one in self._states]
        if files is None or files.writer.is_busy or not self._unwritten or not self._budget.allows():
            return
        state = self._unwritten.pop(0)
        files.write(state.stem, [state], self._draft_key)
        self._budget.spend(state.restored_bytes)

    def _own(self) -> list[State]:
        return [one for one in self._states if one.owner == self.live.owner]

    def _best(self, most: int) -> _Plan:
        """Return the cheapest way to the first `most` tokens of the prompt, or fewer."""
        key = self._prompt
        partials = [s for s in self._own() if not s.is_whole and len(s) <= most and key.startswith(s.tokens)]
        plans = [self._plan(None, token_bytes(self.sequence.tokens), partials, key, most)]
        for base in self._own():
            if base.is_whole and len(base) <= self.sequence.n_ctx:
                plans.append(self._plan(base, base.tokens, partials, key, most))
        return min(plans, key=lambda plan: plan.cost)

    def _plan(self, base: State | None, held: bytes, partials: list[State], key: bytes, most: int) -> _Plan:
        sequence, shared = self.sequence, shared_tokens(held, key)
        n, partial = min(shared, most), None
        can_cut = sequence.can_cut(n) if base is None else n == len(base) or sequence.can_cut_from(base.first, n)
        if not can_cut:
            near = [one for one in partials if len(one) <= n]
            partial = max(near, key=len, default=None)
            n = len(partial) if partial is not None else 0
        cost = (most - n) * self._token_seconds
        for one in (base, partial):
            if one is not None:
                cost += one.restored_bytes / (_MEMORY_SPEED if one.data is not None else _DISK_SPEED)
        if base is not None:
            cost += _LEAST_TOKENS * self._token_seconds
        return _Plan(base, partial, n, shared, cost)

    def _go(self, plan: _Plan) -> Literal["", "memory", "disk"] | None:
        """Take the memory to the end of a plan; returns where its states were. None: one could not be used, and is
        dropped.

        Raises:
            Aborted: stopped while a state was read; nothing has changed.
        """
        sequence, base = self.sequence, plan.base
        states = [one for one in (base, plan.partial) if one is not None]
        source = "" if not states else "disk" if any(one.data is None for one in states) else "memory"
        loaded: list[tuple[State, np.ndarray]] = []
        for one in states:
            one.used = self._requests
            if (data := self._loaded(one)) is None:
                return self._drop(one)
            loaded.append((one, data))
        drafted, target = base.draft if base is not None else None, self._draft
        of_draft = None
        if drafted is not None and target is not None:
            held = shared_tokens(token_bytes(target.tokens), self._prompt)
            if shared_tokens(drafted.tokens, self._prompt) >= held + _LEAST_TOKENS:
                of_draft = self._loaded(drafted)
        for one, data in loaded:
            if not sequence.set_state(one.list(), data, partial=not one.is_whole):
                return self._drop(one)
        if drafted is not None and target is not None and of_draft is not None:
            target.set_state(drafted.list(), of_draft)
        return source if sequence.truncate(plan.n) == plan.n else self._drop(base)

    def _drop(self, state: State | None) -> None:
        self._states = [one for one in self._states if one is not state]

    def _loaded(self, state: State) -> np.ndarray | None:
        """Return the data of a state; what was read from disk is kept if there is room. None: it is gone.

        Raises:
            Aborted: stopped.
        """
        if state.data is not None or state.file is None or state.part is None or self._files is None:
            return state.data
        if state.part.nbytes > available_bytes() // 2:
            return None
        data = self._files.read(state.file, state.part, self.sequence.abort.is_set)
        if data is not None and self._make_room(data.nbytes, (state,)):
            state.data = data
        return data

    def _keep_lost(self, plan: _Plan, name: str) -> None:
        """Keep and save what the memory loses by a plan, as far as that is worth it."""
        held = plan.n if plan.base is None else 0
        lost, spared = len(self.sequence) - held, [one for one in (plan.base, plan.partial) if one is not None]
        is_kept = lost >= _LEAST_TOKENS and lost * _KEEP_SHARE >= len(self.sequence)
        self.leave(spared, keep=is_kept, save=name != self.live.stem or plan.base is not None)

    def leave(self, spared: Collection[State] = (), *, keep: bool = True, save: bool = True) -> None:
        """Keep what the memory holds before it is used for something else: in memory, on disk if there is much new."""
        if not self.live.stem:  # nobody's: random tokens of a measurement
            return
        self._mend()
        if keep and len(self.sequence) >= _LEAST_TOKENS:
            self._whole(spared)
        if save:
            self.save()

    def _mend(self) -> None:
        """Go back to before a stopped batch, which has spoilt a recurrent state."""
        if not self.sequence.is_broken:
            return
        held = token_bytes(self.sequence.tokens)
        for one in sorted(self._own(), key=len, reverse=True):
            if not one.is_whole and one.data is not None and held.startswith(one.tokens):
                self.sequence.set_state(one.list(), one.data, partial=True)
                return
        self.sequence.clear()

    def _whole(self, spared: Collection[State] = (), *, to_save: bool = False) -> State | None:
        """Keep what the memory holds as a state, and return it; None when there is no room, unless it is `to_save`.
        What it extends goes, but never the `spared`."""
        sequence, live, tokens = self.sequence, self.live, token_bytes(self.sequence.tokens)
        for one in self._own():
            if one.is_whole and one.tokens == tokens and one.data is not None:
                one.history = one.history or live.history.copy()
                return one
        drafted = token_bytes(self._draft.tokens) if self._draft is not None else b""
        draft = self._draft if 2 * len(drafted) >= len(tokens) and tokens.startswith(drafted) else None
        size = sequence.state_size() + (draft.state_size() if draft is not None else 0)
        has_room = self._make_room(size, spared)
        if not has_room and not to_save:
            return None
        state = State(live.owner, live.stem, tokens, True, sequence.state(), sequence.first_saved())
        state.history, state.used = live.history.copy(), self._requests
        if draft is not None:
            state.draft = State(live.owner, live.stem, drafted, True, draft.state())
        if has_room and not sequence.partial_bytes:
            extended = [one for one in self._own() if one.is_whole and tokens.startswith(one.tokens)]
            self._states = [one for one in self._states if one not in extended or one in spared]
        if has_room:
            self._states.append(state)
        return state

    def is_quick(self, n: int) -> bool:
        """Return whether a stop can wait until a batch of `n` tokens is evaluated, and nothing of it is lost."""
        return n * self._token_seconds <= _QUICK_SECONDS

    def evaluated(self, n: int, seconds: float) -> None:
        """Note that `n` tokens of the prompt took `seconds`; checkpoint if that is due: copying takes some time too."""
        self._seconds += seconds
        if n >= _LEAST_TOKENS:
            self._token_seconds += (seconds / n - self._token_seconds) / 4
        is_due = len(self.sequence) - self._at >= SPACING and self._copying <= _COPY_SHARE * self._seconds
        if is_due and self.sequence.partial_bytes:
            self.checkpoint()

    def checkpoint(self, row: np.ndarray | None = None) -> None:
        """Keep what going back to here takes, and the `row` of logits after the last token."""
        sequence, start = self.sequence, perf_counter()
        tokens = self._prompt[: len(sequence) * TOKEN_BYTES]
        is_whole = not sequence.is_divisible
        state = next((one for one in self._own() if one.tokens == tokens and one.is_whole == is_whole), None)
        state = state or State(self.live.owner, self.live.stem, tokens, is_whole)
        size = sequence.state_size(partial=True) if sequence.partial_bytes and state.data is None else 0
        if not self._make_room(size + (row.nbytes if row is not None else 0), (state,)):
            return
        if size:
            state.data = sequence.state(partial=True)
        if row is not None:
            state.row = row.copy()
        state.used = self._requests
        self._drop(state)
        self._states.append(state)
        self._at, self._seconds, self._copying = len(sequence), 0.0, perf_counter() - start

    def record(self, prompt: Prompt, answer: list[int]) -> None:
        """Keep the text of what the memory holds now."""
        self.live.history.record(prompt.text, prompt.tokens, answer, self.piece)
        self._write_agents()
        if self._files is not None and self._files.limit and self._note is None:
            size = self.sequence.state_size()
            if size > self._files.limit:
                self._note = (
                    f"The KV cache of this chat ({size / 1e9:.1f} GB) is larger than engine.saved_kv_gb "
                    f"({self._files.limit / 1e9:g}): it is not kept for a restart. Raise the setting to keep it."
                )

    def take_note(self) -> str:
        """Return what the user should know, once."""
        if note := self._note or "":
            self._note = ""
        return note

    def save(self, *, at_end: bool = False) -> None:
        """Begin to write the conversation in the memory if enough of it would be lost.

        It is written whole, so a long one is written again only when it has grown by a third: in all, at most four
        times what was added, whatever its length. What is lost meanwhile costs its prefill.

        Args:
            at_end: this is the last opportunity: it is saved if it is worth restoring.
        """
        files, sequence = self._files, self.sequence
        self._write_agents()
        if files is None or self.live.stem[:1] in ("", _UNSAVED) or files.writer.is_busy:
            return
        self._mend()
        tokens = token_bytes(sequence.tokens)
        saved = [one for one in self._own() if one.is_whole and one.file is not None and one.stem == self.live.stem]
        held = max((shared_tokens(one.tokens, tokens) for one in saved), default=0)
        if sequence.is_recurrent and not any(tokens.startswith(one.tokens) for one in saved):
            held = 0  # what is saved goes on differently
        new = len(sequence) - held
        if not (new >= _LEAST_TOKENS if at_end else new * _SAVE_SHARE >= len(sequence) > 0 and self._budget.allows()):
            return
        size = sequence.state_size()
        if size > files.limit or size > available_bytes() // 2:
            return
        whole = self._whole(to_save=True)
        assert whole is not None
        size = whole.restored_bytes
        kind = [one for one in self._own() if one.is_whole != sequence.is_divisible and one is not whole]
        partials = {one.tokens: one for one in kind if one.restored_bytes and tokens.startswith(one.tokens)}
        parts = [whole]
        for one in sorted(partials.values(), key=len, reverse=True)[:_SAVED_PARTIALS]:
            if (size := size + one.restored_bytes) <= files.limit:
                parts.append(one)
        files.write(self.live.stem, parts, self._draft_key)
        self._budget.spend(sum(one.restored_bytes for one in parts))

    def is_another(self, chat_id: str) -> bool:
        """Return whether a named chat is another one than the memory holds."""
        return bool(chat_id) and kv_stem(chat_id) != self.live.stem

    def texts(self, limit: int, without: str) -> list[list[int]]:
        """Return tokens of conversations that no client owns, last used first, at most `limit` in all; not of the chat
        `without`."""
        self._find_saved()
        found: list[list[int]] = []
        for one in sorted(self._states, key=lambda one: -one.used):
            if limit > 0 and not one.owner and one.history is not None and one.stem != kv_stem(without):
                found.append(one.history.tokens[:limit])
                limit -= len(found[-1])
        return found

    def forget(self, chat_id: str) -> bool:
        """Drop a chat, in memory and on disk, and what has no name and may tell of it; "": everything in memory.

        Returns:
            Whether what the memory holds was dropped.
        """
        stem = kv_stem(chat_id)
        self._states = [one for one in self._states if chat_id and one.stem != stem and one.stem[:1] != _UNSAVED]
        if self._files is not None:
            self._files.forget(stem)
        if chat_id and self.live.stem != stem and self.live.stem[:1] not in ("", _UNSAVED):
            return False
        self.sequence.clear()
        self.live = Live(self.live.owner)
        return True

    def close(self, is_cancelled: Callable[[], bool]) -> None:
        """Save what the memory holds, unless `is_cancelled` meanwhile."""
        if self._files is not None:
            self._files.writer.finish(is_cancelled)
            while self._unwritten and self._budget.allows() and not is_cancelled():
                self._write_agents()
                self._files.writer.finish(is_cancelled)
            self.save(at_end=True)
            self._files.writer.finish(is_cancelled)
            self._files.drop(self.live.stem)

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the memory tier in use."""
        return sum(one.memory_bytes for one in self._states)

    def _make_room(self, size: int, spared: Collection[State]) -> bool:
        """Drop the states whose loss costs least until `size` bytes fit; False when they do not."""
        if size > self.limit or size > available_bytes() // 2:
            return False
        held = b""
        while self.n_bytes + size > self.limit or sum(one.memory_bytes > 0 for one in self._states) >= _MOST_STATES:
            left = [one for one in self._states if one.memory_bytes and one not in spared]
            if not left:
                return False
            held = held or token_bytes(self.sequence.tokens)
            by_size = self.n_bytes + size > self.limit  # else there are too many
            least = min(left, key=lambda one: self._worth(one, held) / (one.memory_bytes if by_size else 1))
            if least.file is not None:
                least.free()
            else:
                self._drop(least)
        return True

    def _worth(self, state: State, held: bytes) -> float:
        """Return the tokens that would be evaluated again without a state, by its age; 0: it is of no use."""
        others = [one for one in self._states if one is not state and one.owner == state.owner]
        is_partial = not state.is_whole and state.restored_bytes > 0
        holders = (held, *(one.tokens for one in others if one.is_whole))
        if is_partial and not any(tokens.startswith(state.tokens) for tokens in holders):
            return 0.0  # nothing holds the attention that it goes back on
        before = [one for one in others if state.tokens.startswith(one.tokens) and (one.is_whole or is_partial)]
        gap = len(state) - max(map(len, before), default=0) if state.restored_bytes else 1
        return gap / (1 + self._requests - state.used)


def _saved(file: Path, index: Index, part: SavedPart) -> State:
    stem, tokens = file.name.partition("-")[0], index.tokens[: part.n * TOKEN_BYTES]
    return State(index.owner, stem, tokens, part.is_whole, first=part.first, file=file, part=part)


def _hashed(owner: str) -> str:
    return hashlib.sha256(owner.encode()).hexdigest()[:20] if owner else ""
