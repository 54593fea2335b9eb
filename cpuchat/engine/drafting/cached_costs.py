"""Caches calibrations and what was learned about a pair, and decides when to measure or repeat them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from cpuchat.engine.drafting.calibration import Samples, measure
from cpuchat.engine.drafting.overlap import DraftThread
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.file_reading import Progress
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.errors import GenerationFailed, Interrupted
from cpuchat.files import JsonCache
from cpuchat.hardware.busy_cores import MAX_BUSY_CORES, BusyCores
from cpuchat.models.drafts.calibrations import Calibration, calibration_cache, implausible, is_plausible
from cpuchat.protocol import LoadModel
from cpuchat.speculation.depth.costs import MAX_TOKENS, OverlapCosts, PassCosts
from cpuchat.speculation.depth.disabled_reason import DISTURBED, SKIPPED, UNCALIBRATED

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
    calibrate = command.options.calibrate and not target.plan.from_disk  # each pass would read the disk
    costs = load_costs(file, key, any_age=not calibrate)
    if not calibrate:
        return costs, "" if costs else UNCALIBRATED
    known, earlier = load_costs(file, target_key), load_costs(file, key, any_age=True)
    if any(one is not None and one.disturbed for one in (costs, known)) and _cores_idle(target.pool.cpus):
        costs, known = (one if one is not None and not one.disturbed else None for one in (costs, known))
    if costs is not None:
        return costs, ""
    samples = {} if known is not None else _take_unfinished(file, target_key)
    try:
        costs = measure(
            target,
            draft,
            thread,
            lambda n, total: on_progress("calibrating", n, total),
            known=known,
            samples=samples,
        )
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
            n = disturbed[0]
            what = "a plain decoding pass" if n == 1 else f"a pass over {n} tokens"
            notes.append(
                f"Calibration was disturbed by other programs: {what} took {costs.verify_ms[n - 1]:.3g} ms. "
                "Adaptive drafting stays off; reload the model when the machine is idle."
            )
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
    if known is None and draft is not None:  # the next draft model need not wait for the target's curve again
        save_costs(file, target_key, replace(costs, draft_ms=0.0, read_ms=0.0, overlap=None), fingerprint)
    return costs, ""


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
    plan, engine = target.plan, bindings.engine_info()
    parts: list[Any] = [
        target.info.fingerprint,
        target.options.type_k,
        target.options.type_v,
        target.options.flash_attn,
        target.options.use_repack,
        target.options.n_experts,
        target.pool.n_threads,
        target.pool.cpus,
        plan.n_ubatch,
        plan.n_rs_seq,
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
