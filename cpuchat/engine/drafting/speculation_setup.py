"""Sets up speculation for a loaded model: its draft model, and the costs of passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from cpuchat.engine.drafting.cached_costs import calibrated_costs, load_acceptance, save_acceptance
from cpuchat.engine.drafting.draft_model import DraftModel
from cpuchat.engine.drafting.overlap import DraftThread
from cpuchat.engine.drafting.speculator import Speculator
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.file_reading import Progress
from cpuchat.engine.llama.limits import traffic
from cpuchat.engine.llama.model import Model
from cpuchat.errors import CpuchatError, GenerationFailed, Interrupted
from cpuchat.models.drafts.pairing import check_pair
from cpuchat.models.gguf.header import read_model
from cpuchat.protocol import LoadModel
from cpuchat.speculation.depth.choice import overlap_pays
from cpuchat.speculation.drafters.drafter import MAX_DEPTH


@dataclass
class SpeculationSetup:
    """The speculator of a loaded model, and its draft model if any. Free it before the target.

    `calibrations` keeps what was learned about the pair, whose files' fingerprints are `pair`; None: nothing is kept.
    """

    speculator: Speculator
    draft: Model | None = None
    thread: DraftThread | None = None
    calibrations: Path | None = None
    pair: tuple[str, str] = ("", "")

    def save(self) -> None:
        """Keep what was learned about the pair since it was saved last."""
        if self.calibrations is not None and (learned := self.speculator.take_learned()):
            save_acceptance(self.calibrations, *self.pair, learned)

    def free(self) -> None:
        self.save()
        if self.thread is not None:
            self.thread.close()
            self.thread = None
        if self.draft is not None:
            self.draft.free()
            self.draft = None


def set_up_speculation(
    target: Model, command: LoadModel, available: int, on_progress: Progress, abort: AbortFlag
) -> SpeculationSetup:
    """Load the draft model that `command` names, and determine the cost of drafting.

    A failure of either does not prevent using the target and is added to `target.info.notes`. Cancelling a calibration
    skips it.

    Args:
        available: bytes of memory that the draft model may take.

    Raises:
        Interrupted: the load of the draft model was cancelled.
    """
    notes: list[str] = []
    draft = _load_draft(target, command, available, on_progress, abort, notes)
    drafter = thread = None
    try:
        if draft is not None:
            drafter = DraftModel(draft.sequence, min(draft.vocab.n_tokens, target.vocab.n_tokens))
            try:
                thread = _draft_thread(target, draft, drafter, command.draft_cpus)
            except GenerationFailed as error:
                notes.append(f"No draft model: {error.message} {error.hint}")
                draft.free()
                draft = drafter = None
        max_depth = min(MAX_DEPTH, target.sequence.max_draft)
        costs, uncalibrated = None, ""
        if max_depth:
            costs, uncalibrated = calibrated_costs(target, draft, thread, command, on_progress, abort, notes)
    except BaseException:
        SpeculationSetup(Speculator(None), draft, thread).free()
        raise
    if thread is not None and not thread.always and not (costs is not None and overlap_pays(costs)):
        thread.close(models_stay=True)
        thread = None
        costs = costs and replace(costs, overlap=None)
    note = target.sequence.rollback.note
    why = "" if max_depth else f"off: {note[:1].lower()}{note[1:]}".rstrip(".")
    info = target.info
    target.info = msgspec.structs.replace(
        info,
        notes=(*info.notes, *notes),
        draft=draft.info.name if draft is not None else "",
        draft_path=draft.info.path if draft is not None else "",
        draft_quantization=draft.info.quantization if draft is not None else "",
        draft_traffic=traffic(draft) if draft is not None else None,
        draft_cpus=thread.cpus if thread is not None else draft.pool.cpus if draft is not None else (),
        pass_ms=costs.verify_ms if costs is not None and not costs.disturbed else (),
        no_speculation=why,
    )
    file = (
        Path(command.calibration_file) if command.calibration_file and costs is not None and draft is not None else None
    )
    pair = (info.fingerprint, draft.info.fingerprint if draft is not None else "")
    speculator = Speculator(
        costs,
        drafter,
        thread,
        max_depth=max_depth,
        disabled_reason=why,
        uncalibrated=uncalibrated,
        known=load_acceptance(file, *pair),
    )
    return SpeculationSetup(speculator, draft, thread, file, pair)


def _draft_thread(target: Model, draft: Model, drafter: DraftModel, cpus: tuple[int, ...]) -> DraftThread | None:
    """Return a thread with its own CPUs for the draft model: permanently, or to measure whether that is faster."""
    if not cpus:
        return None
    left = tuple(cpu for cpu in target.pool.cpus if cpu not in cpus)
    return DraftThread(target, draft, drafter, cpus, left if len(left) < len(target.pool.cpus) else None)


def _load_draft(
    target: Model, command: LoadModel, available: int, on_progress: Progress, abort: AbortFlag, notes: list[str]
) -> Model | None:
    if not command.options.draft_path or not target.sequence.max_draft:
        return None
    path = Path(command.options.draft_path)
    try:
        header = read_model(path)
        verdict = check_pair(target.header, header)
        if not verdict.ok:
            notes.append(f"No draft model: {verdict.reason} {verdict.hint}".strip())
            return None
        trained = header.n_ctx_train or target.sequence.n_ctx
        options = msgspec.structs.replace(
            command.options,
            n_ctx=min(target.sequence.n_ctx, trained),
            n_experts=0,
            draft_path="",
            from_disk=False,
        )
        draft = Model.load(
            path, options, target.pool, on_progress=on_progress, abort=abort, available=max(available, 0)
        )
    except Interrupted:
        raise
    except CpuchatError as error:
        notes.append(f"No draft model: {error.message} {error.hint}".strip())
        return None
    if draft.sequence.is_recurrent:
        draft.free()
        notes.append(f"No draft model: {path.name} has a recurrent state and cannot roll back rejected tokens.")
        return None
    return draft
