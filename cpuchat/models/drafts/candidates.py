"""Lists models that may draft for a target: local ones and those the catalog names, with the expected speed-up.

`candidates` lists them without reading any; `check` compares one vocabulary. So a screen can show all rows first and
fill in the results. `gain` predicts the speed-up from a draft model before it is loaded:

Leviathan et al. (2211.17192): if a drafted token is accepted with probability a, a pass that verifies g of them yields
E = (1 - a^(g+1)) / (1 - a) tokens. They assume that a pass costs as much as one over a single token, which is wrong on
CPUs: here it is divided by the measured T(g + 1) of the target and g tokens of the draft model, the latest that the
engine kept. Other costs are not counted: on two Zen 4 cores, measured speed-ups were 1 to 14 % lower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from cpuchat.base.errors import CpuchatError, ModelNotFound, NotOnHub
from cpuchat.costs.calibrations import MAX_TOKENS, MIN_PLAIN_MS, TargetCosts
from cpuchat.costs.model import ALIKE, N_PAST, bytes_read, pair_costs
from cpuchat.models.catalog import Catalog, CatalogModel, match_local
from cpuchat.models.costs import costs_of_target
from cpuchat.models.cpu_modules import engine_cpu
from cpuchat.models.drafts.pairing import Compatibility, check_files, check_pair
from cpuchat.models.file_names import file_fingerprint
from cpuchat.models.fit import HeadSize, head_size, snapshots
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.heads import HeadKind, difference, included_layers, is_own, unusable
from cpuchat.models.library.places import LocalModel, is_demo, is_same_model
from cpuchat.models.machine import Machine
from cpuchat.models.prediction import local_work
from cpuchat.models.support import scalar_type_of, scalar_types, why_slow
from cpuchat.models.traffic import model_work, typical_work
from cpuchat.protocol.messages import LoadOptions
from cpuchat.protocol.model_info import ModelWork
from cpuchat.protocol.reasons import MATTERS

if TYPE_CHECKING:
    from cpuchat.models.hub.client import Hub
    from cpuchat.models.hub.repository import RepoModel, Repository


Kind = Literal["measured", "prose", "code", "same model"]

TYPICAL: tuple[tuple[Kind, float], ...] = (("prose", 0.6), ("code", 0.8))
"""Acceptance rate per token with a small model of the same family: open chat 0.6 to 0.75, code 0.8 to 0.95."""
SAME_MODEL: tuple[tuple[Kind, float], ...] = (("same model", 0.9),)
"""...and with a smaller quantization of the target itself: the share of equal next tokens, 0.91 and more of Q4_K_M
(docs/compare.md)."""
OF_HEAD: tuple[tuple[Kind, float], ...] = (("prose", 0.7), ("code", 0.9))
"""...and with a head that was trained with the model: by 47 and 81 % of four tokens accepted in creative writing and
Python (Qwen3.6 35B A3B, llama.cpp pull request 22673)."""
_ERROR = 0.08  # of a predicted speed-up, as the acceptance in a text is known within 0.1
WORTH = (1 + MATTERS) * (1 + _ERROR)
"""Smallest predicted speed-up that is worth a second model."""
NOT_CALIBRATED = "the target is not calibrated yet; load it in the app with drafting on"
NO_SPEED = "the draft model's time per token is unknown"


class DraftGain(msgspec.Struct, frozen=True):
    """At an `acceptance` rate per token, the best draft `depth` (0: no drafting) and its speed-up."""

    kind: Kind
    acceptance: float
    depth: int
    speedup: float

    @property
    def words(self) -> str:
        """`≈ 1.4× in code`."""
        rate = f"acceptance of {100 * self.acceptance:.0f} %"
        known = {"measured": f"at its measured {rate}", "same model": f"at an {rate}"}
        where = known.get(self.kind, f"in {self.kind}")
        return f"≈ {self.speedup:.1f}× {where}" if self.depth else f"no gain {where}"


class Expectation(msgspec.Struct, frozen=True):
    """The expected speed-up of a draft model: for its measured acceptance rate, if known, and for typical texts.

    `gains` is empty when nothing is known, and `why` says what is missing; else `why` is the basis of `draft_ms`,
    milliseconds for a drafted token. `no_gain` is why there is no speed-up, "" when there is one. `scalar_type` of the
    draft model as of `Prediction`: only what was measured is told, and it is never worth loading."""

    gains: tuple[DraftGain, ...] = ()
    why: str = NOT_CALIBRATED
    draft_ms: float = 0.0
    no_gain: str = ""
    scalar_type: str = ""

    @property
    def mean(self) -> float:
        """Return the measured speed-up, else the mean over typical texts; 0 when not known."""
        counting = [gain for gain in self.gains if gain.kind == "measured"] or self.gains
        return sum(gain.speedup for gain in counting) / len(counting) if counting else 0.0

    @property
    def pays(self) -> bool:
        """Return whether it is worth loading: a tenth faster for some texts."""
        return not self.scalar_type and any(gain.speedup >= WORTH for gain in self.gains)

    @property
    def words(self) -> str:
        """`≈ 1.1× in prose, ≈ 1.4× in code`; `no gain: ...`, or why nothing is known."""
        if not self.gains:
            return self.why
        if self.no_gain:
            return f"no gain: {self.no_gain}"
        return ", ".join(gain.words for gain in self.gains)


def gain(pass_ms: Sequence[float], draft_ms: float, acceptance: float, kind: Kind = "measured") -> DraftGain:
    """Return the best depth, 0 included. `pass_ms`: milliseconds of a pass of the target over 1, 2, ... tokens, at
    least one; `draft_ms`: for a drafted token. `acceptance`: probability that a drafted token is accepted if those
    before it were, 0 to 1."""
    tokens = reached = 1.0
    best = DraftGain(kind, acceptance, 0, 1.0)
    if pass_ms[0] < MIN_PLAIN_MS:
        return best
    for depth in range(1, len(pass_ms)):
        reached *= acceptance
        tokens += reached
        speedup = tokens * pass_ms[0] / (pass_ms[depth] + depth * draft_ms)
        if speedup > best.speedup:
            best = DraftGain(kind, acceptance, depth, speedup)
    return best


def expectation(
    pass_ms: Sequence[float],
    draft_ms: float,
    basis: str,
    measured: float | None = None,
    usual: tuple[tuple[Kind, float], ...] = TYPICAL,
    about: str = "",
) -> Expectation:
    """Return the speed-up for typical texts, and for the acceptance rate `measured` with this pair. `pass_ms` as of
    `gain`, () when the target was never calibrated; `draft_ms`: 0 when not known. `basis`: where `draft_ms` comes from,
    or why it is not known. `usual`: acceptance rates of such a pair; of `SAME_MODEL` one holds for all texts.
    `about`: "≈" of passes that are predicted."""
    if not pass_ms:
        return Expectation()
    if draft_ms <= 0:
        return Expectation(why=basis or NO_SPEED)
    known: tuple[tuple[Kind, float], ...] = () if measured is None else (("measured", measured),)
    kinds = known or usual if usual is SAME_MODEL else (*known, *usual)
    gains = tuple(gain(pass_ms, draft_ms, rate, kind) for kind, rate in kinds)
    best = max(one.acceptance for one in gains)
    no_gain = ""
    if pass_ms[0] < MIN_PLAIN_MS:
        no_gain = f"a pass takes {about}{pass_ms[0]:.2g} ms, and handling drafts takes as long"
    elif not gain(pass_ms, 0.0, best).depth:
        no_gain = "batch verification costs as much as token-by-token decoding"
    elif not any(one.depth for one in gains):
        no_gain = f"a drafted token takes {draft_ms:.1f} ms, too slow against {about}{pass_ms[0]:.1f} ms for a pass"
    return Expectation(gains, basis, draft_ms, no_gain)


UNKNOWN = TargetCosts()


def target_costs(target: Path) -> TargetCosts:
    """Return the latest measurements of a model file on this machine, whatever cores they were made with."""
    return costs_of_target(_fingerprint(target))


def measured_draft_ms(costs: TargetCosts, draft: Path) -> float:
    """Return the milliseconds for a token of that draft model beside the target of `costs`; 0 when not measured."""
    return costs.draft_ms.get(_fingerprint(draft), 0.0) if costs.draft_ms else 0.0


def _fingerprint(path: Path) -> str:
    try:
        return file_fingerprint(path)
    except ModelNotFound:
        return ""


_DRAFT_QUANTIZATIONS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")
_MAX_READ_SHARE = 0.6  # of the bytes that the target reads
_LOCAL_BONUS = 1.05  # what must be downloaded has to be faster by more than this
INCLUDED = "mtp"
"""The value for `--draft-model` that means the MTP layers of the target itself."""


class DraftCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A model that may draft. `where`: on this machine (then `path` is its file) or on the hub (then `repo`).

    `size` in bytes (0: not known). `entry` is the id of its catalog entry, "" for none, and `named` whether the catalog
    names it for this target. `verdict` None: not checked yet. `failed` is why it could not be checked, else "".

    `head` is the kind of a draft head; None for a draft model. `included`: the target itself contains it, and `path` is
    the target's. On the hub `file` is its path in the repository. `same_model`: a smaller quantization of the
    target."""

    name: str
    where: Literal["here", "hub"]
    path: Path | None = None
    repo: str = ""
    quantization: str = ""
    size: int = 0
    entry: str = ""
    named: bool = False
    verdict: Compatibility | None = None
    failed: str = ""
    expected: Expectation = Expectation()
    head: HeadKind | None = None
    file: str = ""
    included: bool = False
    same_model: bool = False

    @property
    def spec(self) -> str:
        """Return the value for `--draft-model`, and for one on the hub for `models download` first:
        `owner/name:Q8_0`."""
        if self.included:
            return INCLUDED
        if self.path is not None:
            return str(self.path)
        if self.file:
            return f"{self.repo}:{self.name}"
        return f"{self.repo}:{self.quantization}" if self.quantization else self.repo

    @property
    def fits(self) -> bool | None:
        """Return whether it fits; None when unknown."""
        return None if self.verdict is None else self.verdict.ok

    @classmethod
    def of_file(cls, model: LocalModel, **facts: Any) -> DraftCandidate:
        """Create one for a model on this machine; `facts` are fields that its file does not have."""
        named = {"name": model.name, "path": model.path, "repo": model.repo}
        return cls(**{**named, "quantization": model.quantization, "size": model.size, **facts}, where="here")


