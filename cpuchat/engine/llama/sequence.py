"""The tokens in the KV cache of one context, and the batches that put them there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Tokens
from time import perf_counter
from typing import Any

import numpy as np

from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.bindings import AbortFlag, llama
from cpuchat.engine.llama.rollback import Rollback
from cpuchat.errors import GenerationFailed

_OK, _NO_SLOT, _ABORTED = 0, 1, 2
_MAX_ROWS = 256


def _pointer(data: np.ndarray) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class Aborted(Exception):
    """Raised when the abort flag stopped a batch. The sequence holds what was finished before."""


class Sequence:
    """Sequence 0 of a context: `tokens` is always exactly what its memory holds.

    Attention keeps tokens apart, so that the newest can be cut off at any place. A recurrent state cannot be cut, and a
    window-sized cache only as far as the window before the cut is still there. What cannot be cut is the partial state
    (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY in llama.h): it can be copied, and set again later to go back.

    Args:
        context: the llama_context; freed by its owner, after `free` here.
        n_vocab: length of a row of logits.
        abort: flag that stops a running batch.
        is_recurrent: the memory has a recurrent state, alone or beside attention.
        n_window: tokens of the attention window that some layers keep; 0: all layers keep everything.

    Attributes:
        rollback: how rejected tokens are rolled back: attention's way, unless a probe has found another.
        decode_seconds: time spent inside llama_decode since it was last set to 0.
        is_divisible: beside the partial state there is attention that keeps every token.
        partial_bytes: of a partial state; 0: none is needed, going back is cutting.
        is_broken: a stopped batch has left a part in the recurrent state: only `set_state` and `clear` make it usable.
    """

    def __init__(
        self, context: Any, *, n_vocab: int, abort: AbortFlag, is_recurrent: bool = False, n_window: int = 0
    ) -> None:
        self.context = context
        self.is_recurrent = is_recurrent
        self.is_broken = False
        self.is_divisible = True
        self.partial_bytes = 0
        self._n_window = n_window
        self.abort = abort
        self.tokens: list[int] = []
        self.n_ctx = int(llama.llama_n_ctx(context))
        self.n_batch = int(llama.llama_n_batch(context))
        self.n_ubatch = min(int(llama.llama_n_ubatch(context)), self.n_batch)
        self.decode_seconds = 0.0
        self.n_vocab = n_vocab
        self._memory = llama.llama_get_memory(context)
        self.rollback = Rollback(self._memory)
        self._n_checkpoint = self._passes = 0  # tokens at the checkpoint, batches since
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
            self._batch.seq_id[i][0] = 0
        # For one token: memoryviews and a plain call, because numpy's item access is slow when it isn't in the caches.
        self._first_token = memoryview(self._token.data).cast("B").cast("i")
        self._first_pos = memoryview(self._pos.data).cast("B").cast("i")
        self._is_stepping = False
        self._row: np.ndarray | None = None  # of the step before
        self._rows: dict[int, np.ndarray] = {}  # views of llama.cpp's output buffer by address

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Tokens[int], *, n_outputs: int = 0, whole: bool = False) -> None:
        """Evaluate at most `n_batch` tokens; the last `n_outputs` of them get a row of logits.

        Args:
            whole: a recurrent model does not stop within the batch, which would cost its state.

        Raises:
            Aborted: the flag was set; the sequence may hold a leading part of `tokens`.
            GenerationFailed: llama.cpp rejected the batch.
        """
        n, past = len(tokens), len(self.tokens)
        self._is_stepping = False
        self._token[:n] = tokens
        self._pos[:n] = np.arange(past, past + n)
        self._wanted[:n] = 0
        if n_outputs:
            self._wanted[n - n_outputs : n] = 1
        self._batch.n_tokens = n
        self._decode(tokens, whole)

    def step(self, token: int) -> np.ndarray:
        """Evaluate one token, whole, and return the logits after it. Raises as `extend`."""
        self._first_token[0] = token
        self._first_pos[0] = len(self.tokens)
        if self._row is not None and self._is_stepping:
            # As the step before. llama.cpp keeps its row where it is while no batch asks for more than one.
            self._decode((token,), True)
            return self._row
        self._wanted[0] = 1
        self._batch.n_tokens = 1
        self._decode((token,), True)
        self._is_stepping = True
        self._row = self.logits(0)
        return self._row

    def _decode(self, tokens: Tokens[int], whole: bool) -> None:
        if self.is_recurrent:
            self._stop_within(not whole)
        start = perf_counter()
        status = llama.llama_decode(self.context, self._batch)
        self.decode_seconds += perf_counter() - start
        if status == _OK:
            self.tokens.extend(tokens)
            self._passes += 1
            return
        self._resync(tokens)
        if status == _ABORTED:
            raise Aborted
        if status == _NO_SLOT:
            raise GenerationFailed(f"The context of {self.n_ctx:,} tokens is full.", "Start a new chat or raise --ctx.")
        reason = " ".join(bindings.log.lines(errors_only=True)[-2:]) or f"code {status}"
        raise GenerationFailed(f"llama.cpp failed to evaluate a batch: {reason}.", "Retry, or reload the model.")

    def _stop_within(self, stoppable: bool) -> None:
        """Let the abort flag stop the next batch within it, or only before it. Raises Aborted if the flag is set."""
        if self.abort.is_set():
            raise Aborted
        if stoppable != self._is_stoppable:
            self._is_stoppable = stoppable
            flag = self.abort if stoppable else self._never
            llama.llama_set_abort_callback(self.context, flag.callback, flag.data)

    def _resync(self, tokens: Tokens[int]) -> None:
        """Find out what an unfinished batch has left: llama.cpp keeps those of its ubatches that did finish."""
        if self.is_recurrent:
            self.is_broken = True
            return
        held = int(llama.llama_memory_seq_pos_max(self._memory, 0)) + 1
        past = len(self.tokens)
        self.tokens.extend(tokens[: max(held - past, 0)])
        self.truncate(min(held, past + len(tokens)))

    def logits(self, index: int) -> np.ndarray:
        """Return the logits of the token at `index` of the last batch.

        float32 of shape (n_vocab,), a view that is valid until the next batch.

        Raises:
            GenerationFailed: that token has no logits.
        """
        address = bindings.logits_address(self.context, index)
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
        """Return whether the memory can be cut to its first `n` tokens, as if the others had never been there."""
        if n == 0 or (n == len(self.tokens) and not self.is_broken):
            return True
        return self.can_cut_from(self.first_held(), n)

    def can_cut_from(self, first: int, n: int) -> bool:
        """Return the same for a memory of which `first` is the first position that every layer holds."""
        return not self.is_recurrent and first <= max(0, n - self._n_window + 1)

    def first_held(self) -> int:
        """Return the first position that every layer still holds; -1: nothing is held."""
        return int(llama.llama_memory_seq_pos_min(self._memory, 0)) if self._n_window else 0

    def truncate(self, n: int) -> int:
        """Drop all but the first `n` tokens; returns how many are left, 0 if they cannot be dropped in part."""
        n = min(n, len(self.tokens))
        if n == 0 or not self.can_cut(n):
            self.clear()
            return 0
        if n < len(self.tokens) and not llama.llama_memory_seq_rm(self._memory, 0, n, -1):
            self.clear()
        del self.tokens[n:]
        return len(self.tokens)

    def find_divisions(self) -> None:
        """Find out what a partial state is, with a token in the memory. Not all models with windows use them."""
        size = self.state_size(partial=True)
        is_all = size == self.state_size()
        self.is_divisible = not (is_all and self.is_recurrent)
        if is_all:
            self._n_window = 0
        self.partial_bytes = size if self.is_recurrent else size * min(self._n_window, self.n_ctx)

    @property
    def max_draft(self) -> int:
        """Longest draft that can be evaluated in one pass and rolled back; 0 = none."""
        return min(self.rollback.max_draft, self.n_ubatch - 1)

    def checkpoint(self) -> None:
        """Mark the point that `roll_back_to` may return to. Costs next to nothing.

        Raises:
            ValueError: this context cannot roll back (`max_draft` is 0).
        """
        self.rollback.checkpoint()
        self._n_checkpoint, self._passes = len(self.tokens), 0

    def roll_back_to(self, n: int) -> int:
        """Keep the first `n` tokens, as if no other had been evaluated since `checkpoint`. Drops the logits.

        Cheap for the batch that follows the checkpoint while its first token is kept. What cannot be restored is
        evaluated again: the kept tokens after the checkpoint ("checkpoint"), or all `n` (anything else).

        Returns:
            In how many passes that was.

        Raises:
            ValueError: `n` is less than at the checkpoint, or more than there are.
            Aborted, GenerationFailed: as `extend`.
        """
        if not self._n_checkpoint <= n <= len(self.tokens):
            raise ValueError(f"cannot keep {n} of {len(self.tokens)} tokens with a checkpoint at {self._n_checkpoint}")
        if n == len(self.tokens):
            return 0
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
        """Drop all tokens."""
        llama.llama_memory_clear(self._memory, False)
        self.tokens.clear()
        self._n_checkpoint, self.is_broken = 0, False

    def first_saved(self) -> int:
        """Return the first position that every layer has in `state`: no more than a window before the end."""
        return max(self.first_held(), len(self.tokens) - self._n_window) if self._n_window else 0

    def state_size(self, *, partial: bool = False) -> int:
        """Return the bytes of `state`."""
        return int(llama.llama_state_seq_get_size_ext(self.context, 0, int(partial)))

    def state(self, *, partial: bool = False) -> np.ndarray:
        """Return a copy of the memory, or of its partial state: uint8. Cannot be cancelled."""
        data = np.empty(self.state_size(partial=partial), np.uint8)
        n = llama.llama_state_seq_get_data_ext(self.context, _pointer(data), data.size, 0, int(partial))
        return data[: int(n)]

    def set_state(self, tokens: Tokens[int], data: np.ndarray, *, partial: bool = False) -> bool:
        """Replace the memory by what `state` gave for `tokens` with the same model and cache types.

        llama.cpp checks shapes and little else, and asserts on some: the caller vouches for the content. Returns False,
        with an empty sequence, when it was rejected.

        Args:
            partial: go back to `tokens`, with which the memory begins, by their partial state.
        """
        if not partial:
            self.clear()
        self.rollback.forget()
        read = llama.llama_state_seq_set_data_ext(self.context, _pointer(data), data.size, 0, int(partial))
        if partial and read:
            llama.llama_memory_seq_rm(self._memory, 0, len(tokens), -1)
        if not read or int(llama.llama_memory_seq_pos_max(self._memory, 0)) + 1 != len(tokens):
            self.clear()
            return False
        self.tokens, self.is_broken, self._n_checkpoint = list(tokens), False, 0
        return True

    def free(self) -> None:
        """Free the batch; call it before the context is freed, and no other method afterwards."""
        self._row = None
        self._rows.clear()
        llama.llama_batch_free(self._batch)
