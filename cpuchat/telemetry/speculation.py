"""Figures of drafting in an answer. Definitions: docs/figures.md."""

from __future__ import annotations

from dataclasses import dataclass

from cpuchat.protocol.messages import Speculation
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.protocol.timings import SpeculationFigures
from cpuchat.telemetry.metric import NO_ANSWER, Metric, missing

_OFF: Metric[float] = missing("drafting is off")
_NO_COUNTS = SpeculationFigures()


@dataclass(frozen=True, slots=True)
class DraftingFigures:
    """The figures of drafting: `counts` as the worker or a server sent them last, and what follows from them.

    `wanted`: drafters are chosen; `adaptive`: the depth is not fixed by the user. Acceptance is accepted by drafted
    tokens (0-1), `acceptance_now` over the last passes, `acceptance` over the answer. `tokens_per_pass` written per
    evaluation of the target. `depth` tokens are drafted per pass now, 0 = plain decoding, None: not known.
    `draft_share` of the decode time went into drafting that verification waited for (0-1). `plain_tok_s` is what plain
    decoding does here, `speed_up` the rate of this answer against it. `off` is why drafting is off, before the first
    counts, too.
    """

    counts: SpeculationFigures = _NO_COUNTS
    wanted: bool = False
    adaptive: bool = True
    depth: int | None = None
    off: DraftsOff | None = None
    acceptance_now: Metric[float] = _OFF
    acceptance: Metric[float] = _OFF
    tokens_per_pass: Metric[float] = _OFF
    draft_share: Metric[float] = _OFF
    plain_tok_s: Metric[float] = _OFF
    speed_up: Metric[float] = _OFF

    @property
    def is_off(self) -> bool:
        """Return whether drafting is off by the user's choice or by what was measured."""
        return not self.wanted or (self.off is not None and self.off.is_verdict)


class SpeculationMeter:
    """Keeps the newest `SpeculationFigures` of an answer together with the tokens and the time that they belong to."""

    def __init__(self) -> None:
        self.asked = Speculation()
        """The speculation options of the running or the next answer."""
        self._model_plain_ms: float | None = None
        self._drafts_off: DraftsOff | None = None
        self._server = False
        self.reset()

    def reset(self) -> None:
        """Begin another answer."""
        self.update(None, 0, 0.0)

    def model(self, model: ModelInfo | None) -> None:
        """Set the loaded model, or None."""
        self.reset()
        self._model_plain_ms = model.pass_ms[0] if model is not None and model.pass_ms else None
        self._drafts_off = model.drafts_off if model is not None else None
        # A server counts by itself, and drafts as it was started.
        self._server = model is not None and bool(model.server)

    def update(self, figures: SpeculationFigures | None, predicted_n: int, decode_ms: float) -> None:
        """Record figures taken when `predicted_n` tokens were generated in `decode_ms` milliseconds."""
        self._figures, self._predicted_n, self._decode_ms = figures, predicted_n, decode_ms

    def drafting(self, tok_s: float | None, answered: bool) -> DraftingFigures:
        """Return the current figures. `tok_s` is the rate to compare with plain decoding; `answered`: text has come."""
        adaptive = self.asked.depth == 0 and not self._server
        if not self.asked.drafters and self._figures is None and not self._server:
            return DraftingFigures(adaptive=adaptive)
        counts = self._figures or SpeculationFigures(off=self._drafts_off)
        nothing = "nothing drafted" if answered else NO_ANSWER
        depth = None if self._figures is None or self._server else self.asked.depth or counts.depth
        plain = self._plain_tok_s(counts)
        # Taken at two moments, so in the first instants of an answer the part can seem larger than the whole.
        long_enough = self._figures is not None and self._decode_ms >= max(counts.draft_ms, 1.0)
        timed = long_enough and not self._server and (counts.draft_n or counts.draft_ms)
        not_timed = "answer too short" if answered and depth is not None else nothing
        return DraftingFigures(
            counts=counts,
            wanted=True,
            adaptive=adaptive,
            depth=depth,
            off=counts.off or (self._drafts_off if not counts.draft_n else None),
            acceptance_now=_share(counts.recent_draft_n_accepted, counts.recent_draft_n, nothing),
            acceptance=_share(counts.draft_n_accepted, counts.draft_n, nothing),
            tokens_per_pass=Metric.of(counts.tokens_per_pass(self._predicted_n), nothing),
            draft_share=Metric(counts.draft_ms / self._decode_ms) if timed else missing(not_timed),
            plain_tok_s=plain,
            speed_up=Metric.of(counts.speed_up(tok_s, self._predicted_n), plain.why or nothing),
        )

    def _plain_tok_s(self, counts: SpeculationFigures) -> Metric[float]:
        """Return the plain speed: of an answer without drafts, its own average speed."""
        if not self._server:
            if self._figures is not None and not counts.draft_n and self._predicted_n > 1 and self._decode_ms > 0:
                return Metric((self._predicted_n - 1) * 1e3 / self._decode_ms)
            if plain_ms := counts.plain_ms or (self._model_plain_ms if not counts.disturbed else None):
                return Metric(1e3 / plain_ms)
        return missing("busy cores" if counts.disturbed else "not reported" if counts.source else "not calibrated")


def _share(part: int, whole: int, why: str) -> Metric[float]:
    return Metric(part / whole) if whole else missing(why)