def max_read(target: GGUFHeader) -> float:
    """Return how many bytes a draft model may read for a token: a share of what the target reads. More never pays, even
    if four of five drafted tokens are accepted and verifying a second one costs only a twentieth of a pass."""
    return _MAX_READ_SHARE * bytes_read(model_work(target), 1, N_PAST)


def candidates(
    target: GGUFHeader,
    here: Iterable[LocalModel],
    catalog: Catalog,
    costs: TargetCosts = UNKNOWN,
    machine: Machine | None = None,
) -> list[DraftCandidate]:
    """Return all of them unchecked: those named by the catalog first, then smaller quantizations of the target, then
    the other local ones, smaller ones first. Reads no files, except the fingerprints of draft models that were
    measured.

    `target` is the header of the whole model (`read_model`), `here` are the models on this machine. `costs` are those
    of the target, of a loaded one with `pass_ms` of its ModelInfo; `machine` predicts those that were not measured."""
    judged = _Target.of(target, costs, machine)
    entry = match_local(catalog, target)
    wanted = catalog.drafts_of(entry) if entry is not None else []
    listed: list[DraftCandidate] = []
    toy = is_demo(target.path)
    for model in here:
        if toy and is_demo(model.path):
            continue  # its own smaller quantization drafts no faster than it decodes
        if model.damaged is None and model.size < target.file_size and model.path != target.path:
            draft, same = match_local(catalog, model), is_same_model(target, model)
            id = draft.id if draft is not None else ""
            usual = SAME_MODEL if same else TYPICAL
            expected = judged.expected(local_work(model, id), model.path, exact=model.work is not None, usual=usual)
            listed.append(
                DraftCandidate.of_file(model, entry=id, named=draft in wanted, expected=expected, same_model=same)
            )
    there, limit = {candidate.entry for candidate in listed}, max_read(target)
    listed += [_on_hub(draft, judged, limit) for draft in wanted if draft.id not in there]
    order = {model.id: number for number, model in enumerate(wanted)}

    def place(one: DraftCandidate) -> tuple[int, int, int]:
        better = rank_among(_DRAFT_QUANTIZATIONS, one.quantization) if one.named else 0
        return order.get(one.entry, len(order) + (not one.same_model)), better, one.size

    return sorted(listed, key=place)


