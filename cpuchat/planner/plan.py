"""Plans a model on a machine (does it fit, how fast, for how many chats at once), and compares plans.

What can be planned: machines (this one, too) with the sources of their figures, from which their cost profile follows,
and models by a file's header, from the catalog, or by a usual size such as 70B.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec

from cpuchat.base import paths, toml
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError, ModelNotFound, UsageError
from cpuchat.config.settings import Settings, explained
from cpuchat.costs.calibrations import MAX_TOKENS
from cpuchat.costs.model import (
    ALIKE,
    CostProfile,
    batch_rate,
    bytes_read,
    compute_ceiling,
    max_users,
    pair_costs,
    pass_cost,
    prefill_cost,
    scaled,
)
from cpuchat.costs.usual import SCENARIOS, USUAL_GHZ, Figure, Kind, Scenario, Text, cpu_of, usual, usual_profile
from cpuchat.hardware import topology as machine_topology
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import Instructions
from cpuchat.models import kernels
from cpuchat.models.catalog import PACE, Catalog, CatalogModel, match_local
from cpuchat.models.cpu_modules import engine_cpu
from cpuchat.models.drafts.candidates import WORTH, gain
from cpuchat.models.drafts.choice import choose_draft
from cpuchat.models.file_names import rank, without_prefix
from cpuchat.models.fit import MemoryNeed, draft_memory, kv_by_window, kv_cells, plan_memory, snapshots
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.heads import is_own, title, usable_layers
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import DEMO_FILES, grouped, shown_name
from cpuchat.models.machine import TunedMachine, this_machine
from cpuchat.models.ollama import file_name
from cpuchat.models.prediction import TOO_LARGE, MemoryFit, spare_bytes, usual_need
from cpuchat.models.quantize.types import quant_type
from cpuchat.models.support import check_supported, scalar_type_of, scalar_types, why_slow
from cpuchat.models.synthetic.model import SHAPES, header_of
from cpuchat.models.traffic import model_work, typical_work
from cpuchat.protocol.messages import LoadOptions
from cpuchat.protocol.model_info import ModelWork
from cpuchat.telemetry.machine import ROUGH

_DEFAULTS, _OPTIONS = Settings(), LoadOptions()
HERE = "this"
"""The name of the machine that cpuchat runs on."""
_WORDS = re.compile(r"[a-z]+|\d+(?:\.\d+)?")
_PUNCTUATION = re.compile(r"[:_ -]+")
_NOT_IN_ID = re.compile(r"[^a-z0-9.+-]+")
_FIGURES = frozenset({"cores", "clock_ghz", "memory_gb", "theoretical", "measured", "decode", "l3_mb"})
_LARGE = 1e12  # bytes of weights that no cache holds
_MEASURED_MAX = 1.05  # of the theoretical bandwidth: data sheets round
_ARM = frozenset({"ampereone", "apple-m", "arm64"})  # of the names in cpus.toml
_WITH_AVX2 = Instructions(frozenset({"AVX", "AVX2"}))
_FITTED: dict[Scenario, float] = {"low": 0.87, "value": 1.0, "high": 1.15}
"""Speed against a profile fitted to a probe: of 15 models of 0.05B to 30B-A3B in Q4_K_M, Q8_0 and F16, 13 decoded
within this range (benchmarks/README.md, costs.py)."""


class MachineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine. Bandwidths in GB/s, memory in GB, of 1e9 bytes.

    `theoretical` is what the memory channels allow, `measured` what reading reaches, `decode` what decoding reaches;
    the latter two follow from the kind of machine where missing. `cpu` is a name in cpus.toml. Of the machine that
    cpuchat runs on, `free_gb` is what is available now, and `fitted` the profile that was measured, in place of one by
    these figures; passes of the draft model take `draft_factor` times as long as by it."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9.+-]*\Z", max_length=60)]
    name: Text
    kind: Kind = "server"
    cpu: Text
    sockets: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    cores: Figure
    clock_ghz: Figure
    memory_gb: Figure
    free_gb: Figure | None = None
    theoretical: Figure | None = None
    measured: Figure | None = None
    decode: Figure | None = None
    l3_mb: Figure | None = None
    fitted: CostProfile | None = None
    draft_factor: float | None = None

    def __post_init__(self) -> None:
        if self.theoretical is None and self.measured is None:
            raise ValueError("measured: give the measured or the theoretical bandwidth")
        peak = self.theoretical or self.read_gbs
        for name, figure in (("measured", self.measured), ("decode", self.decode)):
            if figure is not None and figure.at("high") > _MEASURED_MAX * peak.at("high"):
                raise ValueError(f"{name}: exceeds the bandwidth of the memory")
        if self.cpu not in usual().cpu:
            known = difflib.get_close_matches(self.cpu, usual().cpu, n=3, cutoff=0.3) or list(usual().cpu)
            raise ValueError(f"cpu: unknown {self.cpu!r}; known are {', '.join(known)}")

    @property
    def scalar_types(self) -> frozenset[str]:
        """Return the tensor types that its CPU computes without vector instructions."""
        if self.id == HERE:
            return scalar_types(engine_cpu())
        return scalar_types(_WITH_AVX2, "aarch64" if self.cpu in _ARM else "x86_64")

    @property
    def read_gbs(self) -> Figure:
        """Return the read bandwidth: measured, else what is typical of the theoretical one."""
        if self.measured is not None:
            return self.measured
        share, peak = usual().typical, self.theoretical
        assert peak is not None  # by __post_init__
        return Figure(share.value * peak.value, basis="estimate", source=f"80 % of {peak.value:g}: {share.source}")

    def decode_gbs(self, scenario: Scenario) -> float:
        """Return the bandwidth that decoding reaches."""
        if self.fitted is not None:
            return self.profile(scenario).read_rate(_LARGE) / 1e9
        if self.decode is not None:
            return self.decode.at(scenario)
        read, share = self.read_gbs, usual().decode[self.kind]
        if self.id == HERE and read.at(scenario) != read.value:  # far less certain than the share
            return share.value * read.at(scenario)
        return share.at(scenario) * read.value

    @property
    def decode_source(self) -> str:
        if self.decode is not None:
            return self.decode.source
        share = usual().decode[self.kind]
        return f"{100 * share.at('low'):.0f} to {100 * share.at('high'):.0f} % of the read bandwidth: {share.source}"

    def profile(self, scenario: Scenario = "value", own: Collection[str] | None = None) -> CostProfile:
        """Return the cost profile, with everything at its `low`, its `value`, or its `high`; `own` are the types that
        cpuchat's kernels compute (None: all that they can, where they run)."""
        if self.fitted is not None:
            return scaled(self.fitted, _FITTED[scenario])
        if own is None:
            own = kernels.TYPES if self.id != HERE or kernels.instructions_used(engine_cpu()) else ()
        return usual_profile(
            self.cpu,
            self.cores.value,
            self.decode_gbs(scenario) * 1e9,
            clock_ghz=self.clock_ghz.value,
            l3_bytes=self.l3_mb.value * 1e6 if self.l3_mb is not None else 0.0,
            sockets=self.sockets,
            scenario=scenario,
            own=own,
        )


