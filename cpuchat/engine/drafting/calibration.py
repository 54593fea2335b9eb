"""The cost of passes: T(n) of the target for n = 1..32 tokens, and the draft model's times, measured and cached.

The curve decides whether drafting pays, and how far; it differs by model, quantization, cores and build, so it is
measured on the loaded model itself, with random tokens (a mixture of experts then uses as many experts as with real
text, or more). The cache also has the acceptance that was learned of each pair of models.
"""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import msgspec
import numpy as np

from cpuchat.base.errors import GenerationFailed, Interrupted
from cpuchat.base.files import JsonCache
from cpuchat.engine.drafting.draft_model import DraftThread
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.bindings import AbortFlag, cpu_wait_seconds, cpu_wait_share
from cpuchat.engine.llama.model import Model, Progress
from cpuchat.engine.llama.sequence import Aborted, Sequence
from cpuchat.hardware.placement.cores import MAX_BUSY_CORES, BusyCores
from cpuchat.models.drafts.candidates import Calibration, calibration_cache, implausible, is_plausible
from cpuchat.protocol.messages import LoadModel
from cpuchat.protocol.timings import MAX_CPU_WAIT
from cpuchat.speculation.depth.controller import DISTURBED, SKIPPED, UNCALIBRATED
from cpuchat.speculation.depth.costs import MAX_TOKENS, OverlapCosts, PassCosts, interpolate

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


def measure(
    target: Model,
    draft: Model | None,
    thread: DraftThread | None,
    on_progress: Callable[[int, int], None],
    *,
    budget: float = BUDGET_SECONDS,
    of_target: PassCosts | None = None,
    samples: Samples | None = None,
) -> PassCosts:
    """Measure both models sequentially, and with a `thread` for the draft model also concurrently.

    Empties their sequences. Under heavy load the result may still be implausible. The costs of the draft model are
    followed in each answer, so a disturbance of those alone only makes the result unsteady.

    Args:
        on_progress: called with the measurements done, and all of them.
        budget: seconds for the target's curve.
        of_target: costs of the target alone, which are then not measured again.
        samples: passes of the target that were measured already; the others are added.

    Raises:
        Aborted: the abort flag was set; `samples` has what was measured until then.
        GenerationFailed: llama.cpp rejected a batch.
    """
    points = [n for n in _POINTS if n <= 1 + target.sequence.max_draft]
    overlapped = [n for n in _OVERLAP_POINTS if n in points]
    total = ((0 if of_target else len(points)) + (len(overlapped) if thread else 0)) * _ROUNDS
    n_threads = target.pool.n_threads
    draft_ms = read_ms = 0.0
    overlap = None
    done = 0
    try:
        costs = of_target
        if costs is None:
            curve = _Curve(target.sequence, n_threads, points, budget, samples)
            done = curve.measure(lambda n: on_progress(n, total))
            costs = curve.costs()
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
            costs = replace(costs, steady=costs.steady and quiet)
        on_progress(total, total)
    finally:
        target.sequence.clear()
        if draft is not None:
            draft.sequence.clear()
    return replace(costs, draft_ms=draft_ms, read_ms=read_ms, overlap=overlap)


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

    def costs(self) -> PassCosts:
        """Return the costs of the target alone. They are steady where the best two passes of most sizes took about the
        same time; a rollback after a rejected token takes the median.
        """
        rollbacks = [rollback for n, values in self._samples.items() if n > 1 for _, _, rollback in values]
        rollback_ms = statistics.median(rollbacks) if rollbacks else 0.0
        pairs = [sorted(values)[:2] for values in self._samples.values() if len(values) > 1]
        steady = not pairs or statistics.median(second[0] / best[0] for best, second in pairs) < _STEADY
        return PassCosts(self.filled(), rollback_ms=rollback_ms, steady=steady, disturbed=self.is_disturbed)

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