def _on_hub(draft: CatalogModel, judged: _Target, limit: float) -> DraftCandidate:
    """Return a model of the catalog in its least quantized file of at most `limit` bytes, else the smallest."""
    sizes = {name: round(1e9 * size) for name, size in draft.sizes.items()}
    fitting = ((name, sizes[name]) for name in _DRAFT_QUANTIZATIONS if sizes.get(name, limit + 1) <= limit)
    smallest = min(sizes.items(), key=lambda one: one[1], default=("", 0))
    quantization, size = next(fitting, smallest)
    work = typical_work(max(size, 1), quantization, params=1e9 * draft.params, id=draft.id)
    return DraftCandidate(
        name=draft.name, where="hub", repo=draft.repos[0], quantization=quantization, size=size, entry=draft.id,
        named=True, expected=judged.expected(work),
    )  # fmt: skip


class _Target(NamedTuple):
    """What draft models are compared for: a target's work and measured costs, on a machine. `longest`: tokens of the
    longest pass after which it can roll back."""

    path: Path
    work: ModelWork
    costs: TargetCosts
    machine: Machine | None
    longest: int = MAX_TOKENS

    @classmethod
    def of(cls, header: GGUFHeader, costs: TargetCosts, machine: Machine | None) -> _Target:
        kept = snapshots(header, LoadOptions(draft_path=str(header.path)))
        work = model_work(header, alike=ALIKE)
        return cls(header.path, work, costs, machine, 1 + kept if kept else MAX_TOKENS)

    def expected(
        self,
        draft: ModelWork,
        path: Path | None = None,
        *,
        exact: bool = False,
        usual: tuple[tuple[Kind, float], ...] = TYPICAL,
        n_tokens: int = MAX_TOKENS,
    ) -> Expectation:
        """Return the expected speed-up, from measured costs where there are some, else by the cost model. `path`: of
        the draft model, if it is on this machine; `exact`: `draft` is from its header. `usual` as of `expectation`.
        `n_tokens`: of the longest pass over a draft."""
        n_tokens = min(n_tokens, self.longest)
        passes = self.costs.pass_ms[:n_tokens]
        pair = _fingerprint(path) if path is not None and self.costs.draft_ms else ""
        draft_ms = self.costs.draft_ms.get(pair, 0.0)
        basis = self.machine.peak_source if self.machine is not None else "costs are not measured"
        basis = "measured here with this draft model" if draft_ms else basis
        here = self.machine.scalar_types if self.machine is not None else scalar_types(engine_cpu())
        scalar = scalar_type_of(draft, here)
        if slow := ("" if draft_ms else scalar) or ("" if passes else scalar_type_of(self.work, here)):
            return Expectation(why=why_slow(slow), scalar_type=scalar)
        if self.machine is not None and self.machine.profile is not None and not (passes and draft_ms):
            both = pair_costs(self.machine.profile, self.work, draft, N_PAST, n_tokens)
            own = self.machine.factor_of(self.path)
            passes = passes or tuple(1e3 * own * seconds for seconds in both.verify)
            if not draft_ms:
                about = "predicted" if exact else "≈ from its size"
                own = self.machine.factor_of(path) if path is not None else 1.0
                draft_ms, basis = 1e3 * own * both.draft, f"{about} ({self.machine.source})"
        if draft_ms and self.costs.pass_ms and self.work.is_moe:
            basis += "; passes calibrated with random tokens, which use more experts than text"
        found = expectation(
            passes, draft_ms, basis, self.costs.acceptance.get(pair), usual, "" if self.costs.pass_ms else "≈"
        )
        return msgspec.structs.replace(found, scalar_type=scalar)