@functools.cache
def machines() -> tuple[MachineSpec, ...]:
    """Return the machines that come with the program."""
    tables = msgspec.toml.decode(Path(__file__).with_name("machines.toml").read_bytes())
    return tuple(msgspec.convert(table, prepared(MachineSpec)) for table in tables["machine"])


def all_machines() -> tuple[list[MachineSpec], list[str]]:
    """Return the machines that come with the program and those in the config folder, which replace one of the same id;
    and a sentence for each file there that is not valid."""
    found = {one.id: one for one in machines()}
    problems: list[str] = []
    for file in sorted(paths.user_machines_dir().glob("*.toml")):
        try:
            one = read_machine(file)
            found[one.id] = one
        except UsageError as error:
            problems.append(error.message)
    return list(found.values()), problems


def find_machine(wanted: str) -> MachineSpec:
    """Return the machine with that id or name, or a part of it that only one has: of the program's or of the user's.
    Raises UsageError: unknown or ambiguous; the hint names the nearest."""
    text = wanted.strip().lower()
    known, problems = all_machines()
    exact = [one for one in known if text in (one.id, one.name.lower())]
    words = _words(text)
    parts = exact or [one for one in known if words and words <= _words(f"{one.id} {one.name}")]
    if len(parts) == 1:
        return parts[0]
    names = [one.id for one in known]
    if parts:
        raise UsageError(f"{wanted} is ambiguous.", f"Use {' or '.join(one.id for one in parts)}.")
    near = difflib.get_close_matches(text, names, n=2, cutoff=0.4) or names
    hint = f"Did you mean {' or '.join(near)}?" if len(near) < 3 else f"Known are {', '.join(names)}."
    more = problems[0] if problems else f"A file in {paths.shown(paths.user_machines_dir())} describes another one."
    raise UsageError(f"Unknown machine {wanted!r}.", f"{hint} {more}")


