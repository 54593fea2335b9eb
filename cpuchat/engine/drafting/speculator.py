"""The drafters of one loaded model under a depth controller, and setting them up: draft model and costs of passes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import msgspec

from cpuchat.base.errors import CpuchatError, GenerationFailed, Interrupted
from cpuchat.costs.calibrations import MIN_PLAIN_MS, PassCosts
from cpuchat.engine.drafting.calibration import calibrate, known_costs
from cpuchat.engine.drafting.draft_model import DraftModel, ModelDrafting
from cpuchat.engine.drafting.head import Head
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import LoadedHead, Model, Progress
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.models.costs import accepted, keep_accepted
from cpuchat.models.drafts.pairing import check_pair
from cpuchat.models.gguf.header import read_model
from cpuchat.models.heads import require_head
from cpuchat.models.ollama import file_name
from cpuchat.protocol.messages import LoadModel, Speculation
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.protocol.timings import SpeculationFigures
from cpuchat.speculation.depth.controller import DepthController
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, Proposal
from cpuchat.speculation.drafters.suffix import NgramIndex, ScoredDrafter, SuffixDecoding
from cpuchat.speculation.stats import PassRecord, SpeculationStats

LOOKUP_SHARE: Final = 0.01
"""Share of the time of plain passes that may be spent on exploring whether to draft."""
_LOOKUP_AHEAD: Final = 0.1
"""Limit of the exploration time that may be saved up, in plain passes."""


class Speculator:
    """Proposes drafts for one answer after the other and learns from their acceptance. Suffix decoding is asked first,
    then the draft model. The controller decides what is worth a pass.

    `costs` are measured; None when there was no calibration yet. `draft`: the draft model, if one is loaded.
    `max_depth`: longest draft that the target can verify and roll back; 0 = never draft, for the reason `disabled`."""

    def __init__(
        self,
        costs: PassCosts | None,
        draft: DraftModel | None = None,
        *,
        max_depth: int = MAX_DEPTH,
        disabled: DraftsOff | None = None,
    ) -> None:
        self._permanently_disabled = self.disabled = disabled
        self._max_depth = max_depth
        self.min_plain_ms = MIN_PLAIN_MS
        self.lookup_share = LOOKUP_SHARE
        self._drafter = draft
        self._index = NgramIndex()
        self.use_costs(costs)

    def use_costs(self, costs: PassCosts | None, known: tuple[float, float] = (0.0, 0.0)) -> None:
        """Choose depths by these costs from now on; between answers. `known`: accepted and compared tokens of the draft
        model in earlier ones."""
        self._costs, self._learned = costs, known
        self._plain_ms = costs.verify_ms[0] if costs is not None else None
        has_draft = self._drafter is not None
        self._controller = DepthController(costs, max_depth=self._max_depth, has_draft_model=has_draft, known=known)
        self._draft = ModelDrafting(self._drafter, self._controller) if self._drafter is not None else None
        self._begin(Speculation())

    def _begin(self, options: Speculation) -> None:
        self._options = options
        self._model = self._draft if "draft" in options.drafters else None
        self._suffix: ScoredDrafter | None = None
        self._stats = SpeculationStats()
        self._n_reported = 0  # tokens of the answer that the drafters know
        self._lookup_debt = 0.0  # seconds of lookups that proposed nothing, less what may be
        self._lookup_seconds = 0.0  # before the next pass, without waiting for the draft model
        self._was_asked = False
        self._unasked_ms, self._n_unasked = 0.0, 0  # plain steps without a lookup

    def beside(self) -> Speculator:
        """Return one for answers beside this one's, without the draft model."""
        other = Speculator(None, max_depth=self._max_depth, disabled=self._permanently_disabled)
        other.follow(self)
        return other

    def follow(self, other: Speculator) -> None:
        """Choose depths by the costs of `other`."""
        self.use_costs(other._costs)

    def forget(self) -> None:
        self._index.set_text(())
        if self._draft is not None:
            self._draft.drafter.begin_answer(())

    def begin_answer(self, options: Speculation, text: Tokens[int]) -> bool:
        """Begin an answer to `text`. Returns False when drafting is off, and `disabled` is why if it was requested."""
        self._begin(options)
        if self._draft is not None:
            self._draft.drafter.follows = "draft" in options.drafters
        self._controller.begin_answer(fixed=min(options.depth, self._max_depth))
        self.disabled = None
        if self._model is None and "suffix" not in options.drafters:
            return False
        self.disabled, plain = self._permanently_disabled, self._plain_ms
        if self.disabled is None and not options.depth and plain is not None and plain < self.min_plain_ms:
            self.disabled = DraftsOff("too fast", plain_ms=plain)
        if self.disabled is not None:
            self._model = None
            return False
        if "suffix" in options.drafters:
            self._index.set_text(text)
            self._suffix = ScoredDrafter(self._index, SuffixDecoding(self._index), self._controller.free_depth)
        if self._model is not None:
            self._model.begin_answer(text)
        return True

    @property
    def seconds(self) -> float:
        """Return the seconds in this answer that the target waited for the draft model."""
        return self._model.seconds if self._model is not None else 0.0

    def chances(self, proposal: Proposal) -> list[float]:
        """Return the chances that the tokens of a proposal are accepted, each with all before it."""
        return self._controller.chances(proposal)

    def propose(self, written: list[int], room: int, *, is_shared: bool = False) -> Proposal | None:
        """Return a draft of at most `room` tokens to verify now; None: decode the next token without one. `written`:
        all tokens of the answer so far. `is_shared`: for a pass over tokens of other answers too, which verifies as
        much of it as pays there, without the draft model. Raises as `Sequence.extend`."""
        self._was_asked = self._lookup_debt <= 0
        if not self._was_asked:
            return None
        start, waited = perf_counter(), self.seconds
        tokens, self._n_reported = written[self._n_reported :], len(written)
        if self._suffix is not None:
            self._suffix.append(tokens)
            for buckets, accepted in self._suffix.take_scores():
                self._controller.record_scores("suffix", buckets, accepted)
        if self._model is not None:
            self._model.drafter.append(tokens)
        room, proposal = min(room, self._max_depth), None
        if is_shared:
            if room > 0 and self._suffix is not None and self._costs is not None:
                proposal = self._suffix.offer(min(room, self._options.depth or room))
            room = 0
        if room > 0 and self._suffix is not None:
            proposal = self._suffix.propose(room)
        if room > 0 and not proposal and self._model is not None:
            proposal = self._model.propose(room)
        self._lookup_seconds = perf_counter() - start - (self.seconds - waited)
        return proposal or None

    def record_plain(self, seconds: float) -> None:
        """Learn from a plain pass, and count the cost of looking for a draft before it."""
        start = perf_counter()
        ms = 1e3 * seconds
        if not self._was_asked:
            self._unasked_ms += ms
            self._n_unasked += 1
            self._stats.record(PassRecord(ms))
        else:
            if self._n_unasked:  # undisturbed steps tell better what plain decoding costs than the one after a lookup
                ms, self._unasked_ms, self._n_unasked = self._unasked_ms / self._n_unasked, 0.0, 0
            record, model = PassRecord(ms), self._model
            if model is not None and (waited := model.take_wait_ms()):  # it proposed nothing
                record = PassRecord(ms, "draft", draft_ms=waited, unread=model.unread)
            self._record(record)
        self._book_lookup(seconds, self._lookup_seconds + perf_counter() - start)

    def _book_lookup(self, seconds: float, spent: float) -> None:
        """Book a pass without a draft: looking for one is done only as far as it pays."""
        if self._was_asked and not self._options.depth:
            self._lookup_debt = max(self._lookup_debt, -_LOOKUP_AHEAD * seconds) + spent
        self._lookup_debt -= self.lookup_share * seconds

    def record_shared(
        self, seconds: float, proposal: Proposal | None = None, accepted: int = 0, compared: int = 0
    ) -> None:
        """Learn as from other passes, but nothing about costs, from one over tokens of other answers too."""
        if proposal:
            record = PassRecord(0.0, proposal.drafter, proposal.buckets, accepted, compared)
            if self._suffix is not None:
                self._suffix.start_verify()
        else:
            record = PassRecord(0.0)
            self._book_lookup(seconds, self._lookup_seconds)
        if self._model is not None:
            self._model.take_wait_ms()
        self._stats.record(record)
        self._controller.record_shared(record)

    def record_verify(
        self, proposal: Proposal, accepted: int, compared: int, seconds: float, rollback: float, again: int
    ) -> None:
        """Learn from a verify pass: of `compared` drafted tokens the first `accepted` were the target's too. After its
        `seconds` the others were rolled back in `rollback` seconds, with `again` further passes."""
        if self._suffix is not None and proposal.drafter == "suffix":
            self._suffix.start_verify()  # offered for a shared pass whose company has left
        model, ms = self._model, 1e3 * (self._lookup_seconds + seconds)
        draft_ms, unread = (model.take_wait_ms(), model.unread) if model is not None else (0.0, 0)
        of_draft = proposal.drafter, proposal.buckets, accepted, compared, draft_ms, unread
        self._record(PassRecord(ms, *of_draft, 1e3 * rollback, again))

    def _record(self, record: PassRecord) -> None:
        self._stats.record(record)
        self._controller.record(record)

    def take_learned(self) -> tuple[float, float] | None:
        """Return accepted and compared tokens of the draft model in all answers; None: nothing new since last time."""
        before, self._learned = self._learned, self._controller.learned
        return self._learned if self._learned != before else None

    def end_answer(self) -> None:
        if self._draft is not None:
            self._draft.drafter.end_answer()

    def figures(self) -> SpeculationFigures:
        controller, model = self._controller, self._model
        return msgspec.structs.replace(
            self._stats.counts(),
            depth=controller.depth,
            draft_passes=model.passes if model is not None else 0,
            draft_ms=1e3 * self.seconds,
            plain_ms=controller.timed_plain_ms,
            off=self.disabled or controller.off,
        )