def expected_pair(target: GGUFHeader, draft: GGUFHeader, costs: TargetCosts, machine: Machine | None) -> Expectation:
    """Return the expected speed-up of a local draft model or head, both by their headers; of the head that the target
    contains, where `draft` is the target itself. `costs`: of the target."""
    judged = _Target.of(target, costs, machine)
    is_head = draft.is_head or is_own(target.path, draft.path)
    usual = OF_HEAD if is_head else SAME_MODEL if is_same_model(target, draft) else TYPICAL
    n_tokens = 2 if is_head and draft.number("nextn_predict_layers") > 1 else MAX_TOKENS  # `HeadSequence.max_draft`
    work = model_work(draft, of_head=is_head)
    return judged.expected(work, draft.path, exact=True, usual=usual, n_tokens=n_tokens)


class OwnHead(msgspec.Struct, frozen=True):
    """The MTP head that a model contains: its size, the `expected` speed-up, and why the engine cannot use it, as a
    clause ("": it can)."""

    size: HeadSize
    expected: Expectation
    problem: str = ""


def own_head(header: GGUFHeader, options: LoadOptions, machine: Machine) -> OwnHead | None:
    """Return the head that the model of `header` contains, loaded with `options` on this machine; None without one."""
    size = head_size(header, options) if not header.is_head else None
    if size is None:
        return None
    problem = unusable("mtp", header.architecture, n_layers=included_layers(header))
    return OwnHead(size, expected_pair(header, header, target_costs(header.path), machine), problem)