def _words(name: str) -> frozenset[str]:
    return frozenset(_WORDS.findall(name.lower().replace("×", "x")))


def read_machine(file: Path) -> MachineSpec:
    """Read a user's machine from a TOML file. Raises UsageError: unreadable, or a wrong figure (its key is named)."""
    if not (text := toml.read(file)):
        raise UsageError(f"{paths.shown(file)} is empty, or a link to nothing.")
    table = toml.parse(text, paths.shown(file))
    for key in _FIGURES & table.keys():
        if isinstance(table[key], int | float) and not isinstance(table[key], bool):
            table[key] = {"value": table[key]}
        if isinstance(table[key], dict):
            basis = "measured" if key in ("measured", "decode") else "estimate"
            table[key] = {"basis": basis, "source": f"of {file.name}"} | table[key]
    for key in table.keys() & {"fitted", "draft_factor", "free_gb"}:
        raise UsageError(f"{paths.shown(file)}, {key}: only cpuchat writes this.", "Remove it.")
    table.setdefault("id", _NOT_IN_ID.sub("-", file.stem.lower()).strip("-.+") or "own")
    table.setdefault("name", file.stem)
    if table["id"] == HERE:
        raise UsageError(f"{paths.shown(file)}, id: {HERE} is the machine that cpuchat runs on.", "Choose another id.")
    try:
        return msgspec.convert(table, prepared(MachineSpec))
    except msgspec.ValidationError as error:
        key, reason = explained(error)
        raise UsageError(
            f"{paths.shown(file)}{f', {key}' if key else ''}: {reason}.",
            "`cpuchat plan --machines --json` prints machines in this format.",
        ) from None


