"""Figures of drafting in an answer. Definitions: docs/figures.md."""

from __future__ import annotations

from dataclasses import dataclass

from cpuchat.protocol.messages import Speculation
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import DrafterCount, SpeculationFigures


@dataclass(frozen=True, slots=True)
class Drafting:
    """The figures of drafting; None is "unknown", and `why_missing` says why.

    `wanted`: drafters are chosen; `adaptive`: the depth is not fixed by the user. Acceptance is accepted by drafted
    tokens (0-1), `acceptance_now` over the last passes, `acceptance` over the answer. `tokens_per_pass` written per
    evaluation of the target. `by_position`: (drafted, accepted) for the first, second, ... token of a draft.
    `drafter` proposed last ("" none yet). `depth` tokens are drafted per pass now, 0 = plain decoding. `draft_share`
    of the decode time went into drafting that verification waited for (0-1). `plain_tok_s` is what plain decoding
    does here, `speed_up` the rate of this answer against it. `reason` says in one sentence why drafting is off.
    `source` names who counted at a server ("server", "server-wide"; "" for the engine of this machine). `disturbed`: no
    comparison with plain decoding, because other programs had the cores for part of the answer.
    """

    wanted: bool = False
    adaptive: bool = True
    acceptance_now: float | None = None
    acceptance: float | None = None
    tokens_per_pass: float | None = None
    by_position: tuple[tuple[int, int], ...] = ()
    by_drafter: tuple[DrafterCount, ...] = ()
    drafter: str = ""
    depth: int | None = None
    overlap: bool = False
    draft_share: float | None = None
    plain_tok_s: float | None = None
    speed_up: float | None = None
    reason: str = ""
    answered: bool = False
    source: str = ""
    disturbed: bool = False

    def why_missing(self, field: str) -> str:
        """Return why that field is None, in a few words; "" when it is not None.

        Raises:
            AttributeError: no such field.
        """
        if getattr(self, field) is not None:
            return ""
        if not self.wanted:
            return "drafting is off"
        if field in ("plain_tok_s", "speed_up") and self.disturbed:
            return "busy cores"
        if field == "plain_tok_s":
            return "not reported" if self.source else "not calibrated"
        if not self.answered:
            return "no answer yet"
        if field == "speed_up" and self.plain_tok_s is None:
            return "plain speed not measured"
        return "answer too short" if field == "draft_share" and self.depth is not None else "nothing drafted"


class SpeculationMeter:
    """Keeps the newest `SpeculationFigures` of an answer together with the tokens and the time that they belong to."""

    def __init__(self) -> None:
        self.asked = Speculation()
        """The speculation options of the running or the next answer."""
        self._model_plain_ms: float | None = None
        self._no_speculation = ""
        self._remote = self._server = False
        self.reset()

    def reset(self) -> None:
        """Begin another answer."""
        self._figures: SpeculationFigures | None = None
        self._predicted_n = 0
        self._decode_ms = 0.0

    def model(self, model: ModelInfo | None) -> None:
        """Set the loaded model, or None."""
        self.reset()
        self._model_plain_ms = model.pass_ms[0] if model is not None and model.pass_ms else None
        self._no_speculation = model.no_speculation if model is not None else ""
        # A server counts by itself, also one of cpuchat's own; another one drafts as it was started.
        self._remote = model is not None and bool(model.server)
        self._server = self._remote or (model is not None and bool(model.engine))

    def update(self, figures: SpeculationFigures | None, predicted_n: int, decode_ms: float) -> None:
        """Record figures taken when `predicted_n` tokens were generated in `decode_ms` milliseconds."""
        self._figures, self._predicted_n, self._decode_ms = figures, predicted_n, decode_ms

    def drafting(self, tok_s: float | None, answered: bool) -> Drafting:
        """Return the current figures. `tok_s` is the rate to compare with plain decoding; `answered`: text has come."""
        adaptive = self.asked.depth == 0 and not self._server
        if not self.asked.drafters and not self._remote:
            return Drafting(adaptive=adaptive)
        now = self._figures or SpeculationFigures(reason=self._no_speculation)
        # Taken at two moments, so in the first instants of an answer the part can seem larger than the whole.
        long_enough = self._figures is not None and self._decode_ms >= max(now.draft_ms, 1.0)
        timed = long_enough and not self._server and (now.draft_n or now.draft_ms)
        share = now.draft_ms / self._decode_ms if timed else None
        return Drafting(
            wanted=True,
            adaptive=adaptive,
            acceptance_now=_share(now.recent_draft_n_accepted, now.recent_draft_n),
            acceptance=_share(now.draft_n_accepted, now.draft_n),
            tokens_per_pass=now.tokens_per_pass(self._predicted_n),
            by_position=now.by_position,
            by_drafter=now.by_drafter,
            drafter=now.drafter,
            depth=None if self._figures is None or self._server else self.asked.depth or now.depth,
            overlap=now.overlap,
            draft_share=share,
            plain_tok_s=self._plain_tok_s(now),
            speed_up=now.speed_up(tok_s, self._predicted_n),
            reason=now.reason or (self._no_speculation if not now.draft_n else ""),
            answered=answered,
            source=now.source,
            disturbed=now.disturbed,
        )

    def _plain_tok_s(self, now: SpeculationFigures) -> float | None:
        """Return the plain speed: of an answer without drafts, its own average speed."""
        if self._server:
            return None
        if self._figures is not None and not now.draft_n and self._predicted_n > 1 and self._decode_ms > 0:
            return (self._predicted_n - 1) * 1e3 / self._decode_ms
        plain_ms = now.plain_ms or (self._model_plain_ms if not now.disturbed else None)
        return 1e3 / plain_ms if plain_ms else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