def usual_head(entry: CatalogModel, machine: Machine) -> OwnHead | None:
    """Return the head that files of a catalog model contain, by the size of its usual file; None without one."""
    if not entry.head_repo or not entry.size:
        return None
    facts: dict[str, Any] = {"params": 1e9 * entry.params, "active": entry.active_share, "id": entry.id}
    work, head = (typical_work(entry.size, entry.quantization, **facts, of_head=one) for one in (False, True))
    size = HeadSize(round(head.weight_bytes - sum(one.nbytes for one in head.head)), round(head.attention[0].nbytes))
    return OwnHead(size, _Target(Path(), work, UNKNOWN, machine).expected(head, usual=OF_HEAD))


def rank_among(preferred: Sequence[str], quantization: str) -> int:
    """Return a sort key: the preferred quantizations in their order, then all others."""
    return preferred.index(quantization) if quantization in preferred else len(preferred)


def check(candidate: DraftCandidate, target: GGUFHeader, hub: Hub | None = None) -> DraftCandidate:
    """Return the candidate with its verdict. Reads headers, of one on the hub over the network: not for the UI thread.
    `hub`: None: candidates on the hub stay unchecked."""
    try:
        if candidate.head is None and candidate.path is not None:
            return msgspec.structs.replace(candidate, verdict=check_files(target.path, candidate.path))
        header = target if candidate.included else header_of(candidate, hub)
    except CpuchatError as error:
        return msgspec.structs.replace(candidate, failed=error.message)
    if header is None:
        return candidate
    if candidate.head is not None:
        reason = difference(target, header)
        return msgspec.structs.replace(candidate, verdict=Compatibility(ok=not reason, reason=reason))
    return msgspec.structs.replace(candidate, verdict=check_pair(target, header), size=header.file_size)


def header_of(candidate: DraftCandidate, hub: Hub | None) -> GGUFHeader | None:
    """Return the header of a candidate; None for one on the hub without `hub`. Raises HubError, ModelDamaged,
    ModelNotFound: it cannot be read."""
    if candidate.path is not None:
        return read_model(candidate.path)
    if hub is None:
        return None
    repository = hub.repository(candidate.repo)
    return hub.header(repository, model_of(repository, candidate))


def model_of(repository: Repository, candidate: DraftCandidate) -> RepoModel:
    """Return the file of a candidate on the hub. Raises NotOnHub."""
    from cpuchat.models.hub.repository import choose_repo_model

    if not candidate.file:
        return choose_repo_model(repository, candidate.quantization)
    for model in repository.models:
        if model.files[0].path == candidate.file and model.complete:
            return model
    raise NotOnHub(f"{repository.id} no longer has {candidate.file}.", "Choose another one.")


def recommended(found: Iterable[DraftCandidate]) -> DraftCandidate | None:
    """Return the one to use: it fits (or is unchecked, but named by the catalog), its type has a SIMD kernel, and it
    has the largest expected speed-up.

    Where no speed-up is known, the first that the catalog names. None when none is worth it."""
    usable = (one for one in found if one.fits or (one.fits is None and one.named and not one.failed))
    possible = [one for one in usable if not one.expected.scalar_type]
    told = [one for one in possible if one.expected.gains]
    if told:
        best = max(told, key=lambda one: one.expected.mean * (_LOCAL_BONUS if one.where == "here" else 1))
        return best if best.expected.pays else None
    return next((one for one in possible if one.named), None)