USUAL = "Q4_K_M"
_SIZES = [name for name in SHAPES if name[0].isdigit()]  # the others are for tests
_TOO_SMALL = 1e5  # parameters: a header without matrices; the demo draft has a million


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a quantization. `size`: bytes of its file; `kv_rows`: bytes of KV cache for a token, by the sliding
    window of the layers (0: none); `n_ctx_train`: 0 where not known.

    `exact`: from a header; else the sizes of its parts are those of a typical file. `path`: of its file here, "" for
    none. `longest`: tokens of the longest pass over a draft of it (`HeadSequence.max_draft`)."""

    name: str
    quantization: str
    size: float
    work: ModelWork
    kv_rows: dict[int, float]
    n_ctx_train: int = 0
    exact: bool = False
    path: str = ""
    longest: int = MAX_TOKENS

    def kv_bytes(self, n_ctx: int) -> float:
        """Return the bytes of the KV cache for a context of `n_ctx` tokens."""
        n_ubatch = LoadOptions().n_ubatch
        return sum(nbytes * kv_cells(window, n_ctx, n_ubatch) for window, nbytes in self.kv_rows.items())


def find_model(wanted: str, catalog: Catalog, chosen: Settings = _DEFAULTS) -> PlannedModel:
    """Return the model that `wanted` names: a GGUF file or repository here, a catalog id, or a usual size; with its
    quantization behind a colon: `70b:Q4_K_M`. `chosen`: where models are looked for, and how they are loaded. Raises
    ModelNotFound: unknown or ambiguous, with the nearest as its hint; UsageError: an unknown quantization;
    ModelDamaged, ModelUnsupported: it is a file that cannot be read."""
    text = wanted.strip()
    if (whole := _known(text, "", catalog, chosen)) is not None:  # names may have blanks, paths colons
        return whole
    name, quantization, problem = text, "", None
    try:
        name, quantization = _divided(text)
    except UsageError as error:  # or it is a name as Ollama has them: `qwen2.5-coder:7b`
        problem = error
    if quantization and (planned := _known(name, quantization, catalog, chosen)) is not None:
        return planned
    try:
        return from_header(read_model(Library(chosen.model.folders).resolve(text)), options=chosen.load_options())
    except ModelNotFound as error:
        if name.lower().endswith(".gguf"):
            raise
        missing = error.message
    words, beginning = _words(name) or {name}, _PUNCTUATION.sub("", name.lower())
    found = [entry for entry in catalog.models if _PUNCTUATION.sub("", entry.id).startswith(beginning)]
    found = found or [entry for entry in catalog.models if words <= _words(entry.id)]
    if not found and problem is not None and not name.lower().endswith("b"):  # as the size of a model does
        raise problem
    if len(found) == 1:
        return models_here(catalog, chosen, quantization).get(found[0].id) or from_catalog(found[0], quantization)
    if found:
        raise ModelNotFound(f"{name} is ambiguous.", f"Use {_choices([entry.id for entry in found])}.")
    ids = [*_SIZES, *DEMO_FILES, *(entry.id for entry in catalog.models)]
    near = difflib.get_close_matches(name.lower(), ids, n=3, cutoff=0.4)
    hint = f"Did you mean {_choices(near)}? " if near else ""
    raise ModelNotFound(missing, f"{hint}Give a GGUF file, an id of `cpuchat models catalog`, or a size such as 70b.")


def _known(name: str, quantization: str, catalog: Catalog, chosen: Settings) -> PlannedModel | None:
    """Return the catalog model with that id or name, its file here if there is one; the only model here of a usual
    size, else one of that size; None: neither."""
    wanted = name.lower()
    entry = catalog.find(wanted) or next((one for one in catalog.models if one.name.lower() == wanted), None)
    if entry is not None:
        return models_here(catalog, chosen, quantization).get(entry.id) or from_catalog(entry, quantization)
    if wanted not in _SIZES:
        return None
    own = Library(chosen.model.folders).matching(f"{wanted}:{quantization}" if quantization else wanted)
    own = [group for group in own if _words(wanted) <= _words(shown_name(group)) and not group[0].damaged]
    if len(own) == 1:
        file = min(own[0], key=lambda model: rank(model.quantization))
        return from_header(read_model(file.path), options=chosen.load_options())
    return from_header(header_of(wanted, quantization or USUAL), name.upper(), chosen.load_options())


def models_here(catalog: Catalog, chosen: Settings, quantization: str = "") -> dict[str, PlannedModel]:
    """Return the models whose files are on this machine: those of the catalog by id, with that quantization, or any,
    the usual one first; others but the demo's by path. Reads their headers."""
    files = [
        (match_local(catalog, one), one) for group in grouped(Library(chosen.model.folders).local_models())
        if not any(one.source == "demo" for one in group) for one in group  # nor one that was made of a demo model
        if one.damaged is None and quantization in ("", one.quantization)
    ]  # fmt: skip
    files.sort(key=lambda pair: pair[1].quantization != ((pair[0] and pair[0].quantization) or USUAL))
    found: dict[str, PlannedModel] = {}
    for entry, one in files:
        id, name = (entry.id, entry.name) if entry is not None else (str(one.path), shown_name([one]))
        if id not in found:
            with contextlib.suppress(CpuchatError):  # a file that changed just now
                found[id] = from_header(read_model(one.path), name, chosen.load_options())
    return found


def _choices(ids: Sequence[str], max_names: int = 4) -> str:
    return " or ".join(ids[:max_names]) + (f" or {len(ids) - max_names} more" if len(ids) > max_names else "")


def _divided(text: str) -> tuple[str, str]:
    """Return the name and the quantization ("" for the usual one). Raises UsageError: an unknown quantization."""
    name, _, kind = text.rpartition(":")
    kind = kind.upper()
    if not name or "/" in kind or text.lower().endswith(".gguf"):
        return text, ""
    return name.strip(), kind if without_prefix(kind) != kind else quant_type(kind).name


def from_header(header: GGUFHeader, name: str = "", options: LoadOptions = _OPTIONS) -> PlannedModel:
    """Return the model of `header` (of `read_model`), loaded with `options`. Raises UsageError: it has no weights;
    ModelUnsupported."""
    check_supported(header)
    if header.n_params < _TOO_SMALL:
        raise UsageError(f"{file_name(header.path)} has no weights.", "Choose a language model.")
    rows = kv_by_window(header, options.type_k, options.type_v)
    return PlannedModel(
        name=name or header.name,
        quantization=header.quantization,
        size=header.file_size,
        work=model_work(header, options, alike=ALIKE),
        kv_rows={window: float(nbytes) for window, nbytes in rows.items()},
        n_ctx_train=header.n_ctx_train,
        exact=True,
        path=str(header.path) if header.path.is_file() else "",
        longest=2 if header.is_head and header.number("nextn_predict_layers") > 1 else MAX_TOKENS,
    )


