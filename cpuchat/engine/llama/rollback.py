"""Taking back the refused tokens of a verify pass, whatever kind of memory the model has.

Attention keeps every token apart: any number of the newest can be dropped. A recurrent state (Mamba, RWKV, the linear
layers of hybrids) holds all tokens in one, and llama.cpp offers two ways back to an earlier one:

- snapshots (`llama_context_params.n_rs_seq`, some architectures): a pass also leaves the states before its last
  n tokens, and `llama_memory_seq_rm` chooses one. Good for the pass that wrote them and no other: llama.cpp checks
  the distance only and would go on from whatever an earlier pass left there.
- a second sequence, which shares the state until the first one goes on (`llama_memory_seq_cp`): setting a mark copies
  nothing, going back to it neither, but the tokens after it that were right have to be evaluated again.

(Sources: src/llama-memory-recurrent.cpp, src/llama-memory-hybrid.cpp and src/llama-arch.cpp of the pinned llama.cpp.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np

from cpuchat.engine.llama.bindings import llama
from cpuchat.errors import GenerationFailed
from cpuchat.models.fit import most_snapshots
from cpuchat.speculation.drafters.drafter import MAX_DEPTH

if TYPE_CHECKING:
    from cpuchat.engine.llama.sequence import Sequence

RollbackKind = Literal["exact", "bounded", "checkpoint", "none"]

_TEXT, _MARK = 0, 1  # sequence ids
_PROBE: Final = (100, 200, 300, 400)
"""Tokens of the probe: different ones, of which every real vocabulary makes use."""
_SHORT: Final = 8


class Rollback(Protocol):
    """How one context goes back. `note` is one plain sentence for the user when that limits speculation, else ""."""

    @property
    def kind(self) -> RollbackKind: ...

    @property
    def max_draft(self) -> int:
        """Longest draft that can be taken back; 0 = none."""
        ...

    @property
    def note(self) -> str: ...

    def mark(self) -> None:
        """Remember the state as it is now, as the only one to go back to."""
        ...

    def take_back(self, n: int, marked: int, passes: int) -> int | None:
        """Go back to the first `n` tokens, or to some earlier point that is not before `marked`.

        Args:
            marked: tokens that there were at the mark.
            passes: batches evaluated since then.

        Returns:
            How many tokens the memory holds now: the caller evaluates the rest of `n` again. None when that was not
            possible; the memory must be cleared then.
        """
        ...


class Exact:
    """Every token is kept apart."""

    kind: RollbackKind = "exact"
    note = ""

    def __init__(self, memory: Any, max_draft: int = MAX_DEPTH) -> None:
        self.max_draft = max_draft
        self._memory = memory

    def mark(self) -> None:
        pass

    def take_back(self, n: int, marked: int, passes: int) -> int | None:
        return n if llama.llama_memory_seq_rm(self._memory, _TEXT, n, -1) else None


class Bounded(Exact):
    """The last pass left the states before its newest `max_draft` tokens; at least its first token stays."""

    kind: RollbackKind = "bounded"

    def __init__(self, memory: Any, max_draft: int) -> None:
        super().__init__(memory, max_draft)
        if max_draft < _SHORT:
            unit = "token" if max_draft == 1 else "tokens"
            self.note = f"This model can take back {max_draft} {unit} at most, so drafts are no longer than that."

    def take_back(self, n: int, marked: int, passes: int) -> int | None:
        # llama.cpp would also go back further, to what earlier passes left in the snapshots.
        return super().take_back(n, marked, passes) if n > marked and passes == 1 else None


class Checkpoint:
    """A second sequence holds on to the state at the mark."""

    kind: RollbackKind = "checkpoint"
    note = "Drafting costs more with this model: after a refused token it evaluates the accepted ones before it again."

    def __init__(self, memory: Any, max_draft: int = MAX_DEPTH) -> None:
        self.max_draft = max_draft
        self._memory = memory

    def mark(self) -> None:
        llama.llama_memory_seq_rm(self._memory, _MARK, -1, -1)
        llama.llama_memory_seq_cp(self._memory, _TEXT, _MARK, -1, -1)

    def take_back(self, n: int, marked: int, passes: int) -> int | None:
        if int(llama.llama_memory_seq_pos_max(self._memory, _MARK)) + 1 != marked:
            return None
        llama.llama_memory_seq_rm(self._memory, _TEXT, -1, -1)
        llama.llama_memory_seq_cp(self._memory, _MARK, _TEXT, -1, -1)
        return marked


class NoRollback:
    """Nothing can be taken back."""

    kind: RollbackKind = "none"
    max_draft = 0
    note = "This model cannot take back a refused token, so nothing is drafted for it."

    def mark(self) -> None:
        raise ValueError("nothing can be taken back in this context")

    def take_back(self, n: int, marked: int, passes: int) -> int | None:
        return None


def keeps_state(model: Any) -> bool:
    """Whether the llama_model has a recurrent state, alone or beside attention."""
    return bool(llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model))


def request(params: Any, n_rs_seq: int) -> None:
    """Ask in llama_context_params for what going back needs; only for a model that `keeps_state`.

    `n_rs_seq` snapshots, or a second sequence when that is 0. Both cost memory: a state each (`fit.rollback_bytes`).
    Fewer snapshots are asked for when a ubatch is too short for them.
    """
    n_rs_seq = min(n_rs_seq, most_snapshots(params.n_ubatch))
    if n_rs_seq > 0:
        params.n_rs_seq = n_rs_seq
    else:
        params.n_seq_max = 2
        params.kv_unified = True  # one cache for both, each with room for the whole context


def detect(sequence: Sequence) -> Rollback:
    """Find out, by doing it, how this context goes back; `NoRollback` if it does not. The sequence is emptied.

    Costs 4 small passes, 8 when the first way turns out not to work. Needs a context with 3 rows of logits.

    Raises:
        Aborted: as `Sequence.extend`.
    """
    context, memory = sequence.context, llama.llama_get_memory(sequence.context)
    if sequence.n_batch <= len(_PROBE):
        return NoRollback()  # such batches are of no use for drafts anyway
    room = min(MAX_DEPTH, sequence.n_batch - 1)
    ways: list[Rollback] = []
    snapshots = min(int(llama.llama_n_rs_seq(context)), room)
    if snapshots:
        ways.append(Bounded(memory, snapshots))
    else:
        ways.append(Exact(memory, room))
    if int(llama.llama_n_seq_max(context)) > _MARK:
        ways.append(Checkpoint(memory, room))
    for way in ways:
        if _goes_back(sequence, way):
            return way
    return NoRollback()


def _goes_back(sequence: Sequence, way: Rollback) -> bool:
    """Refuse two of three tokens, go on with the first of them, and see whether the logits know of the refused ones.

    They may differ from those of a text without them by rounding, because passes of other lengths gave them. So what
    counts is that they are nearer to those than to the ones of a text in which nothing was taken back.
    """
    first, kept, *refused = (token % sequence.n_vocab for token in _PROBE)
    sequence.clear()
    try:
        sequence.extend([first, kept, *refused, refused[0]], n_outputs=3)
        right, wrong = sequence.logits(2).copy(), sequence.logits(4).copy()
        sequence.clear()
        sequence.extend([first])
        way.mark()
        sequence.extend([kept, *refused[: way.max_draft]])
        held = way.take_back(2, 1, 1)
        if held is None:
            return False
        del sequence.tokens[held:]
        if held < 2:
            sequence.extend([kept])
        row = sequence.step(refused[0])
        return bool(np.linalg.norm(row - right) < 0.5 * np.linalg.norm(wrong - right))
    except GenerationFailed:  # the positions are not what they should be
        return False
    finally:
        sequence.clear()