@dataclass
class SpeculationSetup:
    """The speculator of a loaded model, and its draft model if any; `pair`: their fingerprints. Freed before the
    target."""

    speculator: Speculator
    draft: Model | LoadedHead | None = None
    pair: tuple[str, str] | None = None

    def use_costs(self, target: Model, costs: PassCosts | None) -> None:
        """Draft by these costs, or not at all."""
        shown = costs.verify_ms if costs is not None and not costs.disturbed else ()
        target.info = msgspec.structs.replace(target.info, pass_ms=shown)
        if costs is None:
            return
        if target.passes is not None:
            target.passes.pass_ms = costs.verify_ms
        if self.draft is not None:
            self.pair = (target.info.fingerprint, self.draft.info.fingerprint)
        self.speculator.use_costs(costs, accepted(*self.pair) if self.pair is not None else (0.0, 0.0))

    def is_due(self, target: Model) -> bool:
        """Return whether what passes cost should be measured."""
        return target.sequence.max_draft > 0 and known_costs(target, self.draft)[1]

    def calibrate(self, target: Model, tell: Callable[[int, int], None] = lambda *_: None) -> None:
        """Measure what passes cost, which empties the sequences of both models. Raises Aborted, GenerationFailed."""
        self.save()
        self.speculator.forget()
        self.use_costs(target, calibrate(target, self.draft, tell))

    def save(self) -> None:
        """Keep what was learned about the pair since it was saved last."""
        if self.pair is not None and (learned := self.speculator.take_learned()):
            keep_accepted(*self.pair, learned)

    def free(self) -> None:
        self.save()
        if self.draft is not None:
            self.draft.free()
            self.draft = None


