"""A recorded comparison of one prompt: what both sides wrote, and when. It can be replayed without a model."""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError
from cpuchat.compare.figures import ComparisonFigures, Name, Verdict, figures_of
from cpuchat.compare.runner import Round, SideAnswer, Turn
from cpuchat.hardware.topology import read_topology
from cpuchat.telemetry import units

if TYPE_CHECKING:
    from cpuchat.compare.comparison import Comparison

_Amount = Annotated[float, Meta(ge=0, le=1e18)]


class RecordingError(CpuchatError, code="recording"):
    """The file of a recording cannot be read or written."""


class RecordedSide(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One side's answer; None: not known. `tokens`: the text of each token (reasoning included) and when it came, in ms
    after the first one, which came after `first_s` seconds. `drafters` as of `TokenText`. `tok_s`: median of the
    rounds. `ended`: the answer is complete. `utilization` of the memory, 0 to 1. `cached`: weights stay in L3."""

    name: str
    tokens: tuple[tuple[str, _Amount], ...] = ()
    drafters: tuple[str, ...] = ()
    first_s: _Amount | None = None
    tok_s: _Amount | None = None
    ended: bool = False
    bytes_per_token: _Amount | None = None
    utilization: _Amount | None = None
    cached: bool = False

    @property
    def end_ms(self) -> float:
        """Return when the last token came."""
        return self.tokens[-1][1] if self.tokens else 0.0

    def n_at(self, at_ms: float) -> int:
        """Return how many tokens were there at this time."""
        return bisect_right(self.tokens, at_ms, key=itemgetter(1))

    def rate_at(self, at_ms: float) -> float | None:
        """Return tok/s from the first token to the last one at this time; that of the answer once it is complete."""
        n = self.n_at(at_ms)
        if self.ended and n == len(self.tokens) and self.tok_s is not None:
            return self.tok_s
        written_ms = self.tokens[n - 1][1] if n else 0.0
        return 1e3 * (n - 1) / written_ms if written_ms > 0 else None


class Recording(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Both answers to one prompt. `stopped`: the user has stopped it; there is no verdict then."""

    title: str
    sides: tuple[RecordedSide, RecordedSide]
    machine: str = ""
    prompt: str = ""
    verdict: Verdict = Verdict("incomplete")
    stopped: bool = False

    @classmethod
    def of(cls, comparison: Comparison, turn: Turn, running: Round | None = None) -> Recording:
        """Record the round of `turn` that counts, or what there is of the one that is `running`."""
        figures, shown = ComparisonFigures(), running
        if shown is not None and shown.disturbed:  # by the side that has answered
            figures = ComparisonFigures(verdict=Verdict("disturbed"))
        elif shown is None:
            figures, shown = figures_of(turn.counted()), turn.counted()[-1]
        a, b = (
            _side(name, answer, figures.medians_of(n))
            for n, (name, answer) in enumerate(zip(comparison.names, shown.answers, strict=True))
        )
        n_threads = next((one.model.n_threads for one in shown.answers if one.model is not None and not running), 0)
        return cls(
            title=" against ".join(comparison.names),
            sides=(a, b),
            machine=f"{read_topology().cpu_name} · {units.plural(n_threads, 'thread')}" if n_threads else "",
            prompt=turn.prompt,
            verdict=figures.verdict,
            stopped=running is None and shown.stopped,
        )

    @property
    def end_ms(self) -> float:
        """Return when the last token of either side came."""
        return max(side.end_ms for side in self.sides)

    @property
    def finish_ms(self) -> float:
        """Return when the first side had ended; infinity unless both have."""
        return min((side.end_ms for side in self.sides), default=0.0) if self.complete else float("inf")

    @property
    def complete(self) -> bool:
        return all(side.ended and side.tokens for side in self.sides)

    @property
    def leader(self) -> int | None:
        """Return the faster side; None where that cannot be said."""
        verdict = self.verdict
        if verdict.kind in ("incomplete", "short", "disturbed", "same") or (
            verdict.kind == "noisy" and verdict.n_rounds > 1
        ):
            return None
        return int(verdict.speed > 1)


def read_recording(path: Path) -> Recording:
    """Read a recording that belongs to cpuchat. Raises RecordingError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=prepared(Recording))
    except (OSError, ValueError) as error:
        raise RecordingError(f"Cannot read {path}: {error}.", "Reinstall cpuchat.") from None


def _side(name: str, answer: SideAnswer, medians: dict[Name, float]) -> RecordedSide:
    """Return the record of an answer."""
    roofline, utilization = answer.roofline, medians.get("utilization")
    if roofline is not None and (roofline.off or roofline.fits_cache):
        utilization = None
    return RecordedSide(
        name=name, tokens=tuple(answer.written.tokens()), drafters=answer.written.drafters,
        first_s=medians.get("first_s"), tok_s=medians.get("tok_s"), ended=answer.complete,
        bytes_per_token=medians.get("bytes"), utilization=utilization,
        cached=roofline is not None and roofline.fits_cache,
    )  # fmt: skip
