"""Rolling back the rejected tokens of a verify pass, whatever kind of memory the model has.

Attention keeps every token apart: any number of the newest can be dropped. With window-sized caches (`swa_full` False)
any number of the last ubatch can: `find_slot` uses a cell again only when the first token of a ubatch cannot see it.
Further back, to `n` tokens, only while `llama_memory_seq_pos_min` is at most n + 1 - window (with chunks: the first
position of n's chunk), which llama.cpp does not check.

A recurrent state (Mamba, RWKV, the linear layers of hybrids) holds all tokens in one, and llama.cpp offers two ways
back to an earlier one:

- snapshots (`llama_context_params.n_rs_seq`, some architectures): a pass also leaves the states before its last
  n tokens, and `llama_memory_seq_rm` chooses one. Valid for the pass that wrote them only: llama.cpp checks the
  distance but not which pass, and would continue from whatever an earlier one left there.
- a second sequence, which shares the state until the first one continues (`llama_memory_seq_cp`): neither
  checkpoint nor rollback copies anything, but the accepted tokens after it have to be evaluated again.

(Sources: src/llama-memory-recurrent.cpp, src/llama-memory-hybrid.cpp, src/llama-arch.cpp and src/llama-kv-cache.cpp
of the pinned llama.cpp.)
"""

from __future__ import annotations

from typing import Any, Literal

from cpuchat.engine.llama.bindings import llama
from cpuchat.models.fit import most_snapshots
from cpuchat.speculation.drafters.drafter import MAX_DEPTH

RollbackKind = Literal["exact", "bounded", "checkpoint", "none"]

TEXT, CHECKPOINT = 0, 1
"""Sequence ids."""
_SHORT = 8


class Rollback:
    """Rolls back one context by dropping any number of the newest tokens, as attention can.

    Attributes:
        max_draft: longest draft that can be rolled back; 0 = none.
        note: one plain sentence for the user when this limits speculation, else "".
    """

    kind: RollbackKind = "exact"
    note = ""

    def __init__(self, memory: Any, max_draft: int = MAX_DEPTH) -> None:
        self.max_draft = max_draft
        self._memory = memory

    def checkpoint(self) -> None:
        """Remember the present state as the only one to roll back to."""

    def forget(self) -> None:
        """Drop what `checkpoint` remembers: it takes room in the memory."""

    def roll_back_to(self, n: int, n_checkpoint: int, passes: int) -> int | None:
        """Go back to the first `n` tokens, or to an earlier point that is not before the checkpoint.

        Args:
            n_checkpoint: tokens that there were at the checkpoint.
            passes: batches evaluated since then.

        Returns:
            How many tokens the memory holds now: the caller evaluates the rest of `n` again. None when that was not
            possible; the memory must be cleared then.
        """
        return n if llama.llama_memory_seq_rm(self._memory, TEXT, n, -1) else None


class Bounded(Rollback):
    """Goes back by at most `max_draft` tokens within the last pass; at least its first token stays."""

    kind: RollbackKind = "bounded"

    def __init__(self, memory: Any, max_draft: int) -> None:
        super().__init__(memory, max_draft)
        if max_draft < _SHORT:
            unit = "token" if max_draft == 1 else "tokens"
            self.note = f"This model can roll back at most {max_draft} {unit}, which limits the draft depth."

    def roll_back_to(self, n: int, n_checkpoint: int, passes: int) -> int | None:
        # llama.cpp would also go back further, to what earlier passes left in the snapshots.
        return super().roll_back_to(n, n_checkpoint, passes) if n > n_checkpoint and passes == 1 else None


class Checkpoint(Rollback):
    """Holds on to the state at the checkpoint in a second sequence."""

    kind: RollbackKind = "checkpoint"
    note = "Drafting costs more with this model: after a rejection, the accepted tokens are evaluated again."

    def forget(self) -> None:
        llama.llama_memory_seq_rm(self._memory, CHECKPOINT, -1, -1)

    def checkpoint(self) -> None:
        self.forget()
        llama.llama_memory_seq_cp(self._memory, TEXT, CHECKPOINT, -1, -1)

    def roll_back_to(self, n: int, n_checkpoint: int, passes: int) -> int | None:
        if int(llama.llama_memory_seq_pos_max(self._memory, CHECKPOINT)) + 1 != n_checkpoint:
            return None
        llama.llama_memory_seq_rm(self._memory, TEXT, -1, -1)
        llama.llama_memory_seq_cp(self._memory, CHECKPOINT, TEXT, -1, -1)
        return n_checkpoint


class NoRollback(Rollback):
    """Cannot roll back anything."""

    kind: RollbackKind = "none"
    note = "This model cannot roll back rejected tokens, so drafting is off."

    def __init__(self, memory: Any) -> None:
        super().__init__(memory, 0)

    def checkpoint(self) -> None:
        raise ValueError("this context cannot roll back")

    def roll_back_to(self, n: int, n_checkpoint: int, passes: int) -> int | None:
        return None


def has_recurrent_state(model: Any) -> bool:
    """Return whether the llama_model has a recurrent state, alone or beside attention."""
    return bool(llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model))


def request_rollback(params: Any, n_rs_seq: int) -> None:
    """Set in llama_context_params what rolling back needs; only for a model that `has_recurrent_state`.

    `n_rs_seq` snapshots, or a second sequence when that is 0. Both cost memory: a state each (`fit.rollback_bytes`).
    Fewer snapshots are requested when a ubatch is too short for them.
    """
    n_rs_seq = min(n_rs_seq, most_snapshots(params.n_ubatch))
    if n_rs_seq > 0:
        params.n_rs_seq = n_rs_seq
    else:
        params.n_seq_max = 2
        params.kv_unified = True  # one cache for both, each with room for the whole context