def set_up_speculation(
    target: Model, command: LoadModel, available: int, on_progress: Progress, abort: AbortFlag
) -> SpeculationSetup:
    """Load the draft model that `command` names, and determine the cost of drafting. A failure of either is added to
    `target.info.notes`. `available`: bytes of memory that the draft model may take. Raises Interrupted: cancelled."""
    notes: list[str] = []
    draft = _load_draft(target, command, available, on_progress, abort, notes)
    drafter = None
    try:
        if isinstance(draft, LoadedHead):
            drafter = Head(draft.sequence, target.sequence, target.vocab.n_tokens)
        elif draft is not None:
            drafter = DraftModel(draft.sequence, min(draft.vocab.n_tokens, target.vocab.n_tokens))
        max_depth = min(MAX_DEPTH, target.sequence.max_draft)
        note = target.sequence.rollback.note
        disabled = None if max_depth else DraftsOff("model", note=f"{note[:1].lower()}{note[1:]}".rstrip("."))
        setup = SpeculationSetup(Speculator(None, drafter, max_depth=max_depth, disabled=disabled), draft)
        if max_depth:
            setup.use_costs(target, known_costs(target, draft)[0])
        if command.options.calibrate and setup.is_due(target):
            try:
                setup.calibrate(target, partial(on_progress, "calibrating"))
            except GenerationFailed as error:
                notes.append(f"Calibration failed, so adaptive drafting stays off: {error.message}")
    except BaseException as error:
        SpeculationSetup(Speculator(None), draft).free()
        raise Interrupted("The load was cancelled.") from None if isinstance(error, Aborted) else error
    changes: dict[str, Any] = {"notes": (*target.info.notes, *notes), "drafts_off": disabled}
    if draft is not None:
        info = draft.info
        changes |= {"draft": info.name, "draft_path": info.path, "draft_quantization": info.quantization}
        changes |= {"draft_work": info.work}
    target.info = msgspec.structs.replace(target.info, **changes)
    return setup


def _load_draft(
    target: Model, command: LoadModel, available: int, on_progress: Progress, abort: AbortFlag, notes: list[str]
) -> Model | LoadedHead | None:
    if not command.options.draft_path or not target.sequence.max_draft:
        return None
    path = Path(command.options.draft_path)

    def tell(phase: str, done: int, total: int) -> None:
        on_progress(f"{phase} draft", done, total)

    try:
        header = read_model(path)
        if kind := require_head(target.header, header):
            return target.open_head(header, kind, tell, max(available, 0))
        verdict = check_pair(target.header, header)
        if not verdict.ok:
            notes.append(f"No draft model: {verdict.reason}")
            return None
        trained = header.n_ctx_train or target.sequence.n_ctx
        options = msgspec.structs.replace(
            command.options, n_ctx=min(target.sequence.n_ctx, trained), draft_path="", parallel=1
        )
        draft = Model.load(path, options, target.pool, on_progress=tell, abort=abort, available=max(available, 0))
    except Interrupted:
        raise
    except CpuchatError as error:
        notes.append(f"No draft model: {error.message} {error.hint}".strip())
        return None
    if draft.sequence.is_recurrent:
        draft.free()
        notes.append(f"No draft model: {file_name(path)} has a recurrent state and cannot roll back rejected tokens.")
        return None
    return draft
