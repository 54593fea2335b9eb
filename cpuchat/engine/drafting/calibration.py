"""Measures the cost of passes: T(n) of the target for n = 1..32 tokens, and the draft model's times.

The curve decides whether drafting pays, and how far; it differs by model, quantization, cores and build, so it is
measured on the loaded model itself, with random tokens (a mixture of experts then uses as many experts as with real
text, or more).
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Final

import numpy as np

from cpuchat.engine.drafting.overlap import DraftThread
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.llama.threads import cpu_wait_seconds, cpu_wait_share
from cpuchat.models.drafts.calibrations import implausible, is_plausible
from cpuchat.speculation.depth.costs import OverlapCosts, PassCosts, interpolate
from cpuchat.timings import MAX_CPU_WAIT

BUDGET_SECONDS: Final = 12.0
"""Seconds for the target's curve. A large model does not complete all points: the rest is extrapolated."""

_POINTS: Final = (1, 4, 8, 2, 3, 16, 5, 6, 7, 12, 32, 10, 14, 24, 20, 28)
"""Pass sizes by importance, in case the time runs out."""
_OVERLAP_POINTS: Final = (1, 4, 8, 16, 3, 6, 12, 32)
_ROUNDS: Final = 3
_N_PAST: Final = 32
_DRAFT_STEPS: Final = 12
_STEADY: Final = 1.25
_RETRY_ROUNDS: Final = 12
_RETRY_BUDGET: Final = 1.5
"""Multiple of the budget after which implausibly slow passes are no longer repeated."""

Samples = dict[int, list[tuple[float, float, float]]]
"""By size, for each pass over so many tokens: its ms, the share of the time for which threads waited for a core that
another program had, and the ms of the rollback after it (0: none)."""

Progress = Callable[[int, int], None]
"""(measurements done, measurements to do)"""


def measure(
    target: Model,
    draft: Model | None,
    thread: DraftThread | None,
    on_progress: Progress,
    *,
    budget: float = BUDGET_SECONDS,
    known: PassCosts | None = None,
    samples: Samples | None = None,
) -> PassCosts:
    """Measure both models sequentially, and with a `thread` for the draft model also concurrently.

    Empties their sequences. Under heavy load the result may still be implausible. The costs of the draft model are
    followed in each answer, so a disturbance of those alone only makes the result unsteady.

    Args:
        budget: seconds for the target's curve.
        known: costs of the target alone, which are then not measured again.
        samples: passes of the target that were measured already; the others are added.

    Raises:
        Aborted: the abort flag was set; `samples` has what was measured until then.
        GenerationFailed: llama.cpp rejected a batch.
    """
    points = [n for n in _POINTS if n <= 1 + target.sequence.max_draft]
    overlapped = [n for n in _OVERLAP_POINTS if n in points]
    total = ((0 if known else len(points)) + (len(overlapped) if thread else 0)) * _ROUNDS
    n_threads = target.pool.n_threads
    draft_ms = read_ms = 0.0
    overlap = None
    done = 0
    try:
        if known is None:
            curve = _Curve(target.sequence, n_threads, points, budget, samples)
            done = curve.measure(lambda n: on_progress(n, total))
            known = PassCosts(
                curve.filled(),
                rollback_ms=curve.rollback_ms,
                steady=curve.is_steady,
                disturbed=curve.is_disturbed,
            )
        if draft is not None:
            sequence, waits = draft.sequence, _Waits(n_threads)
            draft_ms, read_ms = thread.run(lambda: _draft_costs(sequence)) if thread else _draft_costs(sequence)
            quiet = waits.share() <= MAX_CPU_WAIT
            if thread is not None:
                overlap, quiet = _overlapped(
                    target, sequence, thread, overlapped, lambda n: on_progress(done + n, total), budget / 3
                )
                if not is_plausible(overlap.verify_ms):  # measured another time
                    overlap, quiet = None, False
            known = replace(known, steady=known.steady and quiet)
        on_progress(total, total)
    finally:
        target.sequence.clear()
        if draft is not None:
            draft.sequence.clear()
    return replace(known, draft_ms=draft_ms, read_ms=read_ms, overlap=overlap)


def _overlapped(
    target: Model,
    draft: Sequence,
    thread: DraftThread,
    points: list[int],
    tell: Callable[[int], None],
    budget: float,
) -> tuple[OverlapCosts, bool]:
    """Time the target's passes while the draft model drafts without a pause; also returns whether nothing disturbed
    them."""
    over = threading.Event()

    def draft_on() -> list[float]:
        steps: list[float] = []
        token = random_tokens(1, draft.n_vocab)[0]
        draft.clear()
        while not steps or not over.is_set():
            if len(draft) >= _N_PAST + _DRAFT_STEPS:
                draft.truncate(_N_PAST)
            start = perf_counter()
            draft.step(token).argmax()
            steps.append(1e3 * (perf_counter() - start))
        return steps

    was_on = thread.is_on
    thread.switch(True)
    try:
        drafting = thread.start(draft_on)
        try:
            curve = _Curve(target.sequence, target.pool.n_threads, points, budget)
            curve.measure(tell)
        finally:
            over.set()
            steps = drafting.result()
    finally:
        thread.switch(was_on or thread.always)
    return OverlapCosts(verify_ms=curve.filled(), draft_ms=statistics.median(steps)), not curve.is_disturbed


def random_tokens(n: int, n_vocab: int) -> list[int]:
    """Return `n` token ids spread over the vocabulary, the same each time."""
    return np.random.Generator(np.random.PCG64(0)).integers(0, n_vocab, n).tolist()