def from_catalog(entry: CatalogModel, quantization: str = "") -> PlannedModel:
    """Return a model of the catalog, in its usual quantization by default."""
    kind = quantization or entry.quantization or USUAL
    size = entry.sizes.get(kind, 0.0) * 1e9 or 1e9 * entry.params * quant_type(kind).bits / 8
    work = typical_work(size, kind, params=1e9 * entry.params, active=entry.active_share, id=entry.id)
    kv_rows = {one.window: one.nbytes for one in work.attention}
    return PlannedModel(name=entry.name, quantization=kind, size=size, work=work, kv_rows=kv_rows)


def included_head(model: PlannedModel) -> PlannedModel | None:
    """Return the MTP head that a file here contains, None without one: its weights and KV cache are the model's own."""
    header = read_model(Path(model.path)) if model.path else None
    n_layers = usable_layers(header) if header is not None else 0
    if header is None or not n_layers:
        return None
    work, longest = model_work(header, alike=ALIKE, of_head=True), 2 if n_layers > 1 else MAX_TOKENS
    return msgspec.structs.replace(model, name=title("mtp"), size=0.0, work=work, kv_rows={}, longest=longest)


class ThisMachine:
    """This machine as one to plan for: with the cores and the memory policy of the settings, or those that tuning found
    for a model. Reads each set of cores once, when it is made."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._machine = settings, this_machine(settings)
        self._tuned = TunedMachine(settings, self._machine)

    def of(self, model: PlannedModel | None = None, draft: PlannedModel | None = None) -> MachineSpec:
        """Return the machine for a model and its draft model.

        For files that are here: with the cores that tuning found for the model, if these were measured, and as fast as
        chats with both were. Raises UsageError: the cores of the settings are not possible here."""
        topology, settings, found = machine_topology.read_topology(), self._settings, self._machine
        paths = [Path(one.path) if one is not None and one.path else None for one in (model, draft)]
        if (path := paths[0]) is not None and (own := self._tuned.of(path)) is not found:
            settings, found = self._tuned.settings(path), own
        placement = place(topology, PlacementSpec.of(settings))
        gbs, basis = found.peak / 1e9, "estimate" if found.estimated or found.at_least else "measured"
        low = max(gbs / ROUGH, found.least / 1e9) if found.estimated else 0.0
        high = ROUGH * gbs if found.estimated or found.at_least else 0.0
        factor, draft_factor = (found.factor_of(one) if one is not None else 1.0 for one in paths)
        is_fitted = found.fitted or factor != 1.0  # to this model, if to no other
        l3 = Figure(found.cache_bytes / 1e6, basis="measured", source="cores in use") if found.cache_bytes else None
        return MachineSpec(
            id=HERE,
            name=f"this machine ({topology.name})",
            kind="here",
            cpu=cpu_of(engine_cpu(settings.engine.cpu_module).features),
            cores=Figure(len(placement.cpus), basis="measured", source="the cores in use"),
            clock_ghz=Figure(USUAL_GHZ, basis="estimate", source="not measured"),
            memory_gb=Figure(found.total / 1e9, basis="measured", source="of this machine"),
            free_gb=Figure(max(found.available, 1) / 1e9, basis="measured", source="available now"),
            measured=Figure(gbs, low, high, basis, found.peak_source),
            l3_mb=l3,
            fitted=scaled(found.profile, 1 / factor) if is_fitted and found.profile is not None else None,
            draft_factor=draft_factor / factor if is_fitted else None,
        )


ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
"""Acceptance rates per token: open chat 0.6 to 0.75, code 0.8 to 0.95, with a small model of the same family."""
MAX_USERS = 1024
"""Chats decoded together that are tried: llama-server and vLLM allow some hundred."""


class PlannedWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """The work to plan for: tokens of context per chat, of a prompt, and of an answer, the target `tok_s` of each user,
    and what an hour of the machine costs (0: not known)."""

    n_ctx: int = 8192
    n_prompt: int = 500
    n_answer: int = 300
    tok_s: float = PACE
    usd_per_hour: float = 0.0

    def __post_init__(self) -> None:
        if self.n_prompt + self.n_answer > self.n_ctx:
            raise UsageError(
                f"{self.n_prompt} tokens of prompt and {self.n_answer} of answer exceed the context of {self.n_ctx}.",
                f"Use --ctx {self.n_prompt + self.n_answer} or more.",
            )

    def usd_per_million(self, rates: Range) -> Range | None:
        """Return what a million tokens cost at these rates; None where that is not known."""
        priced = self.usd_per_hour and rates.low > 0
        return rates.map(lambda rate: 1e6 * self.usd_per_hour / (3600 * rate)) if priced else None

    @property
    def n_past(self) -> float:
        """Return the tokens in the context in the middle of an answer."""
        return self.n_prompt + self.n_answer / 2


class Range(msgspec.Struct, frozen=True):
    """A figure between `low` and `high`; `value` is expected."""

    low: float
    value: float
    high: float

    def map(self, change: Callable[[float], float]) -> Range:
        """Return the range of `change(figure)`."""
        low, value, high = sorted(change(one) for one in (self.low, self.value, self.high))
        return Range(low, value, high)

    def below(self, most: float) -> Range:
        """Return the range without what is above `most`, which `value` is not."""
        return Range(self.low, self.value, min(self.high, most))


class Drafted(msgspec.Struct, frozen=True, kw_only=True):
    """With a draft model at an `acceptance` rate per token: the best `depth` (0: off), tok/s and the speed-up."""

    acceptance: float
    depth: int
    tok_s: Range
    speedup: Range

    @property
    def pays(self) -> bool:
        """Return whether drafting is worth a second model."""
        return self.depth > 0 and self.speedup.value >= WORTH


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a machine.

    `tok_s` of one chat in the middle of an answer; None when it does not fit. `read_rate`: bytes of weights per
    second; `in_cache`: L3 holds them. `limit` takes most of a pass, with `limit_share` of it. `ttft_s` of the prompt on
    an idle machine. Ceilings in tok/s: if only reading took time, and if only computing did, which no drafter exceeds.
    `users`: chats that can be decoded together at the target rate each, at most what memory holds (`users_by_memory`).

    `scalar_type`: as of `Prediction`; then no speed is planned."""

    machine: MachineSpec
    model: PlannedModel
    draft: PlannedModel | None
    workload: PlannedWorkload
    memory: MemoryFit
    users_by_memory: int
    bytes_per_token: float
    tok_s: Range | None = None
    read_rate: Range | None = None
    in_cache: bool = False
    limit: str = ""
    limit_share: float = 0.0
    prefill_tok_s: Range | None = None
    ttft_s: Range | None = None
    memory_ceiling: Range | None = None
    compute_ceiling: Range | None = None
    drafted: tuple[Drafted, ...] = ()
    draft_ceiling: Range | None = None
    users: Range | None = None
    shared_tok_s: Range | None = None
    usd_per_million: Range | None = None
    shared_usd_per_million: Range | None = None
    scalar_type: str = ""

    @property
    def verdict(self) -> str:
        """Return whether the machine holds the model, or `no SIMD`."""
        verdict = self.memory.verdict
        return "no SIMD" if self.scalar_type and verdict != "too large" else verdict

    @property
    def why_not(self) -> str:
        """Return why there is no speed; "" when there is one."""
        if self.memory.verdict == "too large":
            return TOO_LARGE
        return why_slow(self.scalar_type) if self.scalar_type else ""


