"""What is loaded beside a target model so that it can speculate: the draft model, and what passes cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from cpuchat.engine.drafting import calibration
from cpuchat.engine.drafting.draft_model import DraftModel
from cpuchat.engine.drafting.overlap import DraftThread
from cpuchat.engine.drafting.speculator import Speculator
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.limits import traffic
from cpuchat.engine.llama.model import Model, Progress
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.errors import CpuchatError, GenerationFailed, Interrupted
from cpuchat.models.drafts.calibrations import implausible
from cpuchat.models.drafts.pairing import check_pair
from cpuchat.models.gguf.header import read_model
from cpuchat.protocol import LoadModel
from cpuchat.speculation.depth.costs import PassCosts
from cpuchat.speculation.depth.disabled_reason import DISTURBED, SKIPPED, UNCALIBRATED
from cpuchat.speculation.depth.overlap import overlap_pays
from cpuchat.speculation.drafters.drafter import MAX_DEPTH


@dataclass
class SpeculationSetup:
    """The speculator of a loaded model, and the draft model behind it if there is one. Freed before the target."""

    speculator: Speculator
    draft: Model | None = None
    thread: DraftThread | None = None

    def free(self) -> None:
        if self.thread is not None:
            self.thread.close()
            self.thread = None
        if self.draft is not None:
            self.draft.free()
            self.draft = None


def set_up_speculation(
    target: Model, command: LoadModel, available: int, on_progress: Progress, abort: AbortFlag
) -> SpeculationSetup:
    """Load the draft model that `command` names, and find out what drafting costs.

    Neither keeps the target from being used: what does not work is told in `target.info.notes`. A stop while costs
    are being measured skips that.

    Args:
        available: bytes of memory that the draft model may take.

    Raises:
        Interrupted: the load of the draft model was stopped.
    """
    notes: list[str] = []
    draft = _load_draft(target, command, available, on_progress, abort, notes)
    drafter = thread = None
    try:
        if draft is not None:
            drafter = DraftModel(draft.sequence, min(draft.vocab.n_tokens, target.vocab.n_tokens))
            thread = _draft_thread(target, draft, drafter, command.draft_cpus)
        max_depth = min(MAX_DEPTH, target.sequence.max_draft)
        costs, uncalibrated = None, ""
        if max_depth:
            costs, uncalibrated = _costs(target, draft, thread, command, on_progress, abort, notes)
    except BaseException:
        SpeculationSetup(Speculator(None), draft, thread).free()
        raise
    if thread is not None and not thread.always and not (costs is not None and overlap_pays(costs)):
        thread.close()
        thread = None
        costs = costs and replace(costs, overlap=None)
    note = target.sequence.rollback.note
    why = "" if max_depth else f"off: {note[:1].lower()}{note[1:]}".rstrip(".")
    info = target.info
    target.info = msgspec.structs.replace(
        info,
        notes=(*info.notes, *notes),
        draft=draft.info.name if draft is not None else "",
        draft_quantization=draft.info.quantization if draft is not None else "",
        draft_traffic=traffic(draft) if draft is not None else None,
        draft_cpus=thread.cpus if thread is not None else draft.pool.cpus if draft is not None else (),
        pass_ms=costs.verify_ms if costs is not None else (),
        no_speculation=why,
    )
    speculator = Speculator(costs, drafter, thread, max_depth=max_depth, disabled_reason=why, uncalibrated=uncalibrated)
    return SpeculationSetup(speculator, draft, thread)


def _draft_thread(target: Model, draft: Model, drafter: DraftModel, cpus: tuple[int, ...]) -> DraftThread | None:
    """A thread on CPUs of its own for the draft model: for good, or to find out whether that is faster."""
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
        )
        draft = Model.load(
            path, options, target.pool, on_progress=on_progress, abort=abort, available=max(available, 0)
        )
    except Interrupted:
        raise
    except CpuchatError as error:
        notes.append(f"No draft model: {error.message} {error.hint}".strip())
        return None
    if not draft.sequence.can_roll_back:
        draft.free()
        notes.append(f"No draft model: {path.name} keeps a running state and cannot take back what was refused.")
        return None
    return draft


def _costs(
    target: Model,
    draft: Model | None,
    thread: DraftThread | None,
    command: LoadModel,
    on_progress: Progress,
    abort: AbortFlag,
    notes: list[str],
) -> tuple[PassCosts | None, str]:
    """The costs, or why there are none in one plain sentence."""
    file = Path(command.calibration_file) if command.calibration_file else None
    alone = calibration.calibration_key(target, None)
    key = calibration.calibration_key(target, draft, str(thread.cpus) if thread is not None else "") if draft else alone

    def kept(key: str, *, any_age: bool = False) -> PassCosts | None:
        return calibration.load_costs(file, key, any_age=any_age) if file is not None else None

    if costs := kept(key, any_age=not command.options.calibrate):
        return costs, ""
    if not command.options.calibrate:
        return None, UNCALIBRATED
    known, earlier = kept(alone), kept(key, any_age=True)
    try:
        costs = calibration.measure(
            target, draft, thread, lambda done, total: on_progress("calibrating", done, total), known=known
        )
    except Aborted:
        abort.clear()
        if abort.is_set():  # for good: it is not only the measurement that is not wanted
            raise Interrupted("The load was stopped.") from None
        if earlier is None:
            notes.append("Calibration was skipped, so adaptive drafting stays off until the model is loaded again.")
        return earlier, SKIPPED
    except GenerationFailed as error:
        notes.append(f"Adaptive drafting stays off: {error.message}")
        return None, UNCALIBRATED
    if dear := implausible(dict(enumerate(costs.verify_ms, 1))):
        if earlier is None:
            passes = "a plain step" if dear[0] == 1 else f"a pass over {dear[0]} tokens"
            notes.append(
                f"Calibration was disturbed by other programs: {passes} took {costs.verify_ms[dear[0] - 1]:.3g} ms. "
                "Adaptive drafting stays off; reload the model when the machine is idle."
            )
        return earlier, DISTURBED
    if file is not None:
        fingerprint = target.info.fingerprint
        calibration.save_costs(file, key, costs, fingerprint, draft.info.fingerprint if draft is not None else "")
        if known is None and draft is not None:  # the next draft model need not wait for the target's curve again
            costs_alone = replace(costs, draft_ms=0.0, read_ms=0.0, overlap=None)
            calibration.save_costs(file, alone, costs_alone, fingerprint)
    return costs, ""
