"""Predicts the speed of a loaded model in each placement that this machine allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuchat.errors import UsageError
from cpuchat.hardware.placement.candidates import Candidate, candidates
from cpuchat.hardware.placement.ceiling import Ceiling, ceiling
from cpuchat.hardware.placement.placement import Placement, PlacementSpec, place
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
"""Values until drafting was measured with this model."""
_WORTH = 1.02


@dataclass(frozen=True, slots=True)
class PlacementOption:
    """One placement to choose. `speed` is its ceiling in a few words, "" without one; `about` is a few lines."""

    name: str
    spec: PlacementSpec
    recommended: bool
    ceiling: Ceiling | None
    speed: str
    about: str


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """All placements, and one sentence of advice, "" without."""

    options: tuple[PlacementOption, ...]
    advice: str = ""

    def find(self, spec: PlacementSpec) -> PlacementOption | None:
        """Return the placement with these words."""
        return next((option for option in self.options if option.spec == spec), None)

    @property
    def recommended(self) -> PlacementOption | None:
        """Return the placement to start with; measurements decide which is fastest."""
        return next((option for option in self.options if option.recommended), None)


@dataclass(frozen=True, slots=True)
class _Basis:
    """The basis of predictions, and its source."""

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
    in_use: PlacementSpec,
) -> PlacementOptions:
    """Return every placement that this machine allows, with the ceiling of `model` in it."""
    now = _placed(topology, in_use)
    basis, why_not = _basis(survey, theoretical, model, figures)
    options: list[PlacementOption] = []
    taken = False
    for candidate in candidates(topology):
        spec = candidate.spec
        if not taken and now is not None and _same(candidate.placement, now):
            spec, taken = in_use, True  # other words for the same
        most = _ceiling(candidate, topology, basis, model) if basis is not None else None
        options.append(
            PlacementOption(
                candidate.name,
                spec,
                not options,
                most,
                _speed(candidate, most, model),
                _about(candidate, most, basis, why_not, model),
            )
        )
    return PlacementOptions(tuple(options), _advice(options, in_use))


def _placed(topology: Topology, spec: PlacementSpec) -> Placement | None:
    """Resolve `spec` with a draft model loaded; None if it is not possible here."""
    try:
        return place(topology, spec, with_draft=spec.names_draft_cores)
    except UsageError:
        return None


def _same(one: Placement, other: Placement) -> bool:
    return (one.cpus, one.draft_cpus, one.memory) == (other.cpus, other.draft_cpus, other.memory)


def _basis(
    survey: Survey | None, theoretical: Theoretical | None, model: ModelInfo | None, figures: Figures
) -> tuple[_Basis | None, str]:
    """Return the basis of predictions, or why there is none."""
    if model is None:
        return None, "No model is loaded, so no speed is predicted."
    if model.traffic is None:
        return None, "The bytes per pass of this model are not known, so no speed is predicted."
    if fits_cache(model):
        return None, "The weights fit in the L3 cache, so memory bandwidth is not the limit and no speed is predicted."
    if survey is not None:
        peak, source = survey.all_cores.bytes_per_s, "the measured bandwidth"
    elif model.peak_read:
        peak, source = model.peak_read, "the measured bandwidth of the cores in use"
    elif theoretical is not None:
        peak, source = theoretical.bytes_per_s, "the theoretical peak (press m to measure)"
    else:
        return None, "The read bandwidth is not measured, so no speed is predicted. Press m to measure it."
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


def _ceiling(candidate: Candidate, topology: Topology, basis: _Basis, model: ModelInfo | None) -> Ceiling | None:
    if candidate.placement.is_split and (model is None or not model.draft):
        return None
    return ceiling(
        candidate,
        topology,
        target_bytes=basis.target_bytes,
        draft_bytes=basis.draft_bytes,
        peak=basis.peak,
        l3_link=basis.l3_link,
        one_core=basis.one_core,
        tokens_per_pass=basis.tokens_per_pass,
        depth=basis.depth,
        overlap=candidate.placement.is_split,
    )


def _speed(candidate: Candidate, most: Ceiling | None, model: ModelInfo | None) -> str:
    if most is not None:
        return f"≤ {units.rate(most.tok_s)} tok/s"
    return "needs draft" if candidate.placement.is_split and model is not None and not model.draft else ""


def _about(
    candidate: Candidate, most: Ceiling | None, basis: _Basis | None, why_not: str, model: ModelInfo | None
) -> str:
    lines: list[str] = []
    remarks: tuple[str, ...] = ()
    if most is not None and basis is not None:
        draft = f" + {1e3 * most.t_draft_s:.1f} ms draft" if most.t_draft_s else ""
        lines.append(
            f"At most {units.rate(most.tok_s)} tok/s: {1e3 * most.t_target_s:.1f} ms target{draft} per "
            f"pass. Limit: {most.limit}. From {basis.source}."
        )
        if basis.computing:
            lines.append("Memory bandwidth only; compute is the limit now, so expect less.")
        remarks = most.remarks
    elif candidate.placement.is_split and model is not None and not model.draft:
        lines.append("Needs a draft model; none is loaded.")
    elif why_not:
        lines.append(why_not)
    return "\n".join([*lines, candidate.reason, *remarks])


def _advice(options: list[PlacementOption], in_use: PlacementSpec) -> str:
    now = next((option for option in options if option.spec == in_use), None)
    wanted = next((option for option in options if option.recommended), None)
    if wanted is None or wanted is now:
        return ""
    if now is not None and now.ceiling and wanted.ceiling:
        factor = wanted.ceiling.tok_s / now.ceiling.tok_s
        if factor < _WORTH:
            return ""
        return f"The ceiling of “{wanted.name}” is {units.factor(factor)} that of now · t selects it, Enter tries it"
    return f"“{wanted.name}” is recommended · t selects it, Enter tries it"