def make_plan(
    machine: MachineSpec,
    model: PlannedModel,
    workload: PlannedWorkload,
    *,
    draft: PlannedModel | None = None,
    options: LoadOptions = _OPTIONS,
) -> CapacityPlan:
    """Plan `model` on `machine`, loaded with `options`."""
    total, n_ctx = 1e9 * machine.memory_gb.value, workload.n_ctx
    if n_ctx == PlannedWorkload().n_ctx:  # as a load chooses it
        n_ctx = max(min(n_ctx, model.n_ctx_train or n_ctx), workload.n_prompt + workload.n_answer)
    available = round(1e9 * machine.free_gb.value if machine.free_gb is not None else total - spare_bytes(total))
    options = msgspec.structs.replace(options, n_ctx=n_ctx, draft_path=draft.path or draft.name if draft else "")
    (need, n_rs_seq), draft_need = _need(machine, model, options, available), _draft_need(machine, draft, options)
    memory = MemoryFit(
        need=need, draft_need=draft_need, available=available, total_memory=round(total), exact=model.exact
    )
    each = memory.need.kv + (draft_need.kv if draft_need is not None else 0)
    plan = CapacityPlan(
        machine=machine,
        model=model,
        draft=draft,
        workload=workload,
        memory=memory,
        users_by_memory=1 + max(memory.available - memory.needed, 0) // each if each else MAX_USERS,
        bytes_per_token=bytes_read(model.work, 1, workload.n_past),
        scalar_type=scalar_type_of(model.work, machine.scalar_types),
    )
    if plan.why_not:
        return plan
    work, past = model.work, workload.n_past
    middle = pass_cost(machine.profile(), work, 1, past)
    tok_s = _over(machine, lambda profile: 1 / pass_cost(profile, work, 1, past).seconds)
    ttft_s = _over(machine, lambda profile: prefill_cost(profile, work, workload.n_prompt).seconds)
    users, shared = _shared(plan)
    read_rate = _over(machine, lambda profile: profile.read_rate(work.weight_bytes))
    in_cache, ceiling = machine.l3_mb is not None and work.weight_bytes <= 1e6 * machine.l3_mb.value, None
    if not in_cache:
        reading = _reading(machine, read_rate)
        ceiling = reading.map(lambda rate: rate / plan.bytes_per_token)
        read_rate, tok_s = read_rate.below(reading.high), tok_s.below(ceiling.high)
    plan = msgspec.structs.replace(
        plan,
        tok_s=tok_s,
        read_rate=read_rate,
        in_cache=in_cache,
        usd_per_million=workload.usd_per_million(tok_s),
        shared_usd_per_million=workload.usd_per_million(shared),
        limit=middle.limit,
        limit_share=middle.limit_share,
        prefill_tok_s=ttft_s.map(lambda seconds: workload.n_prompt / seconds),
        ttft_s=ttft_s,
        memory_ceiling=ceiling,
        compute_ceiling=_over(machine, lambda profile: compute_ceiling(profile, work, past)),
        users=users,
        shared_tok_s=shared,
    )
    if draft is not None and not scalar_type_of(draft.work, machine.scalar_types):
        longest = min(draft.longest, 1 + n_rs_seq if n_rs_seq else MAX_TOKENS)
        *drafted, everything = _drafted(machine, plan, draft, (*ACCEPTANCES, 1.0), longest)
        plan = msgspec.structs.replace(plan, drafted=tuple(drafted), draft_ceiling=everything.tok_s)
    return plan


