"""The one store of states: what was evaluated before is not re-evaluated.

A state is what the model's KV cache held after some tokens. It is kept where going back is likely: at a user's message,
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
  message at 3,900: its partial state, the windows of positions 2,876 to 3,899, is set over the KV cache, which is cut
  to 3,900. The 100 tokens up to 4,000 are re-evaluated (`Reuse.again`), and what is new.
- A prompt shares 40 tokens with the KV cache, but 3,000 with another conversation that is kept whole: that one replaces
  the KV cache, which is kept before.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Concatenate, Final, Literal, ParamSpec, TypeVar

import numpy as np

from cpuchat.base.paths import kv_stem
from cpuchat.engine.llama.passes import Passes
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.llama.threads import leave_cores
from cpuchat.engine.states.files import Index, StateFiles, WriteBudget
from cpuchat.engine.states.plan import MIN_TOKENS, Plan, plan_reuse
from cpuchat.engine.states.prompt import (
    SPACING,
    TOKEN_BYTES,
    RenderedPrompt,
    SavedPart,
    State,
    StateKind,
    TokenHistory,
    shared_tokens,
    token_bytes,
)
from cpuchat.hardware.memory import available_bytes
from cpuchat.protocol.messages import StateKey
from cpuchat.protocol.timings import Reuse

_KEEP_SHARE: Final = 16
"""A whole state is kept if at least one part in so many would be lost: copying a token is far faster."""
_SAVE_SHARE: Final = 4
"""A conversation is saved again when the new part of it is this fraction of the whole."""
_SAVED_PARTIALS, _SAVED_LEFT = 3, 3
"""Checkpoints that are saved of a conversation, and conversations beside the last one at the end."""
_MIN_HEAD: Final = 256
"""Tokens of a head (`StateKind.HEAD`): fewer are soon evaluated."""
_MAX_HEADS, _KNOWN_HEADS = 8, 64
"""Of a client, that are kept; of all, that are compared."""
_ONCE_SHARE: Final = 4
"""What was used once takes one part in so many of the memory before it goes first."""
_COPY_SHARE: Final = 0.01
"""Of the time of a long prompt, for copying checkpoints."""
_QUICK_SECONDS: Final = 0.25
"""Of a batch that a stop waits for."""
_LOST_SHARE: Final = 0.5
"""What a token of another conversation that a lane loses is worth, in tokens of the prompt: it may be kept."""
_LOOK_SECONDS: Final = 0.1
"""Seconds between two looks at whether an answer that waits for another one was stopped."""
_MAX_STATES: Final = 128
"""Each one is compared with every prompt."""


@dataclass
class Live:
    """What the KV cache holds: whose it is, what it is kept as, its text, and whether nothing has continued it."""

    key: StateKey = field(default_factory=StateKey)
    history: TokenHistory = field(default_factory=TokenHistory)
    is_once: bool = False
    kind: StateKind = StateKind.WHOLE


@dataclass(frozen=True)
class EvaluationStart:
    """From where a prompt is evaluated: the KV cache holds its first `n` tokens. `row`: the logits, if that are all."""

    n: int
    row: np.ndarray | None
    reuse: Reuse


@dataclass
class _Kept:
    """What the stores of all lanes share: the states, and what was found out about the model and its clients.

    `requests`: how many there were; `token_seconds`: to evaluate one, followed; `note`: for the user, "" once taken.
    `unwritten` are heads, `heads` owners and tokens of prompts, the newest last. `changed`: locks all of this, and
    tells that a lane has evaluated a batch, or is free."""

    lanes: list[StateStore] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    requests: int = 0
    token_seconds: float = 1e-3
    note: str | None = None
    unwritten: list[State] = field(default_factory=list)
    heads: list[tuple[str, bytes]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)


P = ParamSpec("P")
R = TypeVar("R")


def _alone(method: Callable[Concatenate[StateStore, P], R]) -> Callable[Concatenate[StateStore, P], R]:
    """Let one thread at a time run such methods of the stores of a model."""

    @functools.wraps(method)
    def run(self: StateStore, *args: P.args, **named: P.kwargs) -> R:
        with self._kept.changed:
            return method(self, *args, **named)

    return run


class StateStore:
    """Keeps states of one loaded model, for one of its lanes (`take`); those of the other ones share them (`beside`).
    An answer calls the methods on its own thread. `used`: the number of the last request of its lane.

    `piece` returns the text of one token, control tokens included. `limit`: bytes of the memory tier. `files`: the disk
    tier (None: none), `budget` what may be written to it. `draft`: the draft model's sequence, with its `draft_key` as
    that of `files`. `passes`: of several lanes."""

    def __init__(
        self,
        sequence: Sequence,
        piece: Callable[[int], bytes],
        limit: int,
        files: StateFiles | None,
        budget: WriteBudget,
        draft: Sequence | None = None,
        draft_key: str = "",
        passes: Passes | None = None,
        kept: _Kept | None = None,
    ) -> None:
        self.sequence = sequence
        self.piece = piece
        self.limit = limit
        self._files = files
        self._budget = budget
        self._shared_draft, self._draft_key = draft, draft_key
        self._passes = passes
        self._kept = kept or _Kept()
        self._kept.lanes.append(self)
        self.is_taken = self._has_begun = False
        self.used = 0
        self._prompt = b""
        self._at, self._seconds = 0, 0.0  # tokens at the last checkpoint, and the time of evaluating since
        self._copying = 0.0  # seconds of the last checkpoint
        self._head = self._common = 0  # tokens of the prompt's head, and those of them that earlier ones have too
        self._changed = 0  # tokens that the prompt has in common with what was there before
        self._due: set[int] = set()  # after how many tokens of the prompt a head is to be kept
        self._unusable: list[Sequence] = []  # lanes that could not be copied for this prompt
        self.live = Live()

    def beside(self, sequence: Sequence) -> StateStore:
        """Return the store of another lane, which has the same states."""
        of_model = self.piece, self.limit, self._files, self._budget, self._shared_draft, self._draft_key
        return StateStore(sequence, *of_model, self._passes, self._kept)

    @property
    def _draft(self) -> Sequence | None:
        """Return the draft model's sequence for an answer on its thread, the only one that it follows."""
        return self._shared_draft if self.sequence.is_evaluated_here else None

    @_alone
    def take(self, prompt: RenderedPrompt, key: StateKey) -> StateStore:
        """Take the free lane that holds most of the prompt and least of anything else, until `give_back`."""
        tokens, owner = token_bytes(prompt.tokens), _hashed(key.owner)

        def worth(lane: StateStore) -> tuple[float, int]:
            held, n = token_bytes(lane.sequence.tokens), len(lane.sequence)
            shared = shared_tokens(held, tokens) if lane.live.key.owner == owner else 0
            return shared - _LOST_SHARE * (n - shared), -lane.used

        free = [lane for lane in self._kept.lanes if not lane.is_taken]
        lane = max(free, key=worth) if len(free) > 1 else free[0]
        lane.is_taken, lane.used = True, self._kept.requests + 1
        return lane

    @_alone
    def give_back(self) -> None:
        self.is_taken = self._has_begun = False
        self._kept.changed.notify_all()

    @_alone
    def histories(self, owner: str) -> tuple[TokenHistory, ...]:
        owner = _hashed(owner)
        live = [lane.live.history for lane in self._kept.lanes if owner == lane.live.key.owner] or [TokenHistory()]
        self._find_saved()
        kept = (one.history for one in self._kept.states if one.key.owner == owner)
        return (*live, *filter(None, kept))

    def _find_saved(self) -> None:
        """Bring the list of what is on disk up to date."""
        if self._files is None:
            return
        known = {(one.file, one.part): one for one in self._kept.states if one.file is not None}
        for file, index in self._files.indexes():
            for part in index.parts:
                if known.pop((file, part), None) is None:
                    state = _saved(file, index, part)
                    if state.is_whole:
                        state.history = index.history
                        if index.draft is not None and index.draft_key == self._draft_key:
                            state.draft = _saved(file, index, index.draft)
                    self._kept.states.append(state)
        for gone in known.values():  # written anew, or deleted
            gone.file = gone.part = None
            if gone.data is None:
                self._kept.states.remove(gone)

    @_alone
    def begin(self, prompt: RenderedPrompt, key: StateKey) -> EvaluationStart:
        """Go to where `prompt` is evaluated soonest. What the KV cache loses of another conversation by that is kept.
        Raises Aborted: stopped while a state was read from disk; nothing has changed."""
        self._kept.requests += 1
        owner = _hashed(key.owner)
        named = StateKey(owner=owner, chat=kv_stem(key.chat), on_disk=True) if key.chat else None
        if owner != self.live.key.owner:  # neither figures nor times tell others what is in a prompt
            self.leave()
            self.sequence.clear()
            self.live = Live(StateKey(owner=owner))
        self._mend()
        start, self._prompt = perf_counter(), token_bytes(prompt.tokens)
        row = next((one.row for one in self._own() if one.row is not None and one.tokens == self._prompt), None)
        max_tokens = len(prompt.tokens) - (row is None)
        self._unusable.clear()
        plan = self._best_after_others(max_tokens)
        base = self.live if plan.base is None or plan.base.key == self.live.key else plan.base
        head = self._head = prompt.head(self.piece) if owner else 0
        held = len(plan.base if plan.base is not None else self.sequence)
        n_evaluated = len(self.sequence if isinstance(base, Live) else base)
        is_same = 0 < held - head <= 2 * (plan.shared - head) and base.kind is not StateKind.HEAD
        self._changed = max(plan.shared, shared_tokens(token_bytes(self.sequence.tokens), self._prompt))
        kept = named or (base.key if is_same and base.key.chat else None)
        kept = kept or StateKey(owner=owner, chat=uuid.uuid4().hex[:20], on_disk=key.on_disk)
        # What the KV cache loses is kept and saved, as far as that is worth it.
        spared = [one for one in (plan.base, plan.partial) if one is not None]
        lost = len(self.sequence) - (plan.n if plan.base is None else 0)
        is_kept = lost >= MIN_TOKENS and lost * _KEEP_SHARE >= len(self.sequence)
        self.leave(spared, keep=is_kept, save=kept != self.live.key or plan.base is not None)
        while (source := self._go(plan)) is None:
            plan = self._best(max_tokens)
        changed, message = "", 0
        if base.history is not None and (is_same or named == base.key):
            changed, message = prompt.changed(base.history.text_of(n_evaluated, self.piece))
        histories = (self.live.history, *(one.history for one in self._own() if one.history is not None))
        known = max(histories, key=lambda one: one.shared(prompt.text)).copy()
        known.record(prompt.text, prompt.tokens, (), self.piece)  # and nothing of another conversation
        is_once = named is None and (kept != base.key or plan.shared < head + MIN_TOKENS)
        for one in self._own():
            one.is_once = one.is_once and (is_once or one.key != kept)
        self.live = Live(kept, known, is_once)
        again = plan.shared - plan.n if plan.n < len(prompt.tokens) - 1 else 0
        reuse = Reuse(
            source=source,
            ms=1e3 * (perf_counter() - start) if source else 0.0,
            changed=changed if len(prompt.tokens) - plan.n > 1 else "",
            message=message,
            again=again,
        )
        self._at, self._seconds = plan.n, 0.0
        self._has_begun = self.is_taken
        return EvaluationStart(plan.n, row if plan.n == len(prompt.tokens) else None, reuse)

    @_alone
    def resume(self) -> None:
        """Bring back what a client used last before a restart, so that its next request finds it in the KV cache."""
        self._find_saved()
        last = next((one for one in self._kept.states if one.is_whole and one.key.owner and one.file is not None), None)
        if last is None or self.sequence.tokens or len(last) > self.sequence.n_ctx:
            return
        data = self._loaded(last)
        if data is None or not self.sequence.set_state(last.list(), data):
            self._drop(last)
            return
        target, draft = self._draft, last.draft
        if target is not None and draft is not None and (drafted := self._loaded(draft)) is not None:
            target.set_state(draft.list(), drafted)
        history = last.history.copy() if last.history is not None else TokenHistory()
        self.live = Live(last.key, history, kind=last.kind)

    @_alone
    def places(self, prompt: RenderedPrompt, at: int) -> list[int]:
        """Return after how many tokens of the prompt, more than `at`, to call `keep_head` and `checkpoint`. Where it
        has changed, the next one may change again: what cannot be cut keeps the beginning of that line."""
        places = set[int]()
        if self.sequence.partial_bytes and at < len(prompt.tokens):
            places = {prompt.line_start(self._changed, self.piece), *prompt.checkpoints(at, self.piece)}
        self._due = self._heads_due(prompt, at) if self._head >= _MIN_HEAD else set()
        self.keep_head()
        return sorted(place for place in places | self._due if place > at)

    def _heads_due(self, prompt: RenderedPrompt, at: int) -> set[int]:
        """Return after how many tokens, `at` or more, what other conversations may begin with as well is to be kept:
        the head, and what it has in common with earlier ones. Heads that are kept count as used."""
        owner, head, due = self.live.key.owner, self._prompt[: self._head * TOKEN_BYTES], set[int]()
        kept = self._own(StateKind.HEAD)
        before = (*(tokens for other, tokens in self._kept.heads if other == owner), *(one.tokens for one in kept))
        common = max((shared_tokens(head, tokens) for tokens in before), default=0)
        others = [one for one in self._kept.heads if one != (owner, head)]
        self._kept.heads = [*others[1 - _KNOWN_HEADS :], (owner, head)]
        self._use_head([one for one in kept if head.startswith(one.tokens)])
        if at < common < self._head and self.sequence.partial_bytes:
            common = max(prompt.line_start(common, self.piece), at)
        self._common = common
        for n, holders in ((common, [one for one in kept if not one.is_once]), (self._head, kept)):
            held = max((self._usable(one, head[: n * TOKEN_BYTES]) for one in holders), default=0)
            if n >= at and n - max(held, *due, 0) >= _MIN_HEAD:
                due.add(n)
        return due

    def _usable(self, state: State, tokens: bytes) -> int:
        """Return how many of these tokens a whole state spares."""
        shared = shared_tokens(state.tokens, tokens)
        return shared if shared == len(state) or self.sequence.can_cut_from(state.first, shared) else 0

    def _use_head(self, heads: list[State]) -> None:
        """Count the longest of the prompt's heads as used: what was used twice is written."""
        if not heads:
            return
        head = max(heads, key=len)
        head.used, head.is_once = self._kept.requests, False
        if head.file is not None and self._files is not None:
            self._files.touch(head.file)
        elif head not in self._kept.unwritten:
            self._kept.unwritten.append(head)

    @_alone
    def keep_head(self) -> None:
        """Keep what the KV cache holds if that is a head that is due; it is written once it is used a second time."""
        n, live = len(self.sequence), self.live
        if n not in self._due or not self._make_room(self.sequence.state_size(), ()):
            return
        tokens = self._prompt[: n * TOKEN_BYTES]
        name = hashlib.sha256(live.key.owner.encode() + tokens).hexdigest()[:20]
        key = StateKey(owner=live.key.owner, chat=name, on_disk=live.key.on_disk)
        state = State(key, tokens, StateKind.HEAD, self.sequence.state())
        state.first, state.used, state.history = self.sequence.first_saved(), self._kept.requests, TokenHistory()
        state.is_once = n > self._common
        self._kept.states.append(state)
        if not state.is_once:
            self._use_head([state])
        heads = reversed(self._own(StateKind.HEAD))  # those of earlier runs: the newest last
        for one in sorted(heads, key=lambda one: (not one.is_once, one.used))[:-_MAX_HEADS]:
            self._drop(one)
            if self._files is not None and one.file is not None:
                self._files.forget(one.key.chat)

    def _write_heads(self) -> None:
        """Begin to write the next head, if nothing else is written and it may be."""
        files = self._files
        self._kept.unwritten = [one for one in self._kept.unwritten if one in self._kept.states and one.key.on_disk]
        if files is None or files.writer.is_busy or not self._kept.unwritten or not self._budget.allows():
            return
        state = self._kept.unwritten.pop(0)
        if state.restored_bytes <= files.limit:
            files.write(state.key.chat, [state], self._draft_key)
            self._budget.spend(state.restored_bytes)

    def _own(self, *kinds: StateKind) -> list[State]:
        """Return the states of the present owner; of some kinds only, if any is given."""
        own = (one for one in self._kept.states if one.key.owner == self.live.key.owner)
        return [one for one in own if not kinds or one.kind in kinds]

    def _best(self, max_tokens: int) -> Plan:
        """Return the cheapest way to the first `max_tokens` tokens of the prompt, or fewer."""
        states = [*self._own(), *self._in_other_lanes()]
        return plan_reuse(self._prompt, max_tokens, self.sequence, states, self._kept.token_seconds)

    def _others(self) -> list[StateStore]:
        """Return the other lanes with something of the present owner."""
        return [one for one in self._kept.lanes if one is not self and one.live.key.owner == self.live.key.owner]

    def _in_other_lanes(self) -> Iterator[State]:
        """Yield what the other lanes hold now, as states: copied if they are used."""
        for lane in self._others():
            sequence, live = lane.sequence, lane.live
            if len(sequence) >= MIN_TOKENS and sequence not in self._unusable:
                with sequence.lock:
                    tokens, first = token_bytes(sequence.tokens), sequence.first_saved()
                yield State(live.key, tokens, live.kind, first=first, history=live.history, lane=sequence)

    def _best_after_others(self, max_tokens: int) -> Plan:
        """Return the cheapest way, once other lanes have evaluated what their prompts have in common with this one."""
        while True:
            plan = self._best(max_tokens)
            ahead = 0
            waits = not (self.sequence.abort.is_set() or self.sequence.is_evaluated_here)
            for lane in self._others() if waits else ():
                shared = min(shared_tokens(lane._prompt, self._prompt), max_tokens)
                if lane._has_begun and len(lane.sequence) < shared:
                    ahead = max(ahead, shared - plan.n)
            if ahead < _MIN_HEAD:
                return plan
            self._kept.changed.wait(_LOOK_SECONDS)

    def _go(self, plan: Plan) -> Literal["", "memory", "disk"] | None:
        """Take the KV cache to the end of a plan; returns where its states were. None: one could not be used, and is
        dropped. Raises Aborted: stopped while a state was read; nothing has changed."""
        sequence, base = self.sequence, plan.base
        states = [one for one in (base, plan.partial) if one is not None]
        on_disk = any(one.data is None and one.lane is None for one in states)
        source = "" if not states else "disk" if on_disk else "memory"
        loaded: list[tuple[State, np.ndarray]] = []
        for one in states:
            one.used = self._kept.requests
            data = self._loaded(one)
            # Of another lane the plan knew a draft too, which was rejected meanwhile.
            if data is None or shared_tokens(one.tokens, self._prompt) < plan.n:
                return self._drop(one)
            loaded.append((one, data))
        drafted, target = base.draft if base is not None else None, self._draft
        of_draft = None
        if drafted is not None and target is not None:
            held = shared_tokens(token_bytes(target.tokens), self._prompt)
            if shared_tokens(drafted.tokens, self._prompt) >= held + MIN_TOKENS:
                of_draft = self._loaded(drafted)
        for one, data in loaded:
            if not sequence.set_state(one.list(), data, partial=not one.is_whole):
                return self._drop(one)
        if drafted is not None and target is not None and of_draft is not None:
            target.set_state(drafted.list(), of_draft)
        return source if sequence.truncate(plan.n) == plan.n else self._drop(base)

    def _drop(self, state: State | None) -> None:
        if state is not None and state.lane is not None:
            self._unusable.append(state.lane)
        self._kept.states = [one for one in self._kept.states if one is not state]

    def _loaded(self, state: State) -> np.ndarray | None:
        """Return the data of a state, now kept if it was read and there is room. None: it is gone. Raises Aborted."""
        if state.lane is not None:
            with state.lane.lock:  # its answer may have gone on
                if state.lane.state_size() > available_bytes() // 2:
                    return None
                state.tokens = token_bytes(state.lane.tokens)
                return state.lane.state()
        if state.data is not None or state.file is None or state.part is None or self._files is None:
            return state.data
        if state.part.nbytes > available_bytes() // 2:
            return None
        self._kept.changed.release()  # a disk may be slow, and others begin and evaluate meanwhile
        try:
            data = self._read(self._files, state.file, state.part)
        finally:
            self._kept.changed.acquire()
        if data is not None and self._make_room(data.nbytes, (state,)):
            state.data = data
        return data

    def _read(self, files: StateFiles, file: Path, part: SavedPart) -> np.ndarray | None:
        """Read a state as `StateFiles.read` does. What the engine's thread would wait for is read on another one: it
        evaluates what other answers wait for meanwhile."""
        read, passes = functools.partial(files.read, file, part, self.sequence.abort.is_set), self._passes
        if passes is None or not passes.is_here:
            return read()
        with ThreadPoolExecutor(1, initializer=leave_cores) as threads:
            reading = threads.submit(read)
            reading.add_done_callback(lambda _: passes.wake())
            passes.run(reading.done)
        return reading.result()

    @_alone
    def leave(self, spared: Collection[State] = (), *, keep: bool = True, save: bool = True) -> None:
        """Keep what the KV cache holds before it is used for something else: in memory, on disk if much is new."""
        if not self.live.key.chat:  # nobody's: random tokens of a measurement
            return
        self._mend()
        if keep and len(self.sequence) >= MIN_TOKENS:
            self._whole(spared)
        if save:
            self.save()

    def set_aside(self) -> bool:
        """Keep the chat in memory and empty the KV cache for a measurement; False, and nothing done, without room."""
        self._mend()
        if self.live.key.chat and len(self.sequence) >= MIN_TOKENS and self._whole() is None:
            return False
        self.sequence.clear()
        self.live = Live()
        return True

    def _mend(self) -> None:
        """Go back to before a stopped batch, which has spoilt a recurrent state."""
        if not self.sequence.is_broken:
            return
        held = token_bytes(self.sequence.tokens)
        for one in sorted(self._own(StateKind.PARTIAL), key=len, reverse=True):
            if one.data is not None and held.startswith(one.tokens):
                self.sequence.set_state(one.list(), one.data, partial=True)
                return
        self.sequence.clear()

    def _whole(self, spared: Collection[State] = (), *, to_save: bool = False) -> State | None:
        """Keep what the KV cache holds as a state, and return it; None when there is no room, unless it is `to_save`.
        What it extends goes, but never the `spared`."""
        sequence, live, tokens = self.sequence, self.live, token_bytes(self.sequence.tokens)
        for one in self._own(StateKind.WHOLE, StateKind.HEAD):
            if one.tokens == tokens and one.data is not None:
                one.history = one.history or live.history.copy()
                return one
        drafted = token_bytes(self._draft.tokens) if self._draft is not None else b""
        draft = self._draft if 2 * len(drafted) >= len(tokens) and tokens.startswith(drafted) else None
        size = sequence.state_size() + (draft.state_size() if draft is not None else 0)
        has_room = self._make_room(size, spared)
        if not has_room and not to_save:
            return None
        state = State(live.key, tokens, StateKind.WHOLE, sequence.state(), sequence.first_saved())
        state.history, state.used, state.is_once = live.history.copy(), self._kept.requests, live.is_once
        if draft is not None:
            state.draft = State(live.key, drafted, StateKind.WHOLE, draft.state())
        if has_room and not sequence.partial_bytes:
            extended = [one for one in self._own(StateKind.WHOLE) if tokens.startswith(one.tokens)]
            self._kept.states = [one for one in self._kept.states if one not in extended or one in spared]
        if has_room:
            self._kept.states.append(state)
        return state

    def is_quick(self, n: int) -> bool:
        """Return whether a stop can wait until a batch of `n` tokens is evaluated, and nothing of it is lost."""
        return n * self._kept.token_seconds <= _QUICK_SECONDS

    @_alone
    def evaluated(self, n: int, seconds: float) -> None:
        """Note that `n` tokens of the prompt took `seconds`; checkpoint if that is due: copying takes some time too."""
        self._kept.changed.notify_all()
        self._seconds += seconds
        if n >= MIN_TOKENS:
            self._kept.token_seconds += (seconds / n - self._kept.token_seconds) / 4
        is_due = len(self.sequence) - self._at >= SPACING and self._copying <= _COPY_SHARE * self._seconds
        if is_due and self.sequence.partial_bytes:
            self.checkpoint()

    @_alone
    def checkpoint(self, row: np.ndarray | None = None) -> None:
        """Keep what going back to here takes, and the `row` of logits after the last token."""
        sequence, start = self.sequence, perf_counter()
        tokens = self._prompt[: len(sequence) * TOKEN_BYTES]
        kind = StateKind.PARTIAL if sequence.is_divisible else StateKind.WHOLE
        kinds = (kind,) if kind is StateKind.PARTIAL else (kind, StateKind.HEAD)
        state = next((one for one in self._own(*kinds) if one.tokens == tokens), None)
        state = state or State(self.live.key, tokens, kind, is_once=self.live.is_once)
        size = sequence.state_size(partial=True) if sequence.partial_bytes and state.data is None else 0
        if not self._make_room(size + (row.nbytes if row is not None else 0), (state,)):
            return
        if size:
            state.data = sequence.state(partial=True)
        if row is not None:
            state.row = row.copy()
        state.used = self._kept.requests
        self._drop(state)
        self._kept.states.append(state)
        self._at, self._seconds, self._copying = len(sequence), 0.0, perf_counter() - start

    @_alone
    def record(self, prompt: RenderedPrompt, answer: list[int]) -> None:
        """Keep the text of what the KV cache holds now."""
        self.live.history.record(prompt.text, prompt.tokens, answer, self.piece)
        self._write_heads()
        if self._files is not None and self._files.limit and self._kept.note is None:
            size = self.sequence.state_size()
            if size > self._files.limit:
                self._kept.note = (
                    f"The KV cache of this chat ({size / 1e9:.1f} GB) is larger than engine.saved_kv_gb "
                    f"({self._files.limit / 1e9:g}): it is not kept for a restart. Raise the setting to keep it."
                )

    @_alone
    def take_note(self) -> str:
        """Return what the user should know, once."""
        if note := self._kept.note or "":
            self._kept.note = ""
        return note

    @_alone
    def save(self, *, at_end: bool = False, waits: bool = False) -> None:
        """Begin to write the conversation in the KV cache if enough of it would be lost.

        It is written whole, so a long one is written again only when it has grown by a third: at most four times what
        was added, in all. `at_end`: as it is the last opportunity, also less. `waits`: after what is being written,
        else not now."""
        files, sequence = self._files, self.sequence
        self._write_heads()
        if files is None or not self.live.key.on_disk or (files.writer.is_busy and not waits):
            return
        if self.live.is_once and not at_end:
            return
        self._mend()
        tokens = token_bytes(sequence.tokens)
        saved = [one for one in self._own() if one.is_whole and one.file is not None]
        saved = [one for one in saved if one.key == self.live.key or one.kind is StateKind.HEAD]
        held = max((self._usable(one, tokens) for one in saved), default=0)
        new = len(sequence) - held
        if not (new >= MIN_TOKENS if at_end else new * _SAVE_SHARE >= len(sequence) > 0 and self._budget.allows()):
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
        files.write(self.live.key.chat, parts, self._draft_key)
        self._budget.spend(sum(one.restored_bytes for one in parts))

    @_alone
    def forget(self, chat_id: str) -> bool:
        """Drop a chat, in memory and on disk, and what has no name and may tell of it; "": everything in memory.
        Returns whether what the KV cache holds was dropped."""
        stem = kv_stem(chat_id)
        self._kept.states = [one for one in self._kept.states if chat_id and one.key.chat != stem and one.key.on_disk]
        if self._files is not None:
            self._files.forget(stem)
        if chat_id and self.live.key.chat != stem and self.live.key.on_disk:
            return False
        self.sequence.clear()
        self.live = Live(StateKey(owner=self.live.key.owner))
        return True

    @_alone
    def close(self, is_cancelled: Callable[[], bool]) -> None:
        """Save what the KV cache holds, unless `is_cancelled` meanwhile; the lane used last also what no lane does."""
        if (files := self._files) is not None:
            files.writer.finish(is_cancelled)
            while self._kept.unwritten and self._budget.allows() and not is_cancelled():
                self._write_heads()
                files.writer.finish(is_cancelled)
            self.save(at_end=True)
            files.writer.finish(is_cancelled)
            files.drop(self.live.key.chat)
            if self is not max(self._kept.lanes, key=lambda one: one.used):
                return
            # And conversations that others came after.
            live = [lane.live.key for lane in self._kept.lanes]
            kept = [one for one in self._kept.states if one.kind is StateKind.WHOLE and one.history is not None]
            newest = {one.key: one for one in sorted(kept, key=lambda one: (one.used, len(one)))}
            for one in sorted(newest.values(), key=lambda one: -one.used)[:_SAVED_LEFT]:
                is_due = one.file is None and one.key not in live and one.key.on_disk and not one.is_once
                if is_due and self._budget.allows() and not is_cancelled():
                    files.write(one.key.chat, [one], self._draft_key)
                    self._budget.spend(one.restored_bytes)
                    files.writer.finish(is_cancelled)

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the memory tier in use."""
        return sum(one.memory_bytes for one in self._kept.states)

    def _make_room(self, size: int, spared: Collection[State]) -> bool:
        """Drop the states whose loss costs least until `size` bytes fit; False when they do not."""
        if size > self.limit or size > available_bytes() // 2:
            return False
        held: list[bytes] = []
        while self.n_bytes + size > self.limit or sum(one.memory_bytes > 0 for one in self._kept.states) >= _MAX_STATES:
            left = [one for one in self._kept.states if one.memory_bytes and one not in spared]
            if not left:
                return False
            once = [one for one in left if one.is_once]
            n_bytes = sum(one.memory_bytes for one in once)
            if n_bytes * _ONCE_SHARE > self.limit or len(once) * _ONCE_SHARE > _MAX_STATES:
                left = once
            held = held or [token_bytes(lane.sequence.tokens) for lane in self._kept.lanes]
            by_size = self.n_bytes + size > self.limit  # else there are too many
            victim = min(left, key=lambda one: self._worth(one, held) / (one.memory_bytes if by_size else 1))
            if victim.file is not None:
                victim.free()
            else:
                self._drop(victim)
        return True

    def _worth(self, state: State, held: list[bytes]) -> float:
        """Return the tokens that would be re-evaluated without a state, by its age. `held`: the tokens of the lanes."""
        others = [one for one in self._kept.states if one is not state and one.key.owner == state.key.owner]
        is_partial = not state.is_whole and state.restored_bytes > 0
        holders = (*held, *(one.tokens for one in others if one.is_whole))
        if is_partial and not any(tokens.startswith(state.tokens) for tokens in holders):
            return 0.0  # nothing holds the attention that it goes back on
        before = [one for one in others if state.tokens.startswith(one.tokens) and (one.is_whole or is_partial)]
        gap = len(state) - max(map(len, before), default=0) if state.restored_bytes else 1
        return gap / (1 + self._kept.requests - state.used)


def _saved(file: Path, index: Index, part: SavedPart) -> State:
    key = StateKey(owner=index.owner, chat=file.name.partition("-")[0], on_disk=True)
    return State(key, index.tokens[: part.n * TOKEN_BYTES], part.kind, first=part.first, file=file, part=part)


def _hashed(owner: str) -> str:
    return hashlib.sha256(owner.encode()).hexdigest()[:20] if owner else ""
