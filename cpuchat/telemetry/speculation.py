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


def drafting(
    model: ModelInfo | None,
    asked: Speculation,
    figures: SpeculationFigures | None,
    predicted_n: int,
    decode_ms: float,
    tok_s: float | None,
    is_answered: bool,
) -> DraftingFigures:
    """Return the figures of an answer.

    Args:
        asked: how it is drafted.
        figures: the newest, taken when `predicted_n` tokens were generated in `decode_ms` milliseconds.
        tok_s: the rate to compare with plain decoding.
        is_answered: text has come.
    """
    on_server = model is not None and bool(model.server)  # it counts by itself, and drafts as it was started
    drafts_off = model.drafts_off if model is not None else None
    adaptive = asked.depth == 0 and not on_server
    if not asked.drafters and figures is None and not on_server:
        return DraftingFigures(adaptive=adaptive)
    counts = figures or SpeculationFigures(off=drafts_off)
    nothing = "nothing drafted" if is_answered else NO_ANSWER
    depth = None if figures is None or on_server else asked.depth or counts.depth
    # Of an answer without drafts, its own average speed.
    plain = missing("busy cores" if counts.disturbed else "not reported" if counts.source else "not calibrated")
    calibrated_ms = model.pass_ms[0] if model is not None and model.pass_ms and not counts.disturbed else 0.0
    if not on_server and figures is not None and not counts.draft_n and predicted_n > 1 and decode_ms > 0:
        plain = Metric((predicted_n - 1) * 1e3 / decode_ms)
    elif not on_server and (plain_ms := counts.plain_ms or calibrated_ms):
        plain = Metric(1e3 / plain_ms)
    # Taken at two moments, so in the first instants of an answer the part can seem larger than the whole.
    long_enough = figures is not None and decode_ms >= max(counts.draft_ms, 1.0)
    timed = long_enough and not on_server and (counts.draft_n or counts.draft_ms)
    not_timed = "answer too short" if is_answered and depth is not None else nothing
    return DraftingFigures(
        counts=counts,
        wanted=True,
        adaptive=adaptive,
        depth=depth,
        off=counts.off or (drafts_off if not counts.draft_n else None),
        acceptance_now=_share(counts.recent_draft_n_accepted, counts.recent_draft_n, nothing),
        acceptance=_share(counts.draft_n_accepted, counts.draft_n, nothing),
        tokens_per_pass=Metric.of(counts.tokens_per_pass(predicted_n), nothing),
        draft_share=Metric(counts.draft_ms / decode_ms) if timed else missing(not_timed),
        plain_tok_s=plain,
        speed_up=Metric.of(counts.speed_up(tok_s, predicted_n), plain.why or nothing),
    )


def _share(part: int, whole: int, why: str) -> Metric[float]:
    return Metric(part / whole) if whole else missing(why)