def _reading(machine: MachineSpec, decoding: Range) -> Range:
    """Return the bytes per second if only reading took time, like the chat's panel: as read, or as passes were found to
    be `decoding` where that is more."""
    passes = Range(*[decoding.value] * 3) if machine.fitted is not None else decoding
    low, value, high = (1e9 * machine.read_gbs.at(name) for name in SCENARIOS)
    return Range(max(low, passes.low), max(value, passes.value), max(high, passes.high))


def _shared(plan: CapacityPlan) -> tuple[Range, Range]:
    """Return how many users a machine serves at once, and the tok/s of all of them."""
    machine, work, past = plan.machine, plan.model.work, plan.workload.n_past
    by_memory = min(plan.users_by_memory, MAX_USERS)
    users = [max_users(machine.profile(name), work, plan.workload.tok_s, past, by_memory) for name in SCENARIOS]
    together = [
        n * batch_rate(machine.profile(name), work, n, past) if n else 0.0
        for name, n in zip(SCENARIOS, users, strict=True)
    ]
    return _ordered(users), _ordered(together)


def _need(machine: MachineSpec, model: PlannedModel, options: LoadOptions, available: int) -> tuple[MemoryNeed, int]:
    """Return the memory of a model, of a file on this machine as the lists have it, and the snapshots of a recurrent
    state: the longest draft, unless 0."""
    n_ctx, header = options.n_ctx, read_model(Path(model.path)) if model.path else None
    if machine.id == HERE and header is not None:
        return plan_memory(header, options, available)
    need = usual_need(model.size, model.work, n_ctx, model.kv_bytes(n_ctx))
    return need, snapshots(header, options) if header is not None else 0


