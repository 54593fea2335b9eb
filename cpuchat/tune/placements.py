"""How fast a loaded model should be in each layout of this machine, as far as that can be told beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuchat.hardware.placement.candidates import Layout, Prediction, layouts, predict, recommend
from cpuchat.hardware.placement.resolve import Arrangement, Resolved, resolve
from cpuchat.hardware.topology import Topology
from cpuchat.protocol import ModelInfo
from cpuchat.telemetry import units
from cpuchat.telemetry.meter import Figures
from cpuchat.telemetry.roofline import fits_cache
from cpuchat.telemetry.traffic import pass_bytes

if TYPE_CHECKING:
    from cpuchat.hardware.bandwidth.memory_modules import Theoretical
    from cpuchat.hardware.bandwidth.survey import Survey

ASSUMED_ACCEPTANCE, ASSUMED_DEPTH = 0.7, 4
"""Until drafting was measured with this model."""
_WORTH = 1.02


@dataclass(frozen=True, slots=True)
class Choice:
    """One layout. `speed` is the prediction in a few words, "" without one; `about` is a few lines."""

    name: str
    arrangement: Arrangement
    recommended: bool
    prediction: Prediction | None
    speed: str
    about: str


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """All layouts, and one sentence of advice, "" without."""

    choices: tuple[Choice, ...]
    advice: str = ""

    def choice(self, arrangement: Arrangement) -> Choice | None:
        """The layout with these words."""
        return next((c for c in self.choices if c.arrangement == arrangement), None)


@dataclass(frozen=True, slots=True)
class _Basis:
    """What predictions rest on, and how that is known."""

    target_bytes: float
    draft_bytes: float
    peak: float
    l3_link: float | None
    one_core: float | None
    tokens_per_pass: float
    depth: int
    source: str
    computing: bool


def compare_placements(
    topology: Topology,
    survey: Survey | None,
    theoretical: Theoretical | None,
    model: ModelInfo | None,
    figures: Figures,
    in_use: Arrangement,
) -> PlacementOptions:
    """Every layout that this machine has, with what is to be expected of `model` in it."""
    best = recommend(topology)
    now = resolve(in_use, topology)
    basis, why_not = _basis(survey, theoretical, model, figures)
    choices: list[Choice] = []
    taken = False
    for layout in layouts(topology):
        arrangement = Arrangement(layout.cores, layout.draft_cores, layout.memory)
        if not taken and _same(resolve(arrangement, topology), now):
            arrangement, taken = in_use, True  # other words for the same
        prediction = _predict(layout, topology, basis, model) if basis is not None else None
        choices.append(
            Choice(
                layout.name,
                arrangement,
                layout.name == best.name,
                prediction,
                _speed(layout, prediction, model),
                _about(layout, prediction, basis, why_not, model),
            )
        )
    return PlacementOptions(tuple(choices), _advice(choices, in_use, best))


def _same(one: Resolved, other: Resolved) -> bool:
    return (one.target, one.draft, one.memory) == (other.target, other.draft, other.memory)


def _basis(
    survey: Survey | None, theoretical: Theoretical | None, model: ModelInfo | None, figures: Figures
) -> tuple[_Basis | None, str]:
    """What to predict from, or why there is nothing."""
    if model is None:
        return None, "No model is loaded, so no speed is predicted."
    if model.traffic is None:
        return None, "What a pass of this model reads is not known, so no speed is predicted."
    if fits_cache(model):
        return None, "The weights fit in the L3 cache, so memory sets no limit and no speed is predicted."
    if survey is not None:
        peak, source = survey.all_cores.bytes_per_s, "the measured bandwidth"
    elif model.peak_read:
        peak, source = model.peak_read, "the measured bandwidth of the cores in use"
    elif theoretical is not None:
        peak, source = theoretical.bytes_per_s, "what the memory could deliver at most, as nothing is measured (m does)"
    else:
        return None, "The read bandwidth is not measured, so no speed is predicted: m measures it."
    n_past = figures.n_past or 0
    drafting = figures.drafting
    depth, tokens = 0, 1.0
    if model.draft_traffic is not None:
        depth, tokens = drafting.depth or ASSUMED_DEPTH, drafting.tokens_per_pass or 0.0
        if not drafting.depth or not tokens:
            depth = ASSUMED_DEPTH
            tokens = (1 - ASSUMED_ACCEPTANCE ** (depth + 1)) / (1 - ASSUMED_ACCEPTANCE)
            source += f", {100 * ASSUMED_ACCEPTANCE:.0f} % acceptance assumed"
    group = survey.l3_group if survey is not None else None
    link = survey.fabric_link if survey is not None else None
    return _Basis(
        pass_bytes(model.traffic, depth + 1, n_past),
        pass_bytes(model.draft_traffic, 1, n_past) if model.draft_traffic is not None else 0.0,
        peak,
        (link or group).bytes_per_s if (link or group) is not None else None,  # type: ignore[union-attr]
        survey.one_core.bytes_per_s if survey is not None else None,
        tokens,
        depth,
        source,
        figures.roofline.limit == "compute",
    ), ""


def _predict(layout: Layout, topology: Topology, basis: _Basis, model: ModelInfo | None) -> Prediction | None:
    if layout.draft is not None and (model is None or not model.draft):
        return None
    return predict(
        layout,
        topology,
        target_bytes=basis.target_bytes,
        draft_bytes=basis.draft_bytes,
        peak=basis.peak,
        l3_link=basis.l3_link,
        one_core=basis.one_core,
        tokens_per_pass=basis.tokens_per_pass,
        depth=basis.depth,
        overlap=layout.draft is not None,
    )


def _speed(layout: Layout, prediction: Prediction | None, model: ModelInfo | None) -> str:
    if prediction is not None:
        return f"≤ {units.rate(prediction.tok_s)} tok/s"
    return "needs a draft" if layout.draft is not None and model is not None and not model.draft else ""


def _about(
    layout: Layout, prediction: Prediction | None, basis: _Basis | None, why_not: str, model: ModelInfo | None
) -> str:
    lines: list[str] = []
    remarks: tuple[str, ...] = ()
    if prediction is not None and basis is not None:
        draft = f" + {1e3 * prediction.t_draft_s:.1f} ms draft" if prediction.t_draft_s else ""
        lines.append(
            f"At most {units.rate(prediction.tok_s)} tok/s: {1e3 * prediction.t_target_s:.1f} ms target{draft} per "
            f"pass. Limit: {prediction.limit}. From {basis.source}."
        )
        if basis.computing:
            lines.append("That is by bandwidth alone: compute is the limit now, so expect less.")
        remarks = prediction.remarks
    elif layout.draft is not None and model is not None and not model.draft:
        lines.append("It needs a draft model, and none is loaded.")
    elif why_not:
        lines.append(why_not)
    return "\n".join([*lines, layout.reason, *remarks])


def _advice(choices: list[Choice], in_use: Arrangement, best: Layout) -> str:
    now = next((c for c in choices if c.arrangement == in_use), None)
    wanted = next((c for c in choices if c.recommended), None)
    if wanted is None or wanted is now:
        return ""
    if now is not None and now.prediction and wanted.prediction:
        factor = wanted.prediction.tok_s / now.prediction.tok_s
        if factor < _WORTH:
            return ""
        return f"“{wanted.name}” is predicted {units.factor(factor)} as fast as now · t marks it, Enter tries it"
    return f"“{wanted.name}” is recommended · t marks it, Enter tries it"
