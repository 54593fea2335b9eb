"""Passes over the tokens of several answers at once (continuous batching): one over four tokens costs little more than
one over one.

Each answer has a sequence of the context (a lane) and runs on a thread of its own, as if it were alone. Where it would
call llama_decode it leaves its tokens here and waits. The engine's thread, to which the compute threads belong,
evaluates what is there as soon as no answer needs the rows of the last pass. An answer joins and leaves between passes.

Each lane has cells of its own in the KV cache (`kv_unified` False): in the order of the tokens, so that attention gives
the same bits as alone; with a window that others do not push out; cut and saved by themselves. The price: llama.cpp
evaluates the lanes of one pass in step (split_equal in llama-batch.cpp), and only neighboring ones. So the tokens of a
prompt get passes of their own, and a pass that verifies drafts has equally many tokens of each lane, and of those
between: the next ones of a prompt, or some that are dropped afterwards.

A prompt is read in slices between the passes of the other answers, which together get a share of the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import numpy as np

from cpuchat.engine.llama.bindings import AbortFlag, llama
from cpuchat.engine.llama.sequence import OK, Aborted, Sequence
from cpuchat.speculation.depth.shared import shared_depth

_SLICE_SECONDS: Final = 0.2
"""Of a slice of a prompt: how long the text of the others pauses, and a stop waits."""
_BURST_SECONDS: Final = 2.0
"""Of their time the others give in advance, with one of their passes between slices: so short prompts, also of several
answers that begin at once, are read nearly as fast as alone."""
_TILE: Final = 64
"""Slices are multiples of this where there is time for it: a tile of attention (`decode._TILE`)."""
_MIN_SLICE: Final = 16  # tokens: of fewer, reading the weights takes most of the time
_TURN: Final = 4
"""Slices; the last of so many is of the prompt that waits longest, else short ones that keep coming would halt it."""


class Lane(Sequence):
    """The sequence of one of several answers at once, which shares passes with the others'."""

    def __init__(self, context: Any, passes: Passes, *, n_vocab: int, abort: AbortFlag, n_window: int, id: int) -> None:
        super().__init__(context, n_vocab=n_vocab, abort=abort, n_window=n_window, id=id, lock=passes.lock)
        self._shared_passes = passes
        self._chances: Tokens[float] = ()

    @property
    def has_company(self) -> bool:
        return self._shared_passes.is_shared

    @property
    def is_evaluated_here(self) -> bool:
        return self._shared_passes.is_here

    def verify(self, tokens: Tokens[int], chances: Tokens[float]) -> int:
        n_held, self._chances = len(self), chances
        super().verify(tokens, chances)
        return len(self) - n_held - 1

    def evaluate(self, tokens: Tokens[int], whole: bool) -> None:
        passes = self._shared_passes
        chances, self._chances = self._chances, ()
        self.is_shared = passes.is_shared
        if not self.is_shared:
            self._offset, self._is_stepping = 0, self._is_stepping and passes.last is self
            passes.last = self
            passes.stop_with(self.abort)
            super().evaluate(tokens, whole)
            return
        start, self._is_stepping = perf_counter(), False
        try:
            self._offset = passes.evaluate(self, tokens, int(self._wanted[: len(tokens)].sum()), chances)
        finally:
            self.decode_seconds += perf_counter() - start
        self._passes += 1
        if self.on_evaluated is not None:  # which rows of the pass were whose is not told
            self.on_evaluated(len(self.tokens), 0)

    def read_batch(self, start: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `n` tokens of the batch from `start` on, their positions, and which of them get a row of logits."""
        end = start + n
        return self._token[start:end], self._pos[start:end], self._wanted[start:end]

    def release(self) -> None:
        self._shared_passes.release(self)

    def drop_unknown(self) -> None:
        """Remove from the KV cache what is not in `tokens`."""
        llama.llama_memory_seq_rm(self._kv_cache, self.id, len(self.tokens), -1)

    def _empty(self) -> None:
        llama.llama_memory_seq_rm(self._kv_cache, self.id, -1, -1)


@dataclass(eq=False)
class _Request:
    """Tokens that an answer waits for; the first `done` of them are evaluated. `offset`: of the first token from the
    beginning of the last pass; negative where an earlier pass had it. `chances`: of a draft, as in `Lane.verify`."""

    sequence: Lane
    tokens: Tokens[int]
    n_outputs: int
    chances: Tokens[float] = ()
    done: int = 0
    offset: int = 0
    error: Exception | None = None
    is_over: bool = False
    over: threading.Lock = field(default_factory=threading.Lock)

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done

    @property
    def is_step(self) -> bool:
        """Return whether it decodes or verifies, in one pass: every token gets a row."""
        return self.n_outputs == len(self.tokens)

    def cut(self, depth: int) -> None:
        """Leave out what is drafted beyond `depth`."""
        self.tokens = self.tokens[: 1 + min(depth, len(self.chances))]
        self.n_outputs = len(self.tokens)


class Passes:
    """Evaluates the lanes of one context. Made on the engine's thread. `n_outputs`: rows of logits of a pass, at most.
    `share`: of the time that prompts get while other answers are written.

    `lock`: held by whoever calls llama.cpp for the context. `lanes`: all sequences, by their id. `is_shared`: there are
    answers beside the one on the engine's thread, or without one there. `last`: the lane that evaluated the last pass
    by itself: the next may move its rows. `pass_ms`: calibrated ms of passes over 1, 2, ... tokens; () verifies no
    drafts."""

    def __init__(self, context: Any, n_outputs: int, share: float) -> None:
        self.context = context
        self.lock = threading.RLock()
        self.lanes: list[Lane] = []
        self.is_shared = False
        self.last: Lane | None = None
        self.pass_ms: Tokens[float] = ()
        self._n_outputs = n_outputs
        self._share = share
        self._engine_thread = threading.get_ident()
        self._changed = threading.Condition()  # over what follows
        self._n_beside = 0
        self._waiting: list[_Request] = []
        self._reading: set[Lane] = set()  # lanes whose answers read rows of the last pass
        self._owed = 0.0  # seconds that the others get before the next slice of a prompt; negative = given in advance
        self._was_slice, self._n_slices = False, 0
        self._token_seconds = _SLICE_SECONDS / _TILE  # of a prompt, followed
        self._never, self._is_stoppable = AbortFlag(), True
        n_batch = int(llama.llama_n_batch(context))
        self._batch = llama.llama_batch_init(n_batch, 0, 1)
        arrays = (self._batch.token, self._batch.pos, self._batch.logits)
        self._arrays = tuple(np.ctypeslib.as_array(one, (n_batch,)) for one in arrays)
        np.ctypeslib.as_array(self._batch.n_seq_id, (n_batch,))[:] = 1

    def begin_beside(self) -> None:
        """Expect an answer on another thread than the engine's, which ends with `end_beside`. From any thread."""
        with self._changed:
            if not self.is_shared:
                self._owed = -_BURST_SECONDS
            self._n_beside += 1
            self.is_shared = True

    def end_beside(self) -> None:
        with self._changed:
            self._n_beside -= 1
            self.is_shared = self._n_beside > 0
            self._changed.notify()

    @property
    def is_here(self) -> bool:
        """Return whether the calling thread is the engine's."""
        return threading.get_ident() == self._engine_thread

    def wake(self) -> None:
        """Look at the flags of the answers that wait: one was set. From any thread."""
        with self._changed:
            self._changed.notify()

    def release(self, sequence: Lane) -> None:
        with self._changed:
            self._reading.discard(sequence)
            self._changed.notify()

    def stop_with(self, abort: AbortFlag) -> None:
        """Let the flag stop the pass of an answer that is alone, within it."""
        if not self._is_stoppable:
            self._is_stoppable = True
            llama.llama_set_abort_callback(self.context, abort.callback, abort.data)

    def evaluate(self, sequence: Lane, tokens: Tokens[int], n_outputs: int, chances: Tokens[float]) -> int:
        """Evaluate the batch of a lane, which holds these tokens and gets rows for the last `n_outputs`; of a draft
        with these `chances` only what pays. Returns its offset in the last pass. Raises as `Sequence.extend`."""
        request = _Request(sequence, tokens, n_outputs, chances)
        request.over.acquire()
        with self._changed:
            self._reading.discard(sequence)
            self._waiting.append(request)
            self._changed.notify()
        if self.is_here:
            self.run(lambda: request.is_over)
        else:
            request.over.acquire()
        if request.error is not None:
            raise request.error
        return request.offset

    def run(self, is_over: Callable[[], bool]) -> None:
        """Evaluate what answers wait for until `is_over`. On the engine's thread."""
        while True:
            with self._changed:
                while not (self._is_due() or is_over()):  # the former ends what was stopped
                    self._changed.wait()
                if is_over():
                    return
                chosen, is_slice = self._choose()
            start = perf_counter()
            self._evaluate(chosen)
            self._book(perf_counter() - start, chosen, is_slice)

    def run_beside(self) -> None:
        """Evaluate until no answer is under way on another thread."""
        self.run(lambda: not self._n_beside)

    def _is_due(self) -> bool:
        for request in [one for one in self._waiting if one.sequence.abort.is_set()]:
            self._end(request, Aborted())
        return bool(self._waiting) and not self._reading

    def _end(self, request: _Request, error: Exception | None = None) -> None:
        self._waiting.remove(request)
        request.error, request.is_over = error, True
        if request.n_outputs and error is None:
            self._reading.add(request.sequence)
        request.over.release()

    def _choose(self) -> tuple[list[tuple[_Request, int]], bool]:
        """Return the requests of the next pass, each with how many tokens, and whether others wait for a slice."""
        steps = [one for one in self._waiting if one.is_step]
        prompts = [one for one in self._waiting if not one.is_step]
        if steps and (not prompts or self._was_slice or self._owed > 0):
            del steps[self._n_outputs :]
            ids = [one.sequence.id for one in steps]
            lanes = [one for one in self.lanes[min(ids) : max(ids) + 1] if len(one.tokens) < one.n_ctx]
            depth = self._depth(steps, lanes)
            for one in steps:
                one.cut(depth)
            chosen = [(one, one.left) for one in steps]
            for one in prompts:  # between lanes of the pass
                if one.sequence in lanes and one.left > one.n_outputs:
                    chosen.append((one, min(1 + depth, one.left - one.n_outputs)))
            return chosen, False
        return self._slices(prompts), bool(steps)

    def _depth(self, steps: list[_Request], lanes: list[Lane]) -> int:
        """Return how many drafted tokens of each request to evaluate in a pass over these lanes."""
        room = min(lane.n_ctx - len(lane.tokens) for lane in lanes) - 1
        max_depth = min(room, lanes[0].n_ubatch // len(lanes) - 1)
        return shared_depth([one.chances for one in steps], self.pass_ms, len(lanes), max_depth, self._n_outputs)

    def _slices(self, prompts: list[_Request]) -> list[tuple[_Request, int]]:
        """Return the next slice of the shortest prompt, or of the one whose turn it is, with as much of those in
        neighboring lanes if there is time: the tokens of short prompts take less together."""
        self._n_slices += 1
        by_lane = {one.sequence.id: one for one in prompts}
        first = min(prompts, key=lambda one: one.left) if self._n_slices % _TURN else prompts[0]
        size = max(int(_SLICE_SECONDS / self._token_seconds), _MIN_SLICE)
        size = min(size // _TILE * _TILE or size, first.sequence.n_ubatch)
        chosen, n = [first], min(first.left, size)
        for step in (1, -1):
            lane = first.sequence.id + step
            while lane in by_lane and by_lane[lane].left >= n:
                chosen.append(by_lane[lane])
                lane += step
        return [(one, n) for one in chosen[: size // n]]

    def _evaluate(self, chosen: list[tuple[_Request, int]]) -> None:
        """Evaluate the next tokens of each request in one pass; where that fails, one after the other."""
        with self.lock:
            self.last = None
            if self._is_stoppable:
                self._is_stoppable = False
                llama.llama_set_abort_callback(self.context, self._never.callback, self._never.data)
            chosen = sorted(chosen, key=lambda one: one[0].sequence.id)
            status, offsets, padded = self._decode(chosen)
            failed = chosen if status != OK else []
            for (request, n), at in zip(chosen, offsets, strict=True):
                sequence = request.sequence
                if failed:  # llama.cpp keeps those of ubatches that did finish
                    sequence.drop_unknown()
                    continue
                sequence.tokens.extend(request.tokens[request.done : request.done + n])
                request.offset = at - request.done
                request.done += n
            for lane in padded:
                lane.drop_unknown()
        if len(failed) > 1:
            for one in failed:
                self._evaluate([one])
            return
        with self._changed:
            for request, _ in chosen:
                if failed:
                    self._end(request, request.sequence.failure(status))
                elif not request.left:
                    self._end(request)

    def _decode(self, chosen: list[tuple[_Request, int]]) -> tuple[int, list[int], list[Lane]]:
        """Return what llama_decode did, where each request begins in the batch, and the lanes with tokens to drop."""
        n_tokens, offsets, padded = 0, list[int](), list[Lane]()
        first, last = chosen[0][0].sequence.id, chosen[-1][0].sequence.id
        by_lane = {request.sequence.id: (request, n) for request, n in chosen}
        width = max(n for _, n in chosen)
        for lane in self.lanes[first : last + 1]:
            request, n = by_lane.get(lane.id, (None, 0))
            past, end = len(lane.tokens), n_tokens + width
            if request is None and past + width > lane.n_ctx:
                continue  # llama.cpp reads the weights once more
            for array, padding in zip(self._arrays, (0, np.arange(past, past + width), 0), strict=True):
                array[n_tokens:end] = padding
            if request is not None:
                offsets.append(n_tokens)
                for array, value in zip(self._arrays, lane.read_batch(request.done, n), strict=True):
                    array[n_tokens : n_tokens + n] = value
            if n < width:
                padded.append(lane)
            for i in range(n_tokens, end):
                self._batch.seq_id[i][0] = lane.id
            n_tokens = end
        self._batch.n_tokens = n_tokens
        sequence = self.lanes[0]
        if sequence.pool is not None:
            sequence.pool.prepare(sequence, perf_counter())
        return llama.llama_decode(self.context, self._batch), offsets, padded

    def _book(self, seconds: float, chosen: list[tuple[_Request, int]], is_slice: bool) -> None:
        """Book the time of a pass: after a slice of a prompt the others get theirs."""
        is_step, n = chosen[0][0].is_step, sum(n for _, n in chosen)
        if not is_step and n >= _MIN_SLICE:
            self._token_seconds += (seconds / n - self._token_seconds) / 4
        self._was_slice = is_slice
        if is_slice:
            self._owed += seconds * (1 - self._share) / self._share
        elif is_step:
            self._owed = max(self._owed - seconds, -_BURST_SECONDS)

    def free(self) -> None:
        """Free the batch; call it before the context is freed."""
        llama.llama_batch_free(self._batch)