def _draft_need(machine: MachineSpec, draft: PlannedModel | None, options: LoadOptions) -> MemoryNeed | None:
    """Return the memory of a draft model, as `_need`; of the head of the model what does not count with it, elsewhere
    None."""
    if draft is not None and machine.id == HERE and draft.path:
        header = read_model(Path(draft.path))
        return draft_memory(header, options, options.n_ctx, None if draft.size else header)
    if draft is None or not draft.size:
        return None
    kv = draft.kv_bytes(min(options.n_ctx, draft.n_ctx_train or options.n_ctx))
    return MemoryNeed(weights=round(draft.size), repack=0, kv=round(kv), compute=0)


def _over(machine: MachineSpec, figure: Callable[[CostProfile], float]) -> Range:
    """Return a figure with the profiles of all scenarios."""
    return _ordered([figure(machine.profile(name)) for name in SCENARIOS])


def _ordered(figures: Sequence[float]) -> Range:
    low, value, high = figures
    return Range(min(low, high), value, max(low, high))


def _drafted(
    machine: MachineSpec, plan: CapacityPlan, draft: PlannedModel, acceptances: Sequence[float], longest: int
) -> list[Drafted]:
    """Return the speed at each acceptance rate with passes of up to `longest` tokens."""
    work, past = plan.model.work, plan.workload.n_past
    pairs = [pair_costs(machine.profile(name), work, draft.work, past, longest) for name in SCENARIOS]
    found: list[Drafted] = []
    for acceptance in acceptances:
        gains = [
            gain([1e3 * one for one in pair.verify], 1e3 * (machine.draft_factor or 1.0) * pair.draft, acceptance)
            for pair in pairs
        ]
        tok_s = _ordered([best.speedup / pair.verify[0] for best, pair in zip(gains, pairs, strict=True)])
        speedup = _ordered([best.speedup for best in gains])
        found.append(Drafted(acceptance=acceptance, depth=gains[1].depth, tok_s=tok_s, speedup=speedup))
    return found


NONE_HERE: Mapping[str, PlannedModel] = MappingProxyType({})
MachineFor = Callable[[PlannedModel | None, PlannedModel | None], MachineSpec]
"""Returns a machine as a model and its draft model use it, as `ThisMachine.of`."""


def catalog_plans(
    machine_for: MachineFor,
    catalog: Catalog,
    workload: PlannedWorkload,
    here: Mapping[str, PlannedModel] = NONE_HERE,
    options: LoadOptions = _OPTIONS,
) -> list[CapacityPlan]:
    """Return a plan for each chat model of the catalog, in its usual quantization, and each file of `here`
    (`models_here`), that fits the whole memory of the machine, whatever is free now, the fastest first."""
    chat = [entry for entry in catalog.models if entry.use != "draft" and entry.sizes]
    models = {entry.id: here.get(entry.id) or from_catalog(entry) for entry in chat}
    models |= {id: model for id, model in here.items() if catalog.find(id) is None}
    plans = (make_plan(machine_for(model, None), model, workload, options=options) for model in models.values())
    return fastest_first(plan for plan in plans if plan.tok_s is not None)


def fastest_first(plans: Iterable[CapacityPlan]) -> list[CapacityPlan]:
    """Return the plans by speed; those without one last."""
    return sorted(plans, key=lambda plan: plan.tok_s.value if plan.tok_s is not None else 0.0, reverse=True)


def usual_draft(
    target: PlannedModel,
    catalog: Catalog,
    here: Mapping[str, PlannedModel] = NONE_HERE,
    chosen: Settings | None = None,
) -> PlannedModel | None:
    """Return the draft model that a load of a file here takes by the settings `chosen`, else the best that the catalog
    has for one of its models, if any. `here` as of `catalog_plans`."""
    if target.path and chosen is not None:
        wanted, library = chosen.speculation.wanted_draft, Library(chosen.model.folders)
        path, _ = choose_draft(Path(target.path), wanted, library, strict=False)
        if path is not None and is_own(Path(target.path), path):
            return included_head(target)
        if path is not None:
            return from_header(read_model(path), options=chosen.load_options())
    entry = next((one for one in catalog.models if one.name == target.name), None)
    drafts = catalog.drafts_of(entry) if entry is not None else []
    return next((here.get(one.id) or from_catalog(one) for one in drafts if one.sizes), None)