KEPT_SECONDS: Final = 30 * 86_400.0
"""Seconds for which a calibration is valid: kernels, firmware and cooling change less often..."""
UNSTEADY_SECONDS: Final = 3_600.0
"""...and seconds if its measurements scattered, so that it is repeated when the machine may be idle. One that other
programs disturbed is repeated as soon as the cores are idle."""
_LOOK_SECONDS: Final = 0.2
"""Seconds in which idle cores are told from busy ones: the system counts in hundredths."""
_MOST_COMPARED: Final = 10_000.0
"""More is no count of this program's: it forgets."""
_MOST_UNFINISHED: Final = 20


class _Unfinished(msgspec.Struct, frozen=True):
    """What was measured until a calibration was skipped, in seconds since 1970."""

    samples: Samples
    measured: float


def calibrated_costs(
    target: Model,
    draft: Model | None,
    thread: DraftThread | None,
    command: LoadModel,
    on_progress: Progress,
    abort: AbortFlag,
    notes: list[str],
) -> tuple[PassCosts | None, str]:
    """Return the costs from the cache, or measure them; None with the reason why drafting stays off.

    Cancelling skips the measurement; the next load resumes it. What the user should know is added to `notes`.

    Raises:
        Interrupted: cancelled for good.
    """
    file = Path(command.calibration_file) if command.calibration_file else None
    target_key = calibration_key(target, None)
    key = calibration_key(target, draft, str(thread.cpus) if thread is not None else "") if draft else target_key
    calibrate = command.options.calibrate and not target.options.from_disk  # each pass would read the disk
    costs = load_costs(file, key, any_age=not calibrate)
    if not calibrate:
        return costs, "" if costs else UNCALIBRATED
    of_target, earlier = load_costs(file, target_key), load_costs(file, key, any_age=True)
    if any(one is not None and one.disturbed for one in (costs, of_target)) and _cores_idle(target.pool.cpus):
        costs, of_target = (one if one is not None and not one.disturbed else None for one in (costs, of_target))
    if costs is not None:
        return costs, ""
    samples = {} if of_target is not None else _take_unfinished(file, target_key)
    tell = partial(on_progress, "calibrating")
    try:
        costs = measure(target, draft, thread, tell, of_target=of_target, samples=samples)
    except Aborted:
        abort.clear()
        if file is not None and samples:
            _unfinished(file).put(target_key, _Unfinished(samples, time.time()))
        if abort.is_set():
            raise Interrupted("The load was cancelled.") from None
        if earlier is None:
            notes.append("Calibration was skipped: adaptive drafting stays off until the next load resumes it.")
        return earlier, SKIPPED
    except GenerationFailed as error:
        notes.append(f"Calibration failed, so adaptive drafting stays off: {error.message}")
        return None, UNCALIBRATED
    if disturbed := implausible(dict(enumerate(costs.verify_ms, 1))):
        if earlier is None:
            notes.append(_implausible_note(disturbed[0], costs.verify_ms[disturbed[0] - 1]))
        return earlier, DISTURBED
    if costs.disturbed and earlier is not None and not earlier.disturbed:
        costs = replace(earlier, steady=False)  # not for long, but better than these
    elif costs.disturbed:
        notes.append(
            "Other programs disturbed the calibration: speed-ups show once plain decoding was timed in a chat. "
            "The next load on idle cores calibrates again."
        )
    fingerprint = target.info.fingerprint
    save_costs(file, key, costs, fingerprint, draft.info.fingerprint if draft is not None else "")
    if of_target is None and draft is not None:  # the next draft model need not wait for the target's curve again
        save_costs(file, target_key, replace(costs, draft_ms=0.0, read_ms=0.0, overlap=None), fingerprint)
    return costs, ""


def _implausible_note(n: int, ms: float) -> str:
    what = "a plain decoding pass" if n == 1 else f"a pass over {n} tokens"
    return (
        f"Calibration was disturbed by other programs: {what} took {ms:.3g} ms. Adaptive drafting stays off; reload "
        "the model when the machine is idle."
    )


def _unfinished(file: Path) -> JsonCache[_Unfinished]:
    """Return the calibrations that were skipped, beside the `file` of the others."""
    name = f"{file.stem}-unfinished{file.suffix}"
    return JsonCache(file.with_name(name), _Unfinished, version=1, max_entries=_MOST_UNFINISHED)


