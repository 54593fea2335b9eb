"""The cost of passes: T(n) of the target for n = 1..32 tokens, and the draft model's times.

The curve decides whether drafting pays, and how far; it differs by model, quantization, cores and build, so it is
measured on the loaded model itself, with random tokens (of which a mixture of experts uses as many experts, or
more).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Final

import numpy as np
from msgspec.structs import replace

from cpuchat.costs.calibrations import PassCosts, implausible, interpolate, is_plausible
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.model import LoadedHead, Model
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.llama.threads import CpuWait
from cpuchat.measure.subject import Subject, decode_options, on_cores
from cpuchat.models import costs as record
from cpuchat.models.file_names import engine_fingerprint
from cpuchat.protocol.timings import MAX_CPU_WAIT

BUDGET_SECONDS: Final = 12.0
"""Seconds for the target's curve. A large model does not complete all points: the rest is extrapolated."""

_POINTS: Final = (1, 4, 8, 2, 3, 16, 5, 6, 7, 12, 32, 10, 14, 24, 20, 28)
"""Pass sizes by importance, in case the time runs out."""
_ROUNDS: Final = 3
_N_PAST: Final = 32
_DRAFT_STEPS: Final = 12
_STEADY: Final = 1.25
_RETRY_ROUNDS: Final = 12
_RETRY_BUDGET: Final = 1.5
"""Multiple of the budget after which implausibly slow passes are no longer repeated."""


def measure(
    target: Model,
    draft: Model | LoadedHead | None,
    on_progress: Callable[[int, int], None],
) -> PassCosts:
    """Measure both models. Empties their sequences.

    Under heavy load the result may still be implausible; a disturbance of the draft model's costs, which each answer
    follows, only makes it unsteady. `on_progress` gets the measurements done, and all of them. Raises Aborted: the
    abort flag was set; GenerationFailed: llama.cpp rejected a batch."""
    points = [n for n in _POINTS if n <= 1 + target.sequence.max_draft]
    total = (len(points) + (1 if draft is not None else 0)) * _ROUNDS
    n_threads = target.pool.n_threads
    draft_ms = read_ms = 0.0
    try:
        curve = Curve(target.sequence, n_threads, points)
        on_progress(0, total)
        curve.measure(lambda n: on_progress(n, total))
        costs = curve.costs()
        if draft is not None:
            waits = CpuWait(n_threads)
            draft_ms, read_ms = _draft_costs(draft.sequence)
            quiet = (waits.share() or 0.0) <= MAX_CPU_WAIT
            costs = replace(costs, steady=costs.steady and quiet)
        on_progress(total, total)
    finally:
        target.sequence.clear()
        if draft is not None:
            draft.sequence.clear()
    return replace(costs, draft_ms=draft_ms, read_ms=read_ms)


def random_tokens(n: int, n_vocab: int) -> list[int]:
    """Return `n` token ids spread over the vocabulary, the same each time."""
    return np.random.Generator(np.random.PCG64(0)).integers(0, n_vocab, n).tolist()


