"""The tokens in the KV cache of one context, the batches that put them there, and rolling back rejected ones.

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
  checkpoint nor rollback copies anything, but the accepted tokens after it have to be re-evaluated.

(Sources: src/llama-memory-recurrent.cpp, src/llama-memory-hybrid.cpp, src/llama-arch.cpp and src/llama-kv-cache.cpp
of the pinned llama.cpp.) Which way works is found out by doing it (`detect_rollback`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection
from collections.abc import Sequence as Tokens
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from cpuchat.base.errors import GenerationFailed
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.bindings import AbortFlag, llama
from cpuchat.models.fit import max_snapshots
from cpuchat.speculation.drafters.drafter import MAX_DEPTH

if TYPE_CHECKING:
    from cpuchat.engine.llama.threads import ThreadPool

RollbackKind = Literal["exact", "bounded", "checkpoint", "none"]

TEXT, CHECKPOINT = 0, 1
"""Sequence ids."""
_SHORT = 8


class Rollback:
    """Rolls back one context by dropping any number of the newest tokens, as attention can. `max_draft`: longest draft
    that can be rolled back; 0 = none. `note`: one plain sentence for the user when this limits speculation, else ""."""

    kind: RollbackKind = "exact"
    note = ""

    def __init__(self, kv_cache: Any, max_draft: int = MAX_DEPTH, id: int = TEXT) -> None:
        self.max_draft = max_draft
        self._kv_cache = kv_cache
        self._id = id

    def checkpoint(self) -> None:
        """Remember the present state as the only one to roll back to."""

    def forget(self) -> None:
        """Drop what `checkpoint` remembers: it takes room in the KV cache."""

    def roll_back_to(self, n: int, n_checkpoint: int, passes: int) -> int | None:
        """Go back to the first `n` tokens, or to an earlier point that is not before the checkpoint at `n_checkpoint`
        tokens, `passes` batches ago. Returns how many tokens are held then; None: impossible, the KV cache must be
        cleared."""
        return n if llama.llama_memory_seq_rm(self._kv_cache, self._id, n, -1) else None


class Bounded(Rollback):
    """Goes back by at most `max_draft` tokens within the last pass; at least its first token stays."""

    kind: RollbackKind = "bounded"

    def __init__(self, kv_cache: Any, max_draft: int) -> None:
        super().__init__(kv_cache, max_draft)
        if max_draft < _SHORT:
            unit = "token" if max_draft == 1 else "tokens"
            self.note = f"This model can roll back at most {max_draft} {unit}, which limits the draft depth."

    def roll_back_to(self, n: int, n_checkpoint: int, passes: int) -> int | None:
        # llama.cpp would also go back further, to what earlier passes left in the snapshots.
        return super().roll_back_to(n, n_checkpoint, passes) if n > n_checkpoint and passes == 1 else None


class Checkpoint(Rollback):
    """Holds on to the state at the checkpoint in a second sequence."""

    kind: RollbackKind = "checkpoint"
    note = "Drafting costs more with this model: after a rejection, the accepted tokens are re-evaluated."

    def forget(self) -> None:
        llama.llama_memory_seq_rm(self._kv_cache, CHECKPOINT, -1, -1)

    def checkpoint(self) -> None:
        self.forget()
        llama.llama_memory_seq_cp(self._kv_cache, TEXT, CHECKPOINT, -1, -1)

    def roll_back_to(self, n: int, n_checkpoint: int, passes: int) -> int | None:
        if int(llama.llama_memory_seq_pos_max(self._kv_cache, CHECKPOINT)) + 1 != n_checkpoint:
            return None
        llama.llama_memory_seq_rm(self._kv_cache, TEXT, -1, -1)
        llama.llama_memory_seq_cp(self._kv_cache, CHECKPOINT, TEXT, -1, -1)
        return n_checkpoint


class NoRollback(Rollback):
    """Cannot roll back anything."""

    kind: RollbackKind = "none"
    note = "This model cannot roll back rejected tokens, so drafting is off."

    def __init__(self, kv_cache: Any) -> None:
        super().__init__(kv_cache, 0)


def has_recurrent_state(model: Any) -> bool:
    """Return whether the llama_model has a recurrent state, alone or beside attention."""
    return bool(llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model))


def request_rollback(params: Any, n_rs_seq: int) -> None:
    """Set in llama_context_params what rolling back needs; only for a model that `has_recurrent_state`: `n_rs_seq`
    snapshots, fewer if a ubatch is too short, or a second sequence when that is 0. Each costs memory
    (`fit.rollback_bytes`)."""
    n_rs_seq = min(n_rs_seq, max_snapshots(params.n_ubatch))
    if n_rs_seq > 0:
        params.n_rs_seq = n_rs_seq
    else:
        params.n_seq_max = 2
        params.kv_unified = True  # one cache for both, each with room for the whole context


OK, _NO_SLOT, ABORTED = 0, 1, 2
_MAX_ROWS = 256


def _pointer(data: np.ndarray) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class Aborted(Exception):
    """Raised when the abort flag stopped a batch. The sequence holds what was finished before."""


class Sequence:
    """A sequence of a context: `tokens` is always exactly what its KV cache holds.

    Attention keeps tokens apart, so that the newest can be cut off at any place. A recurrent state cannot be cut, and a
    window-sized cache only as far as the window before the cut is still there. What cannot be cut is the partial state
    (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY in llama.h): it can be copied, and set again later to go back.

    Args:
        context: the llama_context; freed by its owner, after `free` here.
        n_vocab: length of a row of logits.
        abort: flag that stops a running batch.
        is_recurrent: the KV cache has a recurrent state, alone or beside attention.
        n_window: tokens of the attention window that some layers keep; 0: all layers keep everything.
        id: of the sequence in the context.
        lock: over the context, where others use it too.

    Attributes:
        is_shared: the last pass was, or may have been, over tokens of other answers too.
        rollback: how rejected tokens are rolled back: attention's way, unless a probe has found another.
        decode_seconds: time spent inside llama_decode since it was last set to 0.
        is_divisible: beside the partial state there is attention that keeps every token.
        partial_bytes: of a partial state; 0: none is needed, going back is cutting.
        pool: the threads that compute it.
        on_evaluated: told the place and number of the tokens of each batch, while what llama.cpp gave for it is there;
            0 tokens where others are in the KV cache from now on.
        is_broken: a stopped batch has left a part in the recurrent state: only `set_state` and `clear` make it usable.
    """

    def __init__(
        self,
        context: Any,
        *,
        n_vocab: int,
        abort: AbortFlag,
        is_recurrent: bool = False,
        n_window: int = 0,
        id: int = TEXT,
        lock: threading.RLock | None = None,
    ) -> None:
        self.context = context
        self.id = id
        self.lock = lock or threading.RLock()
        self.is_shared = False
        self.is_recurrent = is_recurrent
        self.is_broken = False
        self.is_divisible = True
        self.partial_bytes = 0
        self._n_window = n_window
        self.abort = abort
        self.tokens: list[int] = []
        self.n_ctx = int(llama.llama_n_ctx_seq(context))
        self.n_batch = int(llama.llama_n_batch(context))
        self.n_ubatch = min(int(llama.llama_n_ubatch(context)), self.n_batch)
        self.decode_seconds = 0.0
        self.n_vocab = n_vocab
        self._kv_cache = llama.llama_get_memory(context)
        self.rollback = Rollback(self._kv_cache, id=id)
        self._n_checkpoint = self._passes = 0  # tokens at the checkpoint, batches since
        self.pool: ThreadPool | None = None
        self.on_evaluated: Callable[[int, int], None] | None = None
        self._never = AbortFlag()
        self._is_stoppable = True
        llama.llama_set_abort_callback(context, abort.callback, abort.data)
        # llama_batch is passed by value, but its arrays stay: these views are set once and written to ever after.
        self._batch = llama.llama_batch_init(self.n_batch, 0, 1)
        shape = (self.n_batch,)
        self._token = np.ctypeslib.as_array(self._batch.token, shape)
        self._pos = np.ctypeslib.as_array(self._batch.pos, shape)
        self._wanted = np.ctypeslib.as_array(self._batch.logits, shape)
        np.ctypeslib.as_array(self._batch.n_seq_id, shape)[:] = 1
        for i in range(self.n_batch):
            self._batch.seq_id[i][0] = id
        # For one token: memoryviews and a plain call, because numpy's item access is slow when it isn't in the caches.
        self._first_token = memoryview(self._token.data).cast("B").cast("i")
        self._first_pos = memoryview(self._pos.data).cast("B").cast("i")
        self._is_stepping = False
        self._row: np.ndarray | None = None  # of the step before
        self._offset = 0  # of its first token in the last pass
        self._rows: dict[int, np.ndarray] = {}  # views of llama.cpp's output buffer by address

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Tokens[int], *, n_outputs: int = 0, whole: bool = False) -> None:
        """Evaluate at most `n_batch` tokens; the last `n_outputs` get a row of logits. `whole`: a recurrent model does
        not stop within the batch. Raises Aborted: a leading part may be held; GenerationFailed: llama.cpp rejected the
        batch."""
        n, past = len(tokens), len(self.tokens)
        self._is_stepping = False
        self._token[:n] = tokens
        self._pos[:n] = np.arange(past, past + n)
        self._wanted[:n] = 0
        if n_outputs:
            self._wanted[n - n_outputs : n] = 1
        self._batch.n_tokens = n
        self.evaluate(tokens, whole)

    def verify(self, tokens: Tokens[int], chances: Tokens[float]) -> int:
        """Evaluate a token and a draft after it, whole, each with a row of logits. Returns how many tokens of the draft
        were: all, or in a shared pass as many as pay, by the `chances` that each is accepted. Raises as `extend`."""
        self.extend(tokens, n_outputs=len(tokens), whole=True)
        return len(tokens) - 1

    def step(self, token: int) -> np.ndarray:
        """Evaluate one token, whole, and return the logits after it. Raises as `extend`."""
        self._first_token[0] = token
        self._first_pos[0] = len(self.tokens)
        if self._row is not None and self._is_stepping:
            # As the step before. llama.cpp keeps its row where it is while no batch asks for more than one.
            self.evaluate((token,), True)
            return self._row if self._is_stepping else self.logits(0)
        self._wanted[0] = 1
        self._batch.n_tokens = 1
        self.evaluate((token,), True)
        self._is_stepping = not self.is_shared
        self._row = self.logits(0)
        return self._row

    def evaluate(self, tokens: Tokens[int], whole: bool) -> None:
        """Evaluate the batch, which holds these tokens. Raises as `extend`."""
        if self.is_recurrent:
            if self.abort.is_set():
                raise Aborted
            if whole == self._is_stoppable:  # the flag stops the batch only before it from now on, or within it, too
                self._is_stoppable = not whole
                flag = self._never if whole else self.abort
                llama.llama_set_abort_callback(self.context, flag.callback, flag.data)
        start = perf_counter()
        with self.lock:
            if self.pool is not None:
                self.pool.prepare(self, start)
            status = llama.llama_decode(self.context, self._batch)
        self.decode_seconds += perf_counter() - start
        if status == OK:
            past = len(self.tokens)
            self.tokens.extend(tokens)
            self._passes += 1
            if self.on_evaluated is not None:
                self.on_evaluated(past, len(tokens))
            return
        if self.is_recurrent:
            self.is_broken = True
        else:  # llama.cpp keeps those of an unfinished batch's ubatches that did finish
            held = int(llama.llama_memory_seq_pos_max(self._kv_cache, self.id)) + 1
            past = len(self.tokens)
            self.tokens.extend(tokens[: max(held - past, 0)])
            self.truncate(min(held, past + len(tokens)))
        raise self.failure(status)

    def failure(self, status: int) -> Exception:
        """Return what to raise for what llama_decode returned."""
        if status == ABORTED:
            return Aborted()
        if status == _NO_SLOT:
            hint = "Start a new chat or raise --ctx."
            return GenerationFailed(f"The context of {self.n_ctx:,} tokens is full.", hint)
        reason = " ".join(bindings.log.lines(errors_only=True)[-2:]) or f"code {status}"
        return GenerationFailed(f"llama.cpp failed to evaluate a batch: {reason}.", "Retry, or reload the model.")

    @property
    def has_company(self) -> bool:
        """Return whether the next pass may be over tokens of other answers too."""
        return False

    @property
    def is_evaluated_here(self) -> bool:
        """Return whether this thread evaluates the batches of all answers: it cannot wait for one."""
        return True

    def release(self) -> None:
        """Need the rows of the last pass no longer: others may go on."""

    def logits(self, index: int) -> np.ndarray:
        """Return the logits of the token at `index` of the last batch: float32 of shape (n_vocab,), a view that is
        valid until the next batch. Raises GenerationFailed: that token has no logits."""
        with self.lock:
            address = bindings.logits_address(self.context, index + self._offset)
        row = self._rows.get(address)
        if row is None:
            if not address:
                raise GenerationFailed("llama.cpp has no logits for that token.", "Reload the model.")
            if len(self._rows) > _MAX_ROWS:  # the buffer has moved, more than once
                self._rows.clear()
            row = np.ctypeslib.as_array((ctypes.c_float * self.n_vocab).from_address(address))
            self._rows[address] = row
        return row

    def can_cut(self, n: int) -> bool:
        """Return whether the KV cache can be cut to its first `n` tokens, as if the others had never been there."""
        if n == 0 or (n == len(self.tokens) and not self.is_broken):
            return True
        return self.can_cut_from(self.first_held(), n)

    def can_cut_from(self, first: int, n: int) -> bool:
        """Return the same for a KV cache of which `first` is the first position that every layer holds."""
        return not self.is_recurrent and first <= max(0, n - self._n_window + 1)

    def first_held(self) -> int:
        """Return the first position that every layer still holds; -1: nothing is held."""
        with self.lock:
            return int(llama.llama_memory_seq_pos_min(self._kv_cache, self.id)) if self._n_window else 0

    def truncate(self, n: int) -> int:
        """Drop all but the first `n` tokens; returns how many are left, 0 if they cannot be dropped in part."""
        with self.lock:
            n = min(n, len(self.tokens))
            if n == 0 or not self.can_cut(n):
                self.clear()
                return 0
            if n < len(self.tokens) and not llama.llama_memory_seq_rm(self._kv_cache, self.id, n, -1):
                self.clear()
            del self.tokens[n:]
            return len(self.tokens)

    def find_divisions(self, lanes: Collection[Sequence]) -> None:
        """Find out what a partial state of these is, with a token in this one: not all models use their windows."""
        size = self.state_size(partial=True)
        is_all = size == self.state_size()
        for lane in lanes:
            lane.is_divisible = not (is_all and self.is_recurrent)
            if is_all:
                lane._n_window = 0
            lane.partial_bytes = size if self.is_recurrent else size * min(lane._n_window, self.n_ctx)

    @property
    def max_draft(self) -> int:
        """Longest draft that can be evaluated in one pass and rolled back; 0 = none."""
        return min(self.rollback.max_draft, self.n_ubatch - 1)

    def checkpoint(self) -> None:
        """Mark the point that `roll_back_to` may return to. Costs next to nothing."""
        self.rollback.checkpoint()
        self._n_checkpoint, self._passes = len(self.tokens), 0

    def roll_back_to(self, n: int) -> int:
        """Keep the first `n` tokens, as if no other had been evaluated since `checkpoint`. Drops the logits.

        Cheap for the batch after the checkpoint while its first token is kept; else the kept tokens after the
        checkpoint are re-evaluated, or all `n`. Returns in how many passes that was. Raises ValueError: `n` is less
        than at the checkpoint, or more than there are; as `extend`."""
        if not self._n_checkpoint <= n <= len(self.tokens):
            raise ValueError(f"cannot keep {n} of {len(self.tokens)} tokens with a checkpoint at {self._n_checkpoint}")
        if n == len(self.tokens):
            return 0
        with self.lock:
            held = self.rollback.roll_back_to(n, self._n_checkpoint, self._passes)
            again = self.tokens[held or 0 : n]
            if held is None:
                self.clear()
            else:
                del self.tokens[held:]
        starts = range(0, len(again), self.n_batch)
        for at in starts:
            self.extend(again[at : at + self.n_batch], whole=True)
        return len(starts)

    def clear(self) -> None:
        with self.lock:
            self._empty()
            self.tokens.clear()
        if self.on_evaluated is not None:
            self.on_evaluated(0, 0)
        self._n_checkpoint, self.is_broken = 0, False

    def _empty(self) -> None:
        llama.llama_memory_clear(self._kv_cache, False)

    def first_saved(self) -> int:
        """Return the first position that every layer has in `state`: no more than a window before the end."""
        return max(self.first_held(), len(self.tokens) - self._n_window) if self._n_window else 0

    def state_size(self, *, partial: bool = False) -> int:
        with self.lock:
            return int(llama.llama_state_seq_get_size_ext(self.context, self.id, int(partial)))

    def state(self, *, partial: bool = False) -> np.ndarray:
        """Return a copy of the KV cache, or of its partial state: uint8. Cannot be cancelled."""
        with self.lock:
            data = np.empty(self.state_size(partial=partial), np.uint8)
            n = llama.llama_state_seq_get_data_ext(self.context, _pointer(data), data.size, self.id, int(partial))
        return data[: int(n)]

    def set_state(self, tokens: Tokens[int], data: np.ndarray, *, partial: bool = False) -> bool:
        """Replace the KV cache by what `state` gave for `tokens` with the same model and cache types. llama.cpp checks
        shapes and little else: the caller vouches for the content. Returns False, with an empty sequence, when it was
        rejected. `partial`: go back to `tokens`, with which the KV cache begins, by their partial state."""
        with self.lock:
            if not partial:
                self.clear()
            self.rollback.forget()
            read = llama.llama_state_seq_set_data_ext(self.context, _pointer(data), data.size, self.id, int(partial))
            if partial and read:
                llama.llama_memory_seq_rm(self._kv_cache, self.id, len(tokens), -1)
            if not read or int(llama.llama_memory_seq_pos_max(self._kv_cache, self.id)) + 1 != len(tokens):
                self.clear()
                return False
            self.tokens, self.is_broken, self._n_checkpoint = list(tokens), False, 0
        if self.on_evaluated is not None and not partial:
            self.on_evaluated(len(tokens), 0)
        return True

    def free(self) -> None:
        """Free the batch; call it before the context is freed, and no other method afterwards."""
        self._row = None
        self._rows.clear()
        llama.llama_batch_free(self._batch)


_PROBE: Final = (100, 200, 300, 400)
"""Different tokens that every real vocabulary makes use of."""


def detect_rollback(sequence: Sequence) -> Rollback:
    """Return how this context, with 3 rows of logits, rolls back. The sequence is emptied. Raises Aborted."""
    context, kv_cache = sequence.context, llama.llama_get_memory(sequence.context)
    if sequence.n_batch <= len(_PROBE):
        return NoRollback(kv_cache)  # such batches are of no use for drafts anyway
    room = min(MAX_DEPTH, sequence.n_batch - 1)
    snapshots = min(int(llama.llama_n_rs_seq(context)), room)
    ways: list[Rollback] = [Bounded(kv_cache, snapshots) if snapshots else Rollback(kv_cache, room)]
    if int(llama.llama_n_seq_max(context)) > CHECKPOINT:
        ways.append(Checkpoint(kv_cache, room))
    return next((way for way in ways if can_roll_back(sequence, way)), NoRollback(kv_cache))


def can_roll_back(sequence: Sequence, way: Rollback) -> bool:
    """Reject two of three tokens, go on with the first of them, and see whether the logits know of the rejected ones.

    Passes of other lengths round in other ways, so what counts is that they are nearer to those of a text without them
    than to those of a text in which nothing was rolled back."""
    first, kept, *rejected = (token % sequence.n_vocab for token in _PROBE)
    sequence.clear()
    try:
        sequence.extend([first, kept, *rejected, rejected[0]], n_outputs=3)
        right, wrong = sequence.logits(2).copy(), sequence.logits(4).copy()
        sequence.clear()
        sequence.extend([first])
        way.checkpoint()
        sequence.extend([kept, *rejected[: way.max_draft]])
        held = way.roll_back_to(2, 1, 1)
        if held is None:
            return False
        del sequence.tokens[held:]
        if held < 2:
            sequence.extend([kept])
        row = sequence.step(rejected[0])
        return bool(np.linalg.norm(row - right) < 0.5 * np.linalg.norm(wrong - right))
    except GenerationFailed:  # the positions are not what they should be
        return False
    finally:
        sequence.clear()