def _take_unfinished(file: Path | None, key: str) -> Samples:
    """Return what was measured of a calibration that was skipped, and forget it; {} if none was."""
    if file is None or (found := _unfinished(file).read().get(key)) is None:
        return {}
    _unfinished(file).remove(key)
    samples = found.samples
    is_valid = 1 in samples and all(
        1 <= n <= MAX_TOKENS and values and min(ms for ms, _, _ in values) > 0 for n, values in samples.items()
    )
    return samples if is_valid and time.time() - found.measured <= KEPT_SECONDS else {}


def _cores_idle(cpus: Collection[int]) -> bool:
    """Return whether other programs leave these cores alone, after a moment."""
    busy = BusyCores()
    busy.since_last(cpus)
    time.sleep(_LOOK_SECONDS)
    return (busy.since_last(cpus) or 0.0) < MAX_BUSY_CORES


def calibration_key(target: Model, draft: Model | None, extra: str = "") -> str:
    """Return a key of everything that the costs depend on: files, cores and how they are used, the engine's build."""
    engine = bindings.engine_info()
    parts: list[Any] = [
        target.info.fingerprint,
        target.options.type_k,
        target.options.type_v,
        target.options.flash_attn,
        target.options.use_repack,
        target.options.n_experts,
        target.pool.n_threads,
        target.pool.cpus,
        target.options.n_ubatch,
        target.plan.n_rs_seq,
        target.sequence.rollback.kind,
        engine.llama_commit,
        engine.features,
        draft.info.fingerprint if draft is not None else "",
        extra,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def load_costs(file: Path | None, key: str, *, any_age: bool = False) -> PassCosts | None:
    """Return a plausible calibration of this key; None when there is none, or it is due again (unless `any_age`)."""
    saved = calibration_cache(file).read().get(key) if file is not None else None
    if saved is None:
        return None
    kept = KEPT_SECONDS if saved.steady and not saved.disturbed else UNSTEADY_SECONDS
    if not any_age and time.time() - saved.measured > kept:
        return None
    try:
        overlap = OverlapCosts(*saved.overlap) if saved.overlap else None
        costs = PassCosts(
            saved.verify_ms,
            saved.draft_ms,
            saved.read_ms,
            overlap,
            saved.rollback_ms,
            saved.steady,
            saved.disturbed,
        )
        return costs if is_plausible(costs.verify_ms) else None
    except ValueError:
        return None


def save_costs(file: Path | None, key: str, costs: PassCosts, target: str = "", draft: str = "") -> None:
    """Cache a calibration if it is plausible. `target` and `draft` are the fingerprints of both models' files."""
    if file is None or not is_plausible(costs.verify_ms):
        return
    accepted, compared = load_acceptance(file, target, draft)
    saved = Calibration(
        verify_ms=costs.verify_ms,
        draft_ms=costs.draft_ms,
        read_ms=costs.read_ms,
        rollback_ms=costs.rollback_ms,
        overlap=(costs.overlap.verify_ms, costs.overlap.draft_ms) if costs.overlap else None,
        target=target,
        draft=draft,
        steady=costs.steady,
        disturbed=costs.disturbed,
        measured=time.time(),
        accepted=accepted,
        compared=compared,
    )
    calibration_cache(file).put(key, saved)


def load_acceptance(file: Path | None, target: str, draft: str) -> tuple[float, float]:
    """Return how many tokens of the draft model were accepted and compared in earlier answers; (0, 0) if none.

    `target` and `draft` are the fingerprints of both models' files.
    """
    known = calibration_cache(file).read().values() if file is not None and draft else ()
    for one in reversed(list(known)):
        if (one.target, one.draft) == (target, draft) and 0 <= one.accepted <= one.compared <= _MOST_COMPARED:
            return one.accepted, one.compared
    return 0.0, 0.0


def save_acceptance(file: Path, target: str, draft: str, learned: tuple[float, float]) -> None:
    """Keep `learned`, as from `load_acceptance`, beside every calibration of this pair."""

    def change(entries: dict[str, Calibration]) -> None:
        for key, one in list(entries.items()):
            if (one.target, one.draft) == (target, draft):
                entries[key] = msgspec.structs.replace(one, accepted=learned[0], compared=learned[1])

    calibration_cache(file).update(change)