class Curve:
    """Measures T(n) of a target: the best of at least two passes for each n that fits into the budget, because
    disturbances only make a pass slower, and by much: threads wait for each other. Where even that is implausible, it
    is retried."""

    def __init__(self, sequence: Sequence, n_threads: int, points: list[int]) -> None:
        self._sequence = sequence
        self._n_threads = n_threads
        self._points = points
        # By size, for each pass over so many tokens: its ms, the share of the time for which threads waited for a core
        # that another program had, and the ms of the rollback after it (0: none).
        self._samples: dict[int, list[tuple[float, float, float]]] = {}
        self._tokens = random_tokens(_N_PAST + max(*points, 2), sequence.n_vocab)

    def measure(self, tell: Callable[[int], None]) -> None:
        """Time the passes; calls `tell` with their number after each."""
        started, done = perf_counter(), 0
        unbuilt = {n for n in self._points if n <= 8}  # the first pass of a size builds its graph
        sequence, size = self._sequence, self._sequence.n_ubatch
        sequence.clear()
        for i in range(0, _N_PAST, size):
            sequence.extend(self._tokens[i : min(i + size, _N_PAST)])
        for round_ in range(_ROUNDS):
            # The order alternates so that drifts cancel out.
            for n in self._points if round_ % 2 == 0 else reversed(self._points):
                if perf_counter() - started > BUDGET_SECONDS and len(self._samples) >= 2:
                    return
                if n in unbuilt:
                    unbuilt.remove(n)
                    self.timed_pass(n)
                self._sample(n)
                done += 1
                tell(done)
        for _ in range(_RETRY_ROUNDS):
            for n in implausible(self._best):
                if perf_counter() - started > _RETRY_BUDGET * BUDGET_SECONDS:
                    return
                self._sample(n)

    def _sample(self, n: int) -> None:
        waits = CpuWait(self._n_threads)
        took, rollback = self.timed_pass(n)
        self._samples.setdefault(n, []).append((took, waits.share() or 0.0, rollback))

    @property
    def _best(self) -> dict[int, float]:
        return {n: min(values)[0] for n, values in self._samples.items()}

    def costs(self) -> PassCosts:
        """Return the costs of the target alone: steady where the best two passes of most sizes took about the same
        time, disturbed where other programs ran even during the best plain pass, or those of most sizes."""
        rollbacks = [rollback for n, values in self._samples.items() if n > 1 for _, _, rollback in values]
        rollback_ms = statistics.median(rollbacks) if rollbacks else 0.0
        pairs = [sorted(values)[:2] for values in self._samples.values() if len(values) > 1]
        steady = not pairs or statistics.median(second[0] / best[0] for best, second in pairs) < _STEADY
        waits = {n: min(values)[1] for n, values in self._samples.items()}
        disturbed = max(waits[1], statistics.median(waits.values())) > MAX_CPU_WAIT
        return PassCosts(interpolate(self._best), rollback_ms=rollback_ms, steady=steady, disturbed=disturbed)

    def timed_pass(self, n: int) -> tuple[float, float]:
        """Return the ms of one verify pass over `n` tokens, and of the rollback after it (0 for one token)."""
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


def _draft_costs(sequence: Sequence) -> tuple[float, float]:
    """Return (ms per token drafted one after the other, ms per token read in a batch)."""
    tokens = random_tokens(3 * 32, sequence.n_vocab)
    sequence.clear()
    size = min(32, sequence.n_ubatch)
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


def known_costs(target: Model, draft: Model | LoadedHead | None) -> tuple[PassCosts | None, bool]:
    """Return the costs that were measured last, however old, and whether they should be measured again."""
    known = record.calibration(conditions(target, draft))
    return (known.value, record.is_due(known)) if known is not None else (None, True)


def calibrate(
    target: Model, draft: Model | LoadedHead | None, on_progress: Callable[[int, int], None]
) -> PassCosts | None:
    """Measure and keep the costs; returns them, or the last ones (None: none) where these are disturbed more. Empties
    the sequences of both models. Raises as `measure`."""
    (earlier, _), costs = known_costs(target, draft), measure(target, draft, on_progress)
    if not is_plausible(costs.verify_ms):
        return earlier
    if costs.disturbed and earlier is not None and not earlier.disturbed:
        costs = replace(earlier, steady=False)  # not for long, but better than these
    record.keep_calibration(conditions(target, draft), costs)
    return costs


def conditions(target: Model, draft: Model | LoadedHead | None = None) -> Subject:
    """Return everything that the costs depend on: files, cores and how they are used, memory policy, build."""
    engine = bindings.engine_info()
    settings = decode_options(target.options) | {
        "n_ubatch": target.options.n_ubatch,
        "n_threads": target.pool.n_threads,
        "n_rs_seq": target.plan.n_rs_seq,
        "rollback": target.sequence.rollback.kind,
        "engine": (engine.llama_commit, engine.features),
    }
    return on_cores(
        target.pool.cpus,
        build=engine_fingerprint(),
        kernels=" ".join(sorted(target.kernel_types)),
        model=tuple(one.info.fingerprint for one in (target, draft) if one is not None),
        settings=settings,
    )