class _Waits:
    """Tells for which share of the time the threads waited for a core that another program had."""

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._waited, self._start = cpu_wait_seconds(), perf_counter()

    def share(self) -> float:
        """Return the share since the last call; 0 where that is not known."""
        share = cpu_wait_share(self._waited, perf_counter() - self._start, self._n_threads)
        self._waited, self._start = cpu_wait_seconds(), perf_counter()
        return share or 0.0


class _Curve:
    """Measures T(n) of a target: the best of at least two passes for each n that fits into the budget.

    The best, because disturbances only make a pass slower, and by much: threads wait for each other. Where even that
    is implausible, it is retried.
    """

    def __init__(
        self, sequence: Sequence, n_threads: int, points: list[int], budget: float, samples: Samples | None = None
    ) -> None:
        self._sequence = sequence
        self._n_threads = n_threads
        self._points = points
        self._budget = budget
        self._samples = {} if samples is None else samples
        self._tokens = random_tokens(_N_PAST + max(*points, 2), sequence.n_vocab)

    def measure(self, tell: Callable[[int], None]) -> int:
        """Time the passes; calls `tell` after each. Returns their number."""
        started, done = perf_counter(), 0
        unbuilt = {n for n in self._points if n <= 8}  # the first pass of a size builds its graph
        self._sequence.clear()
        _extend(self._sequence, self._tokens[:_N_PAST])
        waits = _Waits(self._n_threads)
        for round_ in range(_ROUNDS):
            # The order alternates so that drifts cancel out.
            for n in self._points if round_ % 2 == 0 else reversed(self._points):
                if len(self._samples.get(n, ())) <= round_:
                    if perf_counter() - started > self._budget and len(self._samples) >= 2:
                        return done
                    if n in unbuilt:
                        unbuilt.remove(n)
                        self._pass(n)
                        waits.share()
                    self._sample(n, waits)
                done += 1
                tell(done)
        for _ in range(_RETRY_ROUNDS):
            for n in implausible(self._best):
                if perf_counter() - started > _RETRY_BUDGET * self._budget:
                    return done
                self._sample(n, waits)
        return done

    def _sample(self, n: int, waits: _Waits) -> None:
        took, rollback = self._pass(n)
        self._samples.setdefault(n, []).append((took, waits.share(), rollback))

    @property
    def _best(self) -> dict[int, float]:
        return {n: min(values)[0] for n, values in self._samples.items()}

    def filled(self) -> tuple[float, ...]:
        """Return ms for n = 1..32."""
        return interpolate(self._best)

    @property
    def rollback_ms(self) -> float:
        """Return the median ms to roll back after a rejected token."""
        rollbacks = [rollback for n, values in self._samples.items() if n > 1 for _, _, rollback in values]
        return statistics.median(rollbacks) if rollbacks else 0.0

    @property
    def is_steady(self) -> bool:
        """Return whether the best two passes of most sizes took about the same time."""
        pairs = [sorted(values)[:2] for values in self._samples.values() if len(values) > 1]
        return not pairs or statistics.median(second[0] / best[0] for best, second in pairs) < _STEADY

    @property
    def is_disturbed(self) -> bool:
        """Return whether other programs ran even during the best plain pass, or those of most sizes."""
        waits = {n: min(values)[1] for n, values in self._samples.items()}
        return max(waits[1], statistics.median(waits.values())) > MAX_CPU_WAIT

    def _pass(self, n: int) -> tuple[float, float]:
        """Return the ms of one verify pass over `n` tokens, with an argmax of each row, and of the rollback after it
        (0 for one token).
        """
        sequence, rollback = self._sequence, 0.0
        sequence.checkpoint()
        if n == 1:
            # The second of two steps: the first one rebuilds the graph, which consecutive steps do not.
            sequence.step(self._tokens[_N_PAST])
            start = perf_counter()
            sequence.step(self._tokens[_N_PAST + 1]).argmax()
            took = perf_counter() - start
        else:
            start = perf_counter()
            sequence.extend(self._tokens[_N_PAST : _N_PAST + n], n_outputs=n)
            for i in range(n):
                sequence.logits(i).argmax()
            took = perf_counter() - start
            # As after a rejection: some of the pass's tokens stay, at least its first one.
            start = perf_counter()
            sequence.roll_back_to(_N_PAST + max(n // 2, 1))
            rollback = perf_counter() - start
        sequence.roll_back_to(_N_PAST)
        return 1e3 * took, 1e3 * rollback


def _extend(sequence: Sequence, tokens: list[int]) -> None:
    size = min(sequence.n_batch, sequence.n_ubatch)
    for i in range(0, len(tokens), size):
        sequence.extend(tokens[i : i + size])


def _draft_costs(sequence: Sequence) -> tuple[float, float]:
    """Return (ms per token drafted one after the other, ms per token read in a batch)."""
    tokens = random_tokens(3 * 32, sequence.n_vocab)
    sequence.clear()
    size = min(32, sequence.n_batch, sequence.n_ubatch)
    steps: list[float] = []
    reads: list[float] = []
    for _ in range(_ROUNDS):
        sequence.truncate(0)
        for read in range(2):  # the first one builds the graph
            start = perf_counter()
            sequence.extend(tokens[:size], n_outputs=size)
            for i in range(size):
                sequence.logits(i).argmax()
            if read:
                reads.append((perf_counter() - start) / size)
        for token in tokens[size : size + _DRAFT_STEPS]:
            start = perf_counter()
            sequence.step(token).argmax()
            steps.append(perf_counter() - start)
    return 1e3 * statistics.median(steps), 1e3 * statistics.median(reads)
